"""The loader: packs as a pure function of (plan, step). Only NumPy and the standard library, safe after a fork."""
