"""A journal that takes long to read delays no thread that needs sealed steps alone."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.errors import NotSealedError
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.sample.growth import Growth
from tests.unit.datahub.jobs import Home, digits, make_spec

pytestmark = pytest.mark.slow


class SlowGrowth(Growth):
    """Blocks of a journal whose answer is late."""

    def __init__(self) -> None:
        super().__init__(())
        self.asked, self.answered = threading.Event(), threading.Event()

    def look(self) -> bool:
        self.asked.set()
        assert self.answered.wait(60)
        return False


def test_a_sealed_step_is_read_while_the_journal_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, spec = Home(tmp_path), make_spec(["one"])
    home.register("one", digits(1, pages=20))
    home.process(spec)
    source = job_packs.open_source(home.objects, spec)
    growth, packs = SlowGrowth(), source._steps._order.packs

    def some(step: int) -> Any:
        if step == 2:
            raise NotSealedError("step 2 needs a block")
        return packs(step)

    monkeypatch.setattr(source._steps, "growth", growth)
    monkeypatch.setattr(source._steps._order, "packs", some)
    failed: list[Exception] = []

    def read() -> None:
        try:
            source.turns({}, 2)
        except NotSealedError as error:
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert growth.asked.wait(60)
    source.turns({}, 1)
    growth.answered.set()
    thread.join()
    assert len(failed) == 1
