"""Refuse files that a reader or a diff would stumble over: stray whitespace, conflict markers, large blobs."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

FILE_BYTES_MAX = 512 * 1024
RULES = {
    "trailing whitespace": re.compile(rb"[ \t]+$", re.MULTILINE),
    "carriage return": re.compile(rb"\r"),
    "conflict marker": re.compile(rb"^(?:<{7}|>{7}) ", re.MULTILINE),
    "no newline at the end": re.compile(rb"[^\n]\Z"),
    "blank lines at the end": re.compile(rb"\n\n\Z"),
}


def main(names: Sequence[str]) -> int:
    """Check the named files; 1 when one offends."""
    found = [f"{name}: {offence}" for name in names for offence in offences(Path(name).read_bytes())]
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return int(bool(found))


def offences(content: bytes) -> list[str]:
    """Say what is wrong with one file; a binary one may only be too large."""
    large = [f"more than {FILE_BYTES_MAX} bytes"] if len(content) > FILE_BYTES_MAX else []
    if b"\0" in content:
        return large
    return large + [name for name, rule in RULES.items() if rule.search(content)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
