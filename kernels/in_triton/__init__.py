"""Kernels in Triton, for any device that has a Triton compiler. Portable: pointer loads, float32 arithmetic."""
