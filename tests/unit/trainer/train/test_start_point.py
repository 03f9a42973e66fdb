"""A run begins with a checkpoint of another one, or is refused in one sentence, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyreme_api.commit_marker import CommitMarker, seal
from polyreme_api.errors import InvalidConfigError, RefusedError
from polyreme_api.history import COMMIT_MARKER, DAMAGE_RECORD
from polyreme_datahub.objects import open_store
from polyreme_planner.layout import Layout
from polyreme_planner.plan import shape_digest
from polyreme_planner.shapes import KIMI_VL_NANO, shape_content
from polyreme_trainer.parallel.world import RankSettings
from polyreme_trainer.train import resumption
from polyreme_trainer.train.settings import CheckpointSettings, StartPoint, TrainSettings

NAME = "a000001-s00000006"


class Source:
    """A source of the data \"same\"."""

    def check_state(self, state: dict[str, Any]) -> None:
        if state["data"] != "same":
            raise RefusedError("other data")

    def state(self, step: int) -> dict[str, Any]:
        return {"data": "same", "step": step, "tokenizer": "t"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "first"


def save(root: Path, *, model: str = shape_digest(KIMI_VL_NANO), **loader: str) -> None:
    (root / NAME).mkdir(parents=True, exist_ok=True)
    marker = CommitMarker(
        attempt=1,
        step=6,
        world=1,
        model_digest=model,
        model_shape={**shape_content(KIMI_VL_NANO), "name": "other"},
        plan_hash="p",
        files={},
        loader=loader,
        committed_at_s=0.0,
    )
    (root / NAME / COMMIT_MARKER).write_bytes(seal(marker))


def begin(root: Path, monkeypatch: pytest.MonkeyPatch, *, steps: int = 10) -> tuple[int, int]:
    """Begin a run at the checkpoint; return the step that it continues after, and those that moments learned before."""
    start = StartPoint(store=open_store(root.as_uri()), root="file://first", name=NAME)
    own = open_store((root.parent / "second").as_uri())
    settings = TrainSettings(
        rank=RankSettings(rank=0, world=1, attempt=1),
        layout=Layout(),
        shape=KIMI_VL_NANO,
        steps=steps,
        checkpoint=CheckpointSettings(store=own, start_from=start),
    )
    state: Any = SimpleNamespace(optimizer=SimpleNamespace())
    monkeypatch.setattr(resumption, "_load", lambda *_, **__: None)
    resumption.resume(settings, state, Source(), SimpleNamespace())  # type: ignore[arg-type]
    return state.step, state.optimizer.steps_before


def test_the_place_in_the_data_is_taken_over_if_these_are_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root, data="same")
    assert begin(root, monkeypatch) == (6, 0)
    assert "so the next step is 7" in (root.parent / "second" / "start.json").read_text()
    save(root, data="other", tokenizer="t")
    assert begin(root, monkeypatch) == (0, 6), "moments are not as those of step 1"


def test_a_start_that_is_not_possible_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(field: str, **given: Any) -> str:
        with pytest.raises(InvalidConfigError) as error:
            begin(root, monkeypatch, **given)
        assert error.value.field == field
        return error.value.message

    assert refused(resumption.START_FIELD) == f"no checkpoint {NAME} in its root; root file://first"
    save(root, data="same")
    assert "training.steps 6 is not above step 6 of checkpoint" in refused("spec.training.steps", steps=6)
    save(root, data="other", tokenizer="u")
    assert "the job trains another tokenizer on them" in refused("spec.data.tokenizer.location")
    save(root, data="same", model="other")
    assert "checkpoint belongs to another model" in refused(resumption.START_FIELD)
    (root / NAME / DAMAGE_RECORD).write_text("{}")
    assert "checkpoint is damaged" in refused(resumption.START_FIELD)
