"""Node health: from the signs of a fault to a taint, and back; pure decisions that take the time as an argument."""
