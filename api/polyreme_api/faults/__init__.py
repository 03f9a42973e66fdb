"""Faults of nodes: the table of codes."""
