"""Stored scores: which stay, what a damaged file says, and pairs that have none."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyreme_api.batch import PreferenceSet
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError, RefusedError
from polyreme_api.job.objective import Objective
from polyreme_datahub.objects import open_store
from polyreme_planner.curriculum import CurriculumStage
from polyreme_trainer.train import fingerprint
from polyreme_trainer.train.inputs import to_inputs
from polyreme_trainer.train.objectives.kinds import objective_of
from polyreme_trainer.train.objectives.objective import Weigher
from polyreme_trainer.train.reference_scores import ReferenceScores, Scored, ScoreStore, keep, of_run, packed, unpacked
from tests.unit.trainer.train.pairs import packed as laid
from tests.unit.trainer.train.pairs import some_pairs

STAGE = CurriculumStage(name="prefer", steps=4, objective=Objective(kind="Preference"))


def scored(*samples: int, add: float = 0.0) -> Scored:
    return Scored.of(list(samples), [[-sample + add, -sample - 1 + add] for sample in samples])


def test_the_first_score_of_a_pair_stays_and_parts_are_read_once(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    scores = ScoreStore(store, "model", [None, PreferenceSet(digest="d" * 64, augmented=False)])
    first = scored(5, 3)
    assert scores.commit(1, first.samples_N, first) is first
    again = scored(3, 5, add=1.0)
    assert scores.commit(1, again.samples_N, again).scores_N2.tolist() == first.scores_N2.tolist()
    scores.commit(1, np.array([9]), scored(9))
    assert scores.load(1).samples_N.tolist() == [3, 5, 9]
    found = scores.find(1, np.array([3, 5]))
    assert found is not None
    assert found.scores_N2.tolist() == [[-3.0, -4.0], [-5.0, -6.0]]
    with pytest.raises(RefusedError, match="source 0 has no pairs"):
        scores.load(0)


def test_what_a_run_keeps_grows_and_never_changes(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    assert of_run(store, STAGE) is None
    keep(store, STAGE, ReferenceScores({0: scored(1, 2)}, {1: scored(7)}))
    merged = keep(store, STAGE, ReferenceScores({0: scored(2, 4, add=9.0)}))
    assert merged.by_source[0].scores_N2.tolist() == [[-1.0, -2.0], [-2.0, -3.0], [5.0, 4.0]]
    kept = of_run(store, STAGE)
    assert kept is not None
    assert kept.by_source[0].scores_N2.tolist() == merged.by_source[0].scores_N2.tolist()
    branches = np.array([[0, 4], [0, 4], [0, 1], [0, 1]])
    assert kept.of(branches).tolist() == [5.0, 4.0, -1.0, -2.0]
    held_out = kept.of_held_out(np.array([[1, 7], [1, 7], [1, 8], [1, 8]]))
    assert held_out[:2].tolist() == [-7.0, -8.0]
    assert np.isnan(held_out[2:]).all()
    with pytest.raises(RefusedError, match="sample 3 of source 0 was not among the pairs of the stage"):
        kept.of(np.array([[0, 3], [0, 3]]))


def _archive(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"no archive",
        packed({"": scored(1, 2)})[:-30],
        _archive(samples=np.arange(3), scores=np.zeros((5, 2))),
        _archive(scores=np.zeros((5, 2))),
        _archive(samples=np.arange(1), scores=np.full((1, 2), np.nan)),
    ],
    ids=["text", "cut off", "other lengths", "no samples", "no numbers"],
)
def test_a_damaged_part_is_named(tmp_path: Path, data: bytes) -> None:
    store = open_store(tmp_path.as_uri())
    store.put(f"reference-scores/model/{'d' * 64}/part.npz", data)
    scores = ScoreStore(store, "model", [PreferenceSet(digest="d" * 64, augmented=False)])
    with pytest.raises(EnvironmentFailedError, match=r"part\.npz holds no .*reference scores"):
        scores.load(0)
    array = io.BytesIO()
    np.save(array, np.arange(3))
    with pytest.raises(EnvironmentFailedError, match="holds no reference scores"):
        unpacked(array.getvalue(), "one array")


def test_a_pair_that_could_not_be_scored_is_not_learned() -> None:
    """It was damaged then, and may be whole again."""
    pairs = some_pairs(3)
    scores = np.array([[-4.0, -5.0], [math.nan, math.nan], [-6.0, -7.0]])
    batch = laid(pairs, shared=True)
    inputs = to_inputs(
        batch, device="cpu", media_token=1, reference=lambda of: scores[of[:, 1], np.arange(len(of)) % 2]
    )
    objective = objective_of(STAGE.objective)
    assert inputs.branches is not None
    assert objective is not None
    assert objective.counted(inputs.branches) == 2
    logp_N = -torch.arange(1.0, inputs.branches.branch_N.shape[0] + 1)
    loss, weights_N = Weigher(objective).weigh(inputs.branches)(logp_N)
    unknown = (inputs.branches.branch_N == 2) | (inputs.branches.branch_N == 3)
    assert torch.isfinite(loss)
    assert (weights_N[unknown] == 0).all()
    assert (weights_N[~unknown] != 0).all()


def test_text_beside_pairs_is_refused() -> None:
    batch = laid(some_pairs(2), shared=True, tokens_max=80)
    targets = np.array(batch.targets_T)
    targets[-3] = 7
    with pytest.raises(InvalidConfigError, match="pairs of answers beside documents that have none"):
        to_inputs(
            type(batch)(**{**{name: getattr(batch, name) for name in batch.__slots__}, "targets_T": targets}),
            device="cpu",
            media_token=1,
        )


def test_the_fingerprint_of_boxes_is_that_of_their_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    whole = fingerprint.box_sum(tensor, (0, 0, 0), (6, 5, 4))
    monkeypatch.setattr(fingerprint, "_AT_ONCE", 7)
    assert fingerprint.box_sum(tensor, (0, 0, 0), (6, 5, 4)) == whole
    boxes = [(at, tensor[at : at + 2, :, cut : cut + 2]) for at in (0, 2, 4) for cut in (0, 2)]
    parts = [fingerprint.box_sum(box, (at, 0, 2 * (number % 2)), (6, 5, 4)) for number, (at, box) in enumerate(boxes)]
    assert sum(parts) % (1 << 64) == whole
    swapped = tensor.clone()
    swapped[0, 0, 0], swapped[0, 0, 1] = tensor[0, 0, 1], tensor[0, 0, 0]
    assert fingerprint.box_sum(swapped, (0, 0, 0), (6, 5, 4)) != whole
