"""Queueing: the tree of queues, what is left of their quotas, the order of what waits, and which jobs may fill gaps."""
