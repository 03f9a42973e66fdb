"""The embedded cluster: an object store with the semantics of the Kubernetes API, in one process."""
