"""Topics: where messages between stages travel. Messages are ids only; what they mean is in the registry."""
