"""``python -m polyreme_operator``."""

import sys

from polyreme_operator.main import main

if __name__ == "__main__":
    sys.exit(main())
