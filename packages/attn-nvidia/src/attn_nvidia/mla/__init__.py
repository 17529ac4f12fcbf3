"""Decode of absorbed MLA: FlashMLA, CUTLASS MLA."""
