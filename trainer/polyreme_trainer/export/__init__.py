"""Trained weights in the format of other software."""
