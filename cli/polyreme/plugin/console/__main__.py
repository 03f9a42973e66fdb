"""The console in a cluster, as a process."""

import sys

from polyreme.plugin.console.served import main

if __name__ == "__main__":
    sys.exit(main())
