"""Threads that open different sources do not wait for each other; leases are freed by machine, not by host name."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polyreme_datahub.runner import context, owners
from polyreme_datahub.runner.context import SOURCES_MAX, Sources


def version(number: int) -> Any:
    return SimpleNamespace(id=number, source=number)


def test_opening_one_source_delays_no_other_and_each_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def open_source(source: int, _lakehouse: object) -> object:
        opened.append(source)
        if source == 1:
            begun.set()
            assert go_on.wait(60)
        return object()

    monkeypatch.setattr(context, "open_source", open_source)
    sources, found = Sources(), list[object]()
    threads = [
        threading.Thread(target=lambda: found.append(sources.open(version(1), cast(Any, None)))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    sources.open(version(2), cast(Any, None))
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert sorted(opened) == [1, 2]
    for number in range(3, SOURCES_MAX + 4):
        sources.open(version(number), cast(Any, None))
    assert len(sources._opened) == SOURCES_MAX


def test_a_source_that_could_not_be_opened_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [OSError("away"), "source"]

    def open_source(_source: int, _lakehouse: object) -> object:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(context, "open_source", open_source)
    sources = Sources()
    with pytest.raises(OSError, match="away"):
        sources.open(version(1), cast(Any, None))
    assert cast(object, sources.open(version(1), cast(Any, None))) == "source"


def test_a_pod_in_the_nodes_network_frees_no_lease_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods in the network of a node have its host's name, and each counts its processes from 1."""
    mine = owners.owner_name()
    machine, _, rest = mine.partition("/")
    dead = f"{machine}/{rest.split('/')[0]}/0/{'0' * 16}"
    assert owners._is_dead(dead)
    assert not owners._is_dead(mine)
    other = tmp_path / "pid"
    other.symlink_to("pid:[4026539999]")
    monkeypatch.setattr(owners, "PROCESSES", other)
    assert owners.owner_name().partition("/")[0] != machine
    assert not owners._is_dead(dead), "another pod's process, whatever runs here under its number"
    assert not owners._is_dead(f"{machine.split('.')[0]}/1/0/{'0' * 16}"), "a name of an earlier release"
