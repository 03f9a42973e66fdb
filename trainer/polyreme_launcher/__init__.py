"""The launcher: one process in every pod; it forks the ranks, and agrees with the others when they may run."""
