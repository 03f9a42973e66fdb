"""Programs of the distribution: what is missing is named, and installed by root alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools import debian
from tools.build_cache import BuildError


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """PATH with one folder, and no plugins elsewhere."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(debian, "CNI_FOLDERS", ())
    return tmp_path


def program(folder: Path, name: str) -> None:
    (folder / name).write_text("#!/bin/sh\nexit 0\n")
    (folder / name).chmod(0o755)


def test_packages_of_missing_programs_are_named_once(bare: Path) -> None:
    program(bare, "runc")
    assert debian.missing_packages(["runc", "nsenter", "unshare", "buildah"]) == ["buildah", "util-linux"]
    debian.install(["runc"])


@pytest.mark.usefixtures("bare")
def test_without_root_nothing_is_installed_and_the_reason_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BuildError, match=r"^apt-get install buildah debootstrap: only root may, this is user 1000; "):
        debian.install(debian.FOR_IMAGES)


def test_what_apt_get_says_is_quoted(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(debian, "LOCK", bare / "lock")
    (bare / "apt-get").write_text('#!/bin/sh\ncase "$3" in update) exit 0;; esac\necho "E: no network" >&2\nexit 100\n')
    (bare / "apt-get").chmod(0o755)
    said = r"^apt-get install --yes --no-install-recommends buildah: exit code 100: E: no network$"
    with pytest.raises(BuildError, match=said):
        debian.install(["buildah"])
