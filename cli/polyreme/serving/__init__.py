"""Answers of a trained model: to the questions of a command, and over HTTP."""
