"""Sources: what datasets are made from. A description stands in the registry, and opens as a ``Source``."""
