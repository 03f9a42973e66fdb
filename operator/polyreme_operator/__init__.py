"""The control plane: observe, decide, apply."""
