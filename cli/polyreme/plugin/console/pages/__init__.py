"""Pages of a cluster alone."""
