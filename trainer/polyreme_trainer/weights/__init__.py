"""Weights that a run starts from: files of Hugging Face's form, checked as a whole, read slice by slice."""

from __future__ import annotations

FIELD = "spec.model.weights.location"
"""The field to change when such weights are refused."""
