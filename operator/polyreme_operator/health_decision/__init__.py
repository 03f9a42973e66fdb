"""Decides about the health of all nodes at once: which leave service, are repaired or return, and their history."""
