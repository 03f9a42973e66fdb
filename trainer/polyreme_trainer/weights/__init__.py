"""Initial weights of a run: files in Hugging Face's format, checked as a whole, read slice by slice."""

from __future__ import annotations

FIELD = "spec.model.weights.location"
"""The field to change when such weights are refused."""
