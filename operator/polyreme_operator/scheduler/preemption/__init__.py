"""Which running jobs to preempt for a waiting one: candidates, space, search."""
