"""What a run trains on, as people see it."""
