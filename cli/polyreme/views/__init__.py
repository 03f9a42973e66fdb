"""Output of commands: tables, live progress, numbers in words."""
