"""``python -m polyreme.plugin``: the same as ``kubectl-polyreme``."""

from polyreme.plugin.main import main

main()
