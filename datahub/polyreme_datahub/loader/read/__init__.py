"""Stored bytes as files of this machine, or ranges of them."""
