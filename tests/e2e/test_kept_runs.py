"""Runs that an older version left are continued, reported and exported by today's commands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyreme.commands.asked_model import open_asked
from polyreme.run_files.paths import Home
from polyreme_datahub.hub import read_images
from tests.e2e.polyreme_home import PolyremeHome
from tests.kept.folders import FINISHED, STOPPED, VERSIONS, copy_home, read_values
from tests.kept.reading import export_tensors

TOLERANCE = 1e-4
"""Losses on another processor differ by their rounding; without the optimizer's state they differ by far more."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parallel,
    pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name),
]


@pytest.fixture
def kept(version: Path, tmp_path: Path) -> Iterator[PolyremeHome]:
    opened = PolyremeHome(copy_home(version, tmp_path), outputs=tmp_path)
    yield opened
    opened.close()


def test_a_stopped_run_continues_from_its_checkpoint(version: Path, kept: PolyremeHome) -> None:
    values = read_values(version)
    before = values["runs"][STOPPED]
    ended = kept.start(kept.path / "runs/default" / STOPPED / "job.yaml").end()
    assert ended.code == 0, ended.said
    point = kept.records(STOPPED).points[-1]
    assert point.attempt == len(before["attempts"]) + 1
    assert point.resume_from in before["tensors"]
    losses = kept.losses(STOPPED)
    assert {step: losses[int(step)] for step in before["history"]} == before["history"]
    wanted = {int(step): float.fromhex(loss) for step, loss in values["continued"].items()}
    assert {step: float.fromhex(loss) for step, loss in losses.items()} == pytest.approx(wanted, rel=TOLERANCE)
    _check_asked(kept, STOPPED)


def _check_asked(kept: PolyremeHome, name: str) -> None:
    """Held-out pages that a person asks about are answered as the evaluation of the run answered them."""
    home, result = Home(path=kept.path), kept.records(name).evaluation
    assert result is not None
    pages = result["pages"]
    images = read_images(home.registry_url, home.objects_url, [page["imageDigest"] for page in pages])
    asked = open_asked(home, name, None)
    with asked.reader() as reader:
        prompts = [
            reader.read([{"role": "user", "content": page["question"]}], [images[page["imageDigest"]]])
            for page in pages
        ]
        made = asked.answers(prompts, stop_token=reader.token_ids.end, prompt_tokens_max=96, new_tokens_max=16, rows=2)
        answers = [reader.text(answer.tokens) for answer in made if answer is not None]
    assert answers == [page["answer"] for page in pages]
    assert len(set(answers)) > 1


def test_a_finished_run_is_reported_and_exported(version: Path, kept: PolyremeHome, tmp_path: Path) -> None:
    again = kept.call("run", str(kept.path / "runs/default" / FINISHED / "job.yaml"), "-o", "json")
    assert again.code == 0, again.said
    assert "is finished" in again.said
    assert (again.item["state"], again.item["attempts"]) == ("Succeeded", 1)
    assert again.item["heldoutSamples"] == len(_pages(kept))
    assert "data:image/png" in Path(again.item["report"]).read_text()
    exported = kept.call("checkpoint", "export", FINISHED, "--to", str(tmp_path / "export"))
    assert exported.code == 0, exported.said
    assert export_tensors(tmp_path / "export") == read_values(version)["export"]
    then, now = (
        json.loads((folder / "config.json").read_text()) for folder in (version / "export", tmp_path / "export")
    )
    assert then.items() <= now.items()


def _pages(kept: PolyremeHome) -> list[object]:
    path = max((kept.path / "checkpoints/default" / FINISHED / "evaluation").glob("*.json"))
    pages: list[object] = json.loads(path.read_text())["pages"]
    return pages
