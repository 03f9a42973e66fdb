"""``python -m polyreme.launcher``."""

from polyreme.launcher.main import main

raise SystemExit(main())
