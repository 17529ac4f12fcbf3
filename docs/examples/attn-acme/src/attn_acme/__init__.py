"""The rows of the acme backend, as data: selecting a backend imports no torch."""

from collections.abc import Sequence

from attn_core import BackendSpec, Capabilities, hookimpl

ROW = Capabilities(
    kind="mha",
    device="cpu",
    dtypes={"fp32", "bf16"},
    kv_dtypes={"fp32", "bf16"},
    priority=40,
    sliding_window=True,
    lse=True,
    needs_host_lengths=True,
)


@hookimpl
def attn_register_backends() -> Sequence[BackendSpec]:
    """Declare the backend. The class that runs it is named, not imported."""
    return [BackendSpec(name="acme", capabilities=[ROW], create="attn_acme.backend:Acme")]
