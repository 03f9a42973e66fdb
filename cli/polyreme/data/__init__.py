"""The data pipeline of a local run: its worker process, and the keeper that restarts it."""
