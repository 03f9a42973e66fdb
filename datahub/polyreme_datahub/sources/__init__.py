"""Sources: what datasets are made from. A description is in the registry, and opens as a ``Source``."""
