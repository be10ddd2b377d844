"""Integers: requests, scheduler, block table, prefix cache. Never imports torch."""
