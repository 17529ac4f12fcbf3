"""What plugins declare and models need: torch-free data."""
