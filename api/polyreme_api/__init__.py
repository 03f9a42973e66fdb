"""Types and rules that the planes of polyreme share, and nothing else: standard library and pydantic only."""
