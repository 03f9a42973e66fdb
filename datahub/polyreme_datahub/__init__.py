"""The data plane: registry, pipeline, lakehouse, loader."""
