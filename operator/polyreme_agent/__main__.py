"""``python -m polyreme_agent``."""

import sys

from polyreme_agent.main import main

if __name__ == "__main__":
    sys.exit(main())
