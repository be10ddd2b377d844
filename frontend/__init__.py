"""Text: HTTP, templates, tokenizing, streaming; and the supervisor that starts everything. Never imports torch."""
