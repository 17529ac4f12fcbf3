"""Measure what backends cost on this machine, and write it down as a profile."""
