"""Adapters of the ports: what talks to the world."""
