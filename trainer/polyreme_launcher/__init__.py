"""The launcher: one process in every pod; it forks the ranks, and agrees with the other launchers when they may run."""
