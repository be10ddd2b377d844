"""Single and split GGUF files, converted once into a Hugging Face directory. Torch-free."""
