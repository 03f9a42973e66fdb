"""The Kubernetes API as a cluster: the adapter that the operator runs on in production."""
