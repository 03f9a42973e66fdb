"""Pages of a home alone: this machine and its data."""
