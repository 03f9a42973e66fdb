"""Mutation testing of pure modules: one-line bugs planted in memory, and the tests that notice them."""
