"""Runs operations on samples in resource-limited child processes."""
