"""What the operator publishes: events, metrics, pending reasons, status of queues."""
