"""Implementations in C++ for CPUs, compiled on first use and cached."""
