"""Access to Kubernetes for every process: the port, its adapters, leader election, and a process's logs and metrics."""
