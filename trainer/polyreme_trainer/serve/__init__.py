"""Answers: pages of latents, who runs in which step, and the engine that trained ranks decode with."""
