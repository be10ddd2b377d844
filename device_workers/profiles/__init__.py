"""Capability files: what vendors declare of their devices, read, merged with what is detected, written. Torch-free."""
