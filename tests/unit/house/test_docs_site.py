"""The docs as a site: the menu lists every page, and the copied pages have all that they link to."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from tools.docs_site import DECISIONS, HOME, navigation, site_files, site_pages, title, to_folders_page
from tools.links import pages

ROOT = Path(__file__).parents[3]
LEFT_OUT = (".github/", "tests/")
"""Folders whose pages are not for users."""


def found() -> list[PurePosixPath]:
    return site_pages(page.relative_to(ROOT) for page in pages(ROOT))


def test_every_page_for_users_is_in_the_site() -> None:
    left_out = {str(page.relative_to(ROOT)) for page in pages(ROOT)} - {str(page) for page in found()}
    assert {page for page in left_out if not page.startswith(LEFT_OUT)} == set()


def test_the_menu_lists_every_page_once_under_its_title() -> None:
    titles = {page: title((ROOT / page).read_text("utf-8")) for page in found()}
    assert [page for page, words in titles.items() if not words] == []
    listed: list[str] = []
    for entry in navigation({**titles, DECISIONS / "README.md": "Decisions"}):
        ((_, section),) = entry.items()
        entries = [section] if isinstance(section, str) else section
        listed += [each if isinstance(each, str) else next(iter(each.values())) for each in entries]
    assert sorted(listed) == sorted(map(str, (*titles, DECISIONS / "README.md")))
    assert listed[0] == str(HOME)


def test_what_pages_link_to_is_copied_with_them() -> None:
    files = site_files(ROOT, found())
    assert PurePosixPath("docs/pictures/report.png") in files
    assert PurePosixPath("LICENSE") in files
    decisions = files[DECISIONS / "README.md"].decode()
    assert "- [5. " in decisions
    assert "](0005-history-by-resume-points.md)" in decisions


def test_a_link_to_a_folder_leads_to_its_page() -> None:
    text = "[decisions](docs/adr/), [a page](docs/map.md), [a site](https://example.com/)"
    assert to_folders_page(text) == (
        "[decisions](docs/adr/README.md), [a page](docs/map.md), [a site](https://example.com/)"
    )
