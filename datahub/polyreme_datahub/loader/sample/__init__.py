"""Samples: from their encoded bytes to the documents of a pack."""
