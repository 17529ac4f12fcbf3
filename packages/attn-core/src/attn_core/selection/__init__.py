"""Select backends and explain the choice: pure functions without torch."""
