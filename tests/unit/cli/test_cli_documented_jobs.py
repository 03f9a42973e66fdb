"""Jobs that the documents show are jobs that can run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import load_job

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def documented_jobs() -> list[tuple[str, str]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [(page.name, block) for page in pages for block in BLOCK.findall(page.read_text())]
    return [(name, block) for name, block in blocks if "kind: TrainingJob" in block]


def test_the_documents_show_a_job() -> None:
    assert documented_jobs()


@pytest.mark.parametrize(("page", "text"), documented_jobs())
def test_a_documented_job_is_accepted(page: str, text: str) -> None:
    assert load_job(yaml.safe_load(text)).metadata.name, page


@pytest.mark.parametrize("path", sorted((ROOT / "manifests" / "samples").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_sample_is_accepted(path: Path) -> None:
    assert load_job(yaml.safe_load(path.read_text())).metadata.name


def test_a_misspelt_required_field_is_told_as_misspelt_not_as_missing() -> None:
    manifest = yaml.safe_load((ROOT / "manifests" / "samples" / "quickstart.yaml").read_text())
    manifest["spec"]["training"]["stepz"] = manifest["spec"]["training"].pop("steps")
    with pytest.raises(InvalidConfigError, match=r"spec\.training\.stepz, did you mean 'steps'"):
        load_job(manifest)
