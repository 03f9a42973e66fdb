"""The data that a run trains on, shown to people."""
