"""The index: what a loader needs of a dataset version, as arrays to map into memory."""
