"""Decisions about one job: what its pods, its progress and its status call for."""
