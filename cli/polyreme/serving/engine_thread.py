"""The thread that owns an engine: answers begin and end by messages to it, and their tokens come back as messages.

A request's tokens wait in a queue of its own, which holds no more than the request may have.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable

from polyreme_api.clock import Clock
from polyreme_api.errors import EnvironmentFailedError, PolyremeError
from polyreme_trainer.serve.engine import Engine, Made, Request

STALL_S = 300.0
"""A step that takes longer hangs, and the server is not healthy."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Answering:
    """A request that is answered."""

    request: Request
    came: asyncio.Queue[Made | PolyremeError] = dataclasses.field(default_factory=asyncio.Queue)
    """Its tokens, or why there are no more."""
    number: int | None = None
    """In the engine; the thread's alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Message:
    answering: Answering
    begin: bool
    """Begin it, or forget it."""


class EngineThread:
    """Runs an engine. Use its methods from the loop that it was started in."""

    def __init__(self, open_engine: Callable[[], Engine], clock: Clock) -> None:
        """Hold no engine yet.

        Args:
            open_engine: Opens one, with an empty cache; again after an error.
            clock: Of this machine.
        """
        self._open, self._clock = open_engine, clock
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._running: dict[int, Answering] = {}
        """By number in the engine; the thread's alone."""
        self._engine = open_engine()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._step_began_s: float | None = None

    def start(self) -> None:
        """Start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end after its step; what is not answered is forgotten."""
        self._inbox.put(None)

    @property
    def pages_used(self) -> int:
        """Pages of the cache that answers hold."""
        return self._engine.pages.total - self._engine.pages.free

    @property
    def pages(self) -> int:
        """Pages of the cache."""
        return self._engine.pages.total

    @property
    def is_alive(self) -> bool:
        """Whether answers are made, or could be."""
        began_s = self._step_began_s
        return self._thread.is_alive() and (began_s is None or self._clock.steady_s() - began_s < STALL_S)

    def begin(self, request: Request) -> Answering:
        """Let a request wait for its turn."""
        answering = Answering(request=request)
        self._inbox.put(_Message(answering, begin=True))
        return answering

    def forget(self, answering: Answering) -> None:
        """Stop answering; one that has ended is ignored."""
        self._inbox.put(_Message(answering, begin=False))

    def _run(self) -> None:
        try:
            while self._take_messages():
                self._step()
        except Exception:  # noqa: BLE001 - the process continues, and is not healthy
            _log.exception("the engine can't be opened again: nothing is answered any more")
            self._fail(EnvironmentFailedError("the engine failed; see the server's log"))

    def _take_messages(self) -> bool:
        """Do what was asked meanwhile; wait for it if there is nothing to answer. False: stop."""
        while self._engine.idle or not self._inbox.empty():
            message = self._inbox.get()
            if message is None:
                return False
            if message.begin:
                self._add(message.answering)
            elif message.answering.number is not None:
                self._engine.cancel(message.answering.number)
                self._running.pop(message.answering.number, None)
        return True

    def _add(self, answering: Answering) -> None:
        try:
            answering.number = self._engine.add(answering.request)
        except PolyremeError as error:
            self._hand_out([(answering, error)])
        else:
            self._running[answering.number] = answering

    def _step(self) -> None:
        self._step_began_s = self._clock.steady_s()
        try:
            made = self._engine.step()
        except Exception as error:  # noqa: BLE001 - one bad step must not end the server
            _log.exception("a step of the engine failed: all answers are dropped, and the cache is emptied")
            self._fail(EnvironmentFailedError(f"the step of the engine failed: {error}"))
            self._engine = self._open()
            return
        finally:
            self._step_began_s = None
        self._hand_out([(self._running[one.request], one) for one in made])
        for one in made:
            if one.ended:
                del self._running[one.request]

    def _fail(self, error: PolyremeError) -> None:
        self._hand_out([(answering, error) for answering in self._running.values()])
        self._running.clear()

    def _hand_out(self, news: list[tuple[Answering, Made | PolyremeError]]) -> None:
        def put() -> None:
            for answering, what in news:
                answering.came.put_nowait(what)

        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended, and who asked with it
            self._loop.call_soon_threadsafe(put)
