"""The console over a cluster: its jobs as the console's runs, and a page of queues and nodes."""
