"""Measurements: each module with a main is a command, and every result it keeps is a file."""
