"""A late writer deletes while a leader chooses: the real functions on real files, in every order of their effects."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from polyreme.launcher.resume import fix_resume
from polyreme_api.errors import FencedError
from polyreme_api.history import COMMIT_MARKER, checkpoint_name, claim_key
from polyreme_api.marker import CommitMarker
from polyreme_api.progress import CheckpointRef
from polyreme_datahub.objects import open_store
from polyreme_trainer.checkpoint import directory, retention

WRITER, LEADER = 0, 1
WRITER_STEPS, LEADER_STEPS = 5, 4
"""Effects of each: commit, list, look for newer attempts, read points, delete; claim, list, read a marker, put."""
WAIT_S_MAX = 20.0

Pause = Callable[[], None]


class Actors:
    """Threads of which one runs at a time, from one effect to the next."""

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
        except Exception as error:  # noqa: BLE001 - told by the main thread, whatever it is
            self.errors.append(error)
        self._ended[number] = True
        self._rest[number].release()


class PausingStore:
    """An object store that waits for its turn before each call; it can lose claims, to plant the bug."""

    def __init__(self, root: Path, pause: Pause, *, without_claims: bool) -> None:
        self._store, self._pause, self._without_claims = open_store(root.as_uri()), pause, without_claims

    def put_if_absent(self, key: str, data: bytes) -> Any:
        self._pause()
        return None if self._without_claims and key == claim_key(2) else self._store.put_if_absent(key, data)

    def list(self, prefix: str) -> Any:
        self._pause()
        return list(self._store.list(prefix))

    def get(self, key: str) -> bytes:
        self._pause()
        return self._store.get(key)


def save(root: Path, step: int) -> None:
    name = checkpoint_name(CheckpointRef(attempt=1, step=step))
    (root / name).mkdir()
    directory.commit(
        root,
        name,
        CommitMarker(
            attempt=1,
            step=step,
            world=1,
            model_digest="d",
            model_shape={},
            plan_hash="p",
            files={},
            loader={},
            committed_at_s=0.0,
        ),
    )


def orders() -> Iterator[list[int]]:
    """Every order of the effects of both."""
    total = WRITER_STEPS + LEADER_STEPS
    for places in itertools.combinations(range(total), LEADER_STEPS):
        yield [LEADER if place in places else WRITER for place in range(total)]


def lost(root: Path, order: Sequence[int], monkeypatch: pytest.MonkeyPatch, *, without_claims: bool = False) -> bool:
    """Play one order; tell whether the checkpoint that the leader chose is gone."""
    fix_resume(open_store(root.as_uri()), attempt=1, by="one", now_s=0.0)
    save(root, 5)

    def write() -> None:
        save(root, 10)
        retention.retain(root, attempt=1, kept=1)

    chosen: list[str | None] = []

    def lead() -> None:
        store = PausingStore(root, actors.pause, without_claims=without_claims)
        point = fix_resume(store, attempt=2, by="two", now_s=0.0)  # type: ignore[arg-type]
        assert point is not None
        chosen.append(point.resume_from)

    actors = Actors([write, lead])

    def paused(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            actors.pause()
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(directory, "create_if_absent", paused(directory.create_if_absent))
        for name in ("list_checkpoints", "check_not_fenced", "read_resume_points", "remove"):
            patch.setattr(retention, name, paused(getattr(retention, name)))
        actors.play(order)
    assert not actors.errors, (order, actors.errors)
    assert chosen[0] is not None, order
    return not (root / chosen[0] / COMMIT_MARKER).is_file()


@pytest.mark.slow
def test_no_order_of_effects_deletes_what_a_leader_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deleted = 0
    for number, order in enumerate(orders()):
        root = tmp_path / str(number)
        root.mkdir()
        assert not lost(root, order, monkeypatch), order
        deleted += not (root / "a000001-s00000005" / COMMIT_MARKER).is_file()
    assert 0 < deleted < number, "some orders delete, some are fenced"


@pytest.mark.slow
def test_without_a_claim_some_order_deletes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcomes() -> Iterator[bool]:
        for number, order in enumerate(orders()):
            root = tmp_path / str(number)
            root.mkdir()
            yield lost(root, order, monkeypatch, without_claims=True)

    assert any(outcomes())
