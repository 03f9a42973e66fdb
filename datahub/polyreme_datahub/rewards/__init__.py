"""Rewards of a model's own answers: shipped functions, and the sandbox in which any function runs."""
