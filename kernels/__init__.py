"""Named operations with a reference meaning, and the ways to compute them."""
