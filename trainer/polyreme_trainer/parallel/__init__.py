"""Parallelism: meshes, collectives, expert dispatch, gradient reduction."""
