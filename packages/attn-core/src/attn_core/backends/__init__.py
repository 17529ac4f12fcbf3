"""The backends that come with attn-core: torch_native, flex_attention, triton."""
