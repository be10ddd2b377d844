"""Plain PyTorch: the definition of correct, the last link of every chain, the oracle in tests."""
