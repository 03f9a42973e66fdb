"""The cluster of ``polyreme run``: an API server in one process, and a kubelet whose pods are processes."""
