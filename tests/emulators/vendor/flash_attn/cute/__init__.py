"""Emulates flash_attn.cute of flash-attn-4 4.0.0b18 on a machine without CUDA."""
