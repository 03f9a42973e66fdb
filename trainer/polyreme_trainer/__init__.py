"""The trainer: model, parallelism, checkpoints, loop."""
