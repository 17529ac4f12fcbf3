"""Checks of sparse MLA by the way in which a Hopper device attends to their selections."""

# check and dtype → way. "gathered": Hopper's latent decode reads the selected tokens, in 16 bits;
# "cut": likewise, the keys of a query by several programs. "decoded": the selected FP8 latents are
# decoded before; "pages": all pages of the pass are, where it has fewer tokens than it selects.
# "portable": the kernel of all devices, which alone multiplies in float32.
ROUTES = {
    ("dsa-prefill", "fp32"): "portable",
    ("dsa-decode-fp8", "fp32"): "portable",
    ("dsa-decode", "bf16"): "gathered",
    ("dsa-many-selected", "bf16"): "cut",
    ("dsa-prefill-fp8", "bf16"): "pages",
    ("dsa-decode-fp8", "bf16"): "decoded",
    ("dsa-verify-chain-fp8", "bf16"): "decoded",
}
