"""Makes the small worlds of the unit tests importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "operator"))
