"""The reference backend: every feature, on any device that torch has."""
