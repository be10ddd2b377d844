"""Implementations that stay in PyTorch but batch better than the references."""
