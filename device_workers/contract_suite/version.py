"""Which contract this suite judges."""

SUITE_VERSION = "1.0"
"""The first number changes when a platform that passed may fail, the second when clauses are added that it may
decline."""
