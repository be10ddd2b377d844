"""From files to tensors: safetensors, GGUF, random."""
