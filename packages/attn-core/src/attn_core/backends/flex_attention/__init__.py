"""torch's flex_attention over a paged cache."""
