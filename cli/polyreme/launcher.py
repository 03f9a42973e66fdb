"""``python -m polyreme.launcher``: the command that version 0.1.0 stored in pods; it runs ``polyreme_launcher``."""

from polyreme_launcher.main import main

if __name__ == "__main__":
    raise SystemExit(main())
