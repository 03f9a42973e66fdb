"""Checkpoints: saved by all ranks in the background, committed by one marker, loadable into any layout."""
