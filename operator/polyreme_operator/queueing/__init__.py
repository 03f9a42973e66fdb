"""Who goes next: the tree of queues, what is left of their quotas, the order of what waits, and who may fill gaps."""
