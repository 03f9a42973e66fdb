"""Choice of running jobs to preempt for a waiting one: policy, cost, freed space, search."""
