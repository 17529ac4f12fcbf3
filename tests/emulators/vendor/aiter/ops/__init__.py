"""AITER's operators."""
