"""Seeded simulation of the real operator and the real launcher machines on the embedded store, in virtual time."""
