"""What plugins declare and what models need, as torch-free data."""
