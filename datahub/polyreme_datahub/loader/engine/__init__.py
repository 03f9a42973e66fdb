"""A data engine: one process of a pod that prepares packs for its ranks."""
