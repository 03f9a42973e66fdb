"""The docs as a static site in ``build/site``: every page of the repository for users, with search, for any browser.

Pages are copied with what they link to, at the same relative places, so links between them stay as they are. The site
makes no request to another host; only its search needs a web server. A broken link or anchor ends the build.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from tools.links import CODE, FENCE, HEADING, LINK, pages

ROOT = Path(__file__).parent.parent
DECISIONS = PurePosixPath("docs/adr")
SECTIONS: Mapping[str, str] = {
    ".": "Project",
    "docs": "Background",
    "docs/how-to": "How-to",
    "docs/runbooks": "How-to",
    "docs/reference": "Reference",
    "docs/adr": "Decisions",
    "benchmarks/*": "Benchmarks",
}
"""Folders whose pages are in the site, and the section that lists them."""
ORDER = ("How-to", "Reference", "Background", "Decisions", "Benchmarks", "Project")
HOME = PurePosixPath("README.md")
BARE = ("http:", "https:", "mailto:", "#")


def main() -> int:
    """Build the site with the MkDocs of the given environment; 1 if a link is broken."""
    target = ROOT / "build"
    staged = target / "site-pages"
    shutil.rmtree(staged, ignore_errors=True)
    found = site_pages(page.relative_to(ROOT) for page in pages(ROOT))
    for path, data in site_files(ROOT, found).items():
        (staged / path).parent.mkdir(parents=True, exist_ok=True)
        (staged / path).write_bytes(data)
    titles = {page: title((staged / page).read_text("utf-8")) for page in (*found, DECISIONS / "README.md")}
    config = {"INHERIT": "../mkdocs.yml", "docs_dir": "site-pages", "site_dir": "site", "nav": navigation(titles)}
    (target / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    # With --quiet it would count no warnings. Material announces its successor, which is no concern of who builds.
    command = [sys.argv[1], "build", "--strict", "--config-file", str(target / "mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if built.returncode:
        sys.stderr.writelines(line for line in built.stderr.splitlines(keepends=True) if not line.startswith("INFO"))
        return 1
    print(f"{len(titles)} pages; to read and search them: python3 -m http.server -d build/site", file=sys.stderr)
    return 0


def site_pages(found: Iterable[Path]) -> list[PurePosixPath]:
    """Return the pages that belong to the site, from the paths of all pages relative to the root."""
    return sorted(page for page in map(PurePosixPath, found) if section(page))


def section(page: PurePosixPath) -> str:
    """Return the section of a page; empty if it is not part of the site."""
    return SECTIONS.get(str(page.parent)) or SECTIONS.get(f"{page.parent.parent}/*", "")


def title(text: str) -> str:
    """Return the first heading of a page, without marks."""
    found = HEADING.search(FENCE.sub("", text))
    return "" if found is None else found[1].replace("`", "")


def navigation(titles: Mapping[PurePosixPath, str]) -> list[dict[str, Any]]:
    """Return the menu: the start page, then the sections with all other pages in the order of their titles."""
    menu: dict[str, list[Any]] = {name: [] for name in ORDER}
    for page in sorted(titles, key=lambda page: (page.name != "README.md", _counted(titles[page]))):
        index = page == DECISIONS / "README.md"
        if page != HOME:
            menu[section(page)].append(str(page) if index else {titles[page]: str(page)})
    return [{"Start": str(HOME)}, *({name: entries} for name, entries in menu.items())]


def _counted(words: str) -> tuple[int, str]:
    """Sort titles by their number, if they begin with one."""
    number = re.match(r"(\d+)\. ", words)
    return int(number[1]) if number else 0, words.lower()


def site_files(root: Path, found: Iterable[PurePosixPath]) -> dict[PurePosixPath, bytes]:
    """Return the pages and the files that they link to, and a list of the decisions, which have no page for it."""
    kept, texts = list(found), {}
    files: dict[PurePosixPath, bytes] = {}
    for page in kept:
        texts[page] = (root / page).read_text("utf-8")
        for linked in _linked(root, page, texts[page]):
            files[linked] = (root / linked).read_bytes()
    decisions = {page: title(text) for page, text in texts.items() if page.parent == DECISIONS}
    lines = [f"- [{words}]({page.name})" for page, words in decisions.items()]
    texts[DECISIONS / "README.md"] = "\n".join(["# Decisions", "", *lines, ""])
    return files | {page: to_folders_page(text).encode() for page, text in texts.items()}


def _linked(root: Path, page: PurePosixPath, text: str) -> Iterable[PurePosixPath]:
    """Yield the files, other than pages, that a page links to."""
    for link in LINK.finditer(CODE.sub("", FENCE.sub("", text))):
        target = (link["target"] or link["image"]).partition("#")[0]
        path = (root / page.parent / target).resolve()
        if target and not target.startswith(BARE) and path.is_file() and path.suffix != ".md":
            yield PurePosixPath(path.relative_to(root))


def to_folders_page(text: str) -> str:
    """Let a link to a folder lead to the page that lists it: a repository shows folders, a site does not."""
    return re.sub(r"\]\((?P<folder>(?!https?:)[^)#\s]*/)\)", r"](\g<folder>README.md)", text)


if __name__ == "__main__":
    sys.exit(main())
