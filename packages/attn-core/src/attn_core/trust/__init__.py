"""Compare backends where they serve: a shadow, files that reproduce a difference, bisection."""
