"""Find plugins and validate what they declare, without torch."""
