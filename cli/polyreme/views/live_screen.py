"""Live part of a terminal: the lines below the cursor, drawn again while a command works; nothing off a terminal.

It is drawn on standard error, and standard output stays what the caller prints: data goes through a pipe unchanged.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live


class LiveScreen:
    """Draws on a terminal between ``with`` and its end; the last state stays on the screen."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console if console is not None else Console(stderr=True)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Begin; on a terminal the drawing takes the lines below the cursor."""
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(console=self.console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    @property
    def is_live(self) -> bool:
        """Whether there is a terminal to draw on."""
        return self._live is not None

    def draw(self, what: RenderableType) -> None:
        """Draw in place of what was drawn before; nothing happens off a terminal."""
        if self._live is not None:
            self._live.update(what, refresh=True)
