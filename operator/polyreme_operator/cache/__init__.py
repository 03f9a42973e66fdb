"""Indexes of the observed cluster: jobs, pods, nodes, Leases, children, plans, usage."""
