"""The runner: leases work items, runs chains of operations on samples, commits what they made."""
