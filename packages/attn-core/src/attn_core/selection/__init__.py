"""Choosing backends and answering why: pure, torch-free."""
