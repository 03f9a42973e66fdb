"""The training loop: settings, optimizer, step, evaluation, entry of a rank."""
