"""Check that every relative link in the repository's Markdown leads to a file, and every anchor to a heading."""

import re
import subprocess
import sys
from pathlib import Path

LINK = re.compile(r"(?<!!)\[[^\]]*\]\((?P<target>[^)\s]+)\)|!\[[^\]]*\]\((?P<image>[^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def main() -> int:
    """Check every page that git knows; 1 when a link is broken."""
    root = Path(__file__).parent.parent
    broken = [offence for page in pages(root) for offence in broken_links(page)]
    print("\n".join(broken) or "every link leads somewhere", file=sys.stderr)
    return int(bool(broken))


def pages(root: Path) -> list[Path]:
    """Every Markdown file that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [root / name for name in listing.split("\0") if name and (root / name).exists()]


def broken_links(page: Path) -> list[str]:
    """Say which links of one page lead nowhere; addresses of other hosts are not followed."""
    offences = []
    for link in LINK.finditer(CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))):
        target = link["target"] or link["image"]
        if "://" in target or target.startswith("mailto:"):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            offences.append(f"{page}: no file {target}")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            offences.append(f"{page}: no heading {target}")
    return offences


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


if __name__ == "__main__":
    sys.exit(main())
