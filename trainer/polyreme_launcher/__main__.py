"""``python -m polyreme_launcher``."""

from polyreme_launcher.main import main

raise SystemExit(main())
