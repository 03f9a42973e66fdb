"""Stages of a job's data, which workers of a data flow serve unless told otherwise."""

STAGES = "compose,tokenize"
"""Each is named after the last operation of its chain."""
