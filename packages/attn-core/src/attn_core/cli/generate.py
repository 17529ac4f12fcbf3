"""`attn generate` (being written)."""


def generate_command() -> None:
    """Generate text."""
