"""What a model wrote, taken apart as it comes: reasoning, text and tool calls, the same for every chunking."""
