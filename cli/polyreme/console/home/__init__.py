"""Runs of a home: its index, its files and the commands that act on them."""
