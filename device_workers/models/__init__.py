"""Native models, written to read like the papers."""
