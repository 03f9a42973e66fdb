"""A model that is asked on the device answers as on a processor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyreme.commands.asked_model import open_asked
from polyreme.run_files.paths import Home
from tests.kept.folders import FINISHED, VERSIONS, copy_home

pytestmark = pytest.mark.device

QUESTIONS = ("Which digits?", "Which digits, left to right?", "What is it?")
LOG_PROB_BOUND = 1e-3


def test_answers_on_the_device_are_as_likely_as_on_a_processor(device: torch.device, tmp_path: Path) -> None:
    home = Home(path=copy_home(VERSIONS[0], tmp_path))
    first: list[list[float]] = []
    for kind in ("cpu", device.type):
        asked = open_asked(home, FINISHED, None, device=kind)
        with asked.reader() as reader:
            prompts = [reader.read([{"role": "user", "content": text}], []) for text in QUESTIONS]
            made = asked.answers(
                prompts, stop_token=reader.token_ids.end, prompt_tokens_max=96, new_tokens_max=4, rows=2
            )
            first.append([answer.log_probs[0] for answer in made if answer is not None and answer.log_probs])
    assert len(first[0]) == len(QUESTIONS)
    assert first[1] == pytest.approx(first[0], abs=LOG_PROB_BOUND)
