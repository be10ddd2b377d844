"""A small accelerator that lives in host memory, and everything Trimaran needs to serve on it."""
