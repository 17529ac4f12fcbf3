"""What the wrappers of several libraries share."""
