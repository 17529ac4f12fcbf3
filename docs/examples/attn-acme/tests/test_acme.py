"""Run the conformance suite on everything that acme's rows declare."""

from attn_core.testing import BackendSuite


class TestAcme(BackendSuite):
    name = "acme"
