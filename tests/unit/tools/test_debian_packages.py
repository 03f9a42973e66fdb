"""The packages of Debian that images and nodes need."""

from __future__ import annotations

from tools.debian_packages import commands, missing


def test_only_what_is_missing_is_installed_each_once() -> None:
    assert missing(lambda program: True) == []
    assert missing(lambda program: program not in {"nsenter", "unshare", "buildah"}) == ["buildah", "util-linux"]


def test_packages_are_installed_without_questions_and_recommendations() -> None:
    update, install = commands(["buildah", "runc"])
    assert update[-1] == "update"
    assert install[-2:] == ["buildah", "runc"]
    assert {"--yes", "--no-install-recommends"} <= set(install)
