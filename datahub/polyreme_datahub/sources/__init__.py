"""Sources: what datasets are made from. A description is JSON-able and stands in the registry; it opens as a ``Source``."""
