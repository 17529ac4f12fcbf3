"""Hold acme to everything that its rows declare."""

from attn_core.testing import BackendSuite


class TestAcme(BackendSuite):
    name = "acme"
