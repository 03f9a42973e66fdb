"""One run on this machine: its embedded cluster, its data, and what is refused before it starts."""
