"""This machine, for the planes and the command line: clock, atomic files. Standard library only."""
