"""Measuring a server from outside: workloads, a client that is not the bottleneck, the report."""
