"""What a worker keeps in device memory: the plan of it and the KV cache."""
