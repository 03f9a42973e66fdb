"""Publications of the operator: events, metrics, pending reasons, status of queues."""
