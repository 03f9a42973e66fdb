"""Topics: where messages between stages travel. Messages are ids only; what they mean stands in the registry."""
