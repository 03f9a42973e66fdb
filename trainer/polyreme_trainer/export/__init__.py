"""Trained weights in the form that other software reads."""
