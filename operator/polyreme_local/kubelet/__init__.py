"""A kubelet whose pods are processes of this machine."""
