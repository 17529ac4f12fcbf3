"""The paged KV cache: pools, page tables, allocation."""
