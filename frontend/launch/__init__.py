"""Command line, options and the supervisor."""
