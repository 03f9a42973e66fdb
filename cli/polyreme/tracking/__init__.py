"""Trackers: TensorBoard, MLflow and CSV, fed with the committed history of a run."""
