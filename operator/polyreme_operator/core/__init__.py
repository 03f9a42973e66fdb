"""The decisions of the operator: pure functions of a snapshot and the time."""
