"""Finding plugins and checking what they declare; torch-free."""
