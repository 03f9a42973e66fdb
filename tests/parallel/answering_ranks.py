"""Ranks that answer made-up questions: prompts of 1 to 512 tokens, with up to four images, by weights of the seed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyreme_api.batch import EvaluationSample
from polyreme_trainer.parallel.world import open_world
from polyreme_trainer.serve import answers
from polyreme_trainer.serve.engine import EngineSettings
from polyreme_trainer.train import evaluation
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import open_state
from tests.parallel.pages import END, MEDIA, VALUES, Questions

LENGTHS = (1, 7, 40, 512, 3, 90, 16, 17, 200, 64, 5, 33, 128)
WORDS = range(8, 500)


class Exam(Questions):
    """Questions of many lengths; every third has no image."""

    tokens_max = max(LENGTHS) + 16

    def __init__(self) -> None:
        super().__init__(len(LENGTHS))

    def sample(self, index: int) -> EvaluationSample:
        draw = np.random.default_rng([11, index])
        images = index % 5 if LENGTHS[index] > 4 else 0
        grids = [(2, 2 * int(draw.integers(1, 3))) for _ in range(images)]
        media = [MEDIA] * sum(rows * columns // 4 for rows, columns in grids)
        words = draw.integers(WORDS.start, WORDS.stop, LENGTHS[index]).tolist()
        patches = sum(rows * columns for rows, columns in grids)
        return dataclasses.replace(
            super().sample(index),
            prompt_tokens=[*words[:2], *media, *words[2:]],
            patches_PC=draw.standard_normal((patches, VALUES), np.float32),
            grids_I2=np.array(grids, np.int32).reshape(-1, 2),
        )


def answer(request: Mapping[str, Any], rank: int, settings: TrainSettings) -> int:
    """Write what the ranks answer together, in rows and pages too few for all questions at once."""
    evaluation.ROWS_MAX = request["rows"]
    vars(evaluation)["settings_for"] = lambda *given, **named: _tight(answers.settings_for(*given, **named))
    with open_world(settings.rank, settings.layout) as world:
        state = open_state(settings, world.meshes, media_token=MEDIA)
        result = evaluation.evaluate(
            state, Exam(), dataclasses.replace(settings.evaluation, answer_tokens_max=request["new"]), world.meshes,
            stop_token=END, attempt=1,
        )  # fmt: skip
    if rank == 0:
        assert result is not None
        Path(request["output"]).write_text(json.dumps([page["answer"] for page in result["pages"]]))
    return 0


def _tight(settings: EngineSettings) -> EngineSettings:
    """Prompts in pieces, and room for little more than the longest."""
    return dataclasses.replace(settings, pages=36, prefill_tokens=50)
