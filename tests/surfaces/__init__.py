"""Simulated driver surfaces: torch modules, management library and host files of hardware that is not here.

The platforms' real code runs on them. Tensors lie on the CPU; streams, events, graphs and the allocator are simulated
here, with the names and signatures that `tests/contracts/test_surface_truth.py` compares with the vendors' own.
"""
