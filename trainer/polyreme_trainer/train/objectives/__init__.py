"""Objectives: what the log-probabilities of a stage's answers are worth, and in which direction they should move."""
