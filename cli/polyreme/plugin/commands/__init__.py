"""The verbs of ``kubectl polyreme``."""
