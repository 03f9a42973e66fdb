"""Stages: ingest, decode, compose, tokenize, index. Each is a function of bytes and parameters, reused by its action's key."""
