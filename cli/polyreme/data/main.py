"""``python -m polyreme.data.main``: the command of chart 0.1.0; it runs ``polyreme_datahub_service``."""

from polyreme_datahub_service.main import main

if __name__ == "__main__":
    raise SystemExit(main())
