"""Recipes: declared graphs of operations."""
