"""What a model wrote, read as it comes: its reasoning, its tool calls, and its text."""
