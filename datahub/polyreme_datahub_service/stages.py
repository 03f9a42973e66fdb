"""Stages of a job's data, which workers of a data flow serve by default."""

STAGES = "compose,tokenize"
"""Each is named after the last operation of its chain."""
