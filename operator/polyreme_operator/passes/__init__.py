"""Passes of the operator: each looks at a job or the cluster, decides, and writes the decision."""
