"""Stages: ingest, decode, compose, tokenize, index. Each is a function of bytes, reused by its action's key."""
