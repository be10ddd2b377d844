"""What crosses a process boundary, and how. Imports nothing of ours; never torch."""
