"""Ordered work on a device: the contract and its implementations."""
