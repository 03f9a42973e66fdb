"""Topics: where messages between operations travel. Messages are ids only; what they mean is in the registry."""
