"""Rollouts: the answers that a model in training gives to the prompts of a step, their rewards, and their record."""
