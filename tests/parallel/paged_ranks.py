"""Ranks whose pages a test reads as a launcher does, and faults that pages show."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyreme_api.rank_state import STEP, RankState
from polyreme_launcher.rank_pages import RankPages
from polyreme_planner.layout import Layout
from polyreme_trainer import rank_page
from polyreme_trainer.train import loop
from tests.parallel.gangs import Gang


class Paged:
    """A gang with pages."""

    def __init__(self, gang: Gang, pages: RankPages) -> None:
        self.gang, self._pages = gang, pages

    def look(self) -> list[RankState]:
        """Look at all ranks once; none may have ended."""
        assert all(process.is_alive() for process in self.gang.processes), self.gang.logs()
        return list(self._pages.read(time.monotonic_ns()).values())

    def limit(self, until_ns: int) -> None:
        """Let no step begin after a time."""
        self._pages.limit(until_ns)


@contextlib.contextmanager
def paged(start: Any, root: Path, layout: dict[str, int], **request: Any) -> Iterator[Paged]:
    """Start a gang that trains without an end, and end it with the block."""
    pages = RankPages()
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(pages.open(rank, time.monotonic_ns())) for rank in range(Layout(**layout).world)]
        paths = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in opened]
        gang = start("train", layout=layout, root=root, steps=10_000, interval=10_000, pages=paths, **request)
        stack.callback(gang.kill)
        yield Paged(gang, pages)
    pages.close()


def watched(request: Mapping[str, Any], rank: int) -> None:
    """Give this rank its page, and the fault that the test wants of it."""
    if "pages" in request:
        rank_page.attach(os.open(request["pages"][rank], os.O_RDWR))
    if request.get("slow_rank") == rank:
        _slow_down()
    if request.get("skips_send") == rank:
        _skip_send()
    if request.get("stays_away") == rank:
        _stay_away()


def _slow_down(share: float = 0.5) -> None:
    """Let this rank sleep for a share of the CPU time of each forward and backward: it then takes 1.5 times as long."""
    real = vars(loop)["backward"]

    def slow(*arguments: Any, **options: Any) -> Any:
        began_s = time.process_time()
        local = real(*arguments, **options)
        time.sleep(share * (time.process_time() - began_s))
        return local

    vars(loop)["backward"] = slow


def _stay_away(step: int = 2) -> None:
    """Let this rank wait for nothing before its forward pass, while others enter exchanges."""
    real = vars(loop)["backward"]

    def backward(state: Any, *arguments: Any, **options: Any) -> Any:
        while state.step + 1 == step:
            time.sleep(1.0)
        return real(state, *arguments, **options)

    vars(loop)["backward"] = backward


def _skip_send(step: int = 2, microbatch: int = 1) -> None:
    """Let this rank forget to send one output to the next stage, and record it as sent."""
    # It imports torch's compiler: test_gradient_grid sees that ranks without stages do not.
    from polyreme_trainer.parallel import pipeline_stage

    real: Any = pipeline_stage.RecordedStage.get_fwd_send_ops

    def sends(self: Any, chunk: int) -> Any:
        ops = real(self, chunk)
        return [] if (rank_page._PAGE.numbers[STEP], chunk) == (step, microbatch) else ops

    vars(pipeline_stage)["RecordedStage"].get_fwd_send_ops = sends
