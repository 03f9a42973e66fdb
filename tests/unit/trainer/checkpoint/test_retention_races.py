"""A late writer deletes while a leader chooses: the real functions on real files, in every order of their effects."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.errors import FencedError
from polyreme_api.history import COMMIT_MARKER, claim_key
from polyreme_launcher.resume import fix_resume
from polyreme_trainer.checkpoint import retention
from tests.roots import commit_empty, store_at

WRITER, LEADER = 0, 1
WRITER_STEPS, LEADER_STEPS = 6, 4
"""Turns of each: look for newer attempts, commit, list, look again, delete the marker, list what else there is; claim,
list, read the older marker, put."""
OLDER = "a000001-s00000005/COMMIT.json"
WAIT_S_MAX = 20.0

Pause = Callable[[], None]


class Actors:
    """Threads that run one at a time, from one effect to the next."""

    def __init__(self, bodies: Sequence[Callable[[], None]]) -> None:
        self._go = [threading.Semaphore(0) for _ in bodies]
        self._rest = [threading.Semaphore(0) for _ in bodies]
        self._ended = [False for _ in bodies]
        self._mine = threading.local()
        self._threads = [threading.Thread(target=self._run, args=(n, body)) for n, body in enumerate(bodies)]
        self.errors: list[Exception] = []

    def pause(self) -> None:
        """Stand before an effect until it is this thread's turn."""
        number = getattr(self._mine, "number", None)
        if number is not None:
            self._rest[number].release()
            self._go[number].acquire()

    def play(self, order: Sequence[int]) -> None:
        """Let effects happen in this order, then everybody to the end."""
        for thread, rest in zip(self._threads, self._rest, strict=True):
            thread.start()
            assert rest.acquire(timeout=WAIT_S_MAX)
        for number in [*order, *itertools.chain.from_iterable([n] * 20 for n in range(len(self._go)))]:
            if not self._ended[number]:
                self._go[number].release()
                assert self._rest[number].acquire(timeout=WAIT_S_MAX)
        for thread in self._threads:
            thread.join(WAIT_S_MAX)

    def _run(self, number: int, body: Callable[[], None]) -> None:
        self._mine.number = number
        try:
            body()
        except FencedError:
            pass
        except Exception as error:  # noqa: BLE001 - reported by the main thread, whatever it is
            self.errors.append(error)
        self._ended[number] = True
        self._rest[number].release()


class PausingStore:
    """An object store that waits for its turn before each call; it can lose claims, to plant the bug."""

    def __init__(self, root: Path, pause: Pause, *, reads_wait: bool, without_claims: bool) -> None:
        self._reads_wait = reads_wait
        self._store, self._pause, self._without_claims = store_at(root), pause, without_claims
        self.calls = 0

    def put_if_absent(self, key: str, data: bytes) -> Any:
        self._turn()
        return None if self._without_claims and key == claim_key(2) else self._store.put_if_absent(key, data)

    def list(self, prefix: str) -> Any:
        self._turn()
        return list(self._store.list(prefix))

    def get(self, key: str) -> bytes:
        if self._reads_wait and key == OLDER:
            self._turn()
        return self._store.get(key)

    def delete(self, key: str) -> None:
        self._turn()
        self._store.delete(key)

    def _turn(self) -> None:
        self.calls += 1
        self._pause()


def orders() -> Iterator[list[int]]:
    """Every order of the effects of both."""
    total = WRITER_STEPS + LEADER_STEPS
    for places in itertools.combinations(range(total), LEADER_STEPS):
        yield [LEADER if place in places else WRITER for place in range(total)]


def lost(root: Path, order: Sequence[int], *, without_claims: bool = False) -> bool:
    """Play one order; tell whether the checkpoint that the leader chose is gone."""
    fix_resume(store_at(root), attempt=1, by="one", now_s=0.0)
    commit_empty(store_at(root), 1, 5)
    stores: list[Any] = []

    def write() -> None:
        commit_empty(stores[WRITER], 1, 10)
        retention.retain(stores[WRITER], attempt=1, rule=retention.Rule(kept=1), now_s=0.0)

    chosen: list[str | None] = []

    def lead() -> None:
        point = fix_resume(stores[LEADER], attempt=2, by="two", now_s=0.0)
        assert point is not None
        chosen.append(point.resume_from)

    actors = Actors([write, lead])
    stores += [
        PausingStore(root, actors.pause, reads_wait=who == LEADER, without_claims=without_claims)
        for who in (WRITER, LEADER)
    ]
    actors.play(order)
    assert not actors.errors, (order, actors.errors)
    assert stores[WRITER].calls <= WRITER_STEPS, stores[WRITER].calls
    assert stores[LEADER].calls <= LEADER_STEPS, stores[LEADER].calls
    assert chosen[0] is not None, order
    return not (root / chosen[0] / COMMIT_MARKER).is_file()


@pytest.mark.slow
def test_no_order_of_effects_deletes_what_a_leader_chose(tmp_path: Path) -> None:
    deleted = 0
    for number, order in enumerate(orders()):
        root = tmp_path / str(number)
        root.mkdir()
        assert not lost(root, order), order
        deleted += not (root / "a000001-s00000005" / COMMIT_MARKER).is_file()
    assert 0 < deleted < number, "some orders delete, some are fenced"


@pytest.mark.slow
def test_without_a_claim_some_order_deletes_it(tmp_path: Path) -> None:
    def outcomes() -> Iterator[bool]:
        for number, order in enumerate(orders()):
            root = tmp_path / str(number)
            root.mkdir()
            yield lost(root, order, without_claims=True)

    assert any(outcomes())
