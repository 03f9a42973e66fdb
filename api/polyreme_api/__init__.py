"""What the planes of polyreme agree on, and nothing else: standard library and pydantic only."""
