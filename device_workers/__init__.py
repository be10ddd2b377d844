"""Tensors: platform, backend, streams, kernels, model. One process per device."""
