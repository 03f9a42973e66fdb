"""Jobs, queues and topologies that the documents show are accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from polyreme_api.errors import InvalidConfigError
from polyreme_api.kinds import KINDS
from polyreme_planner.loading import load_job, load_object

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.DOTALL | re.MULTILINE)


OURS = re.compile(rf"^kind: ({'|'.join(KINDS)})$", re.MULTILINE)


def documented_objects() -> list[tuple[str, str]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [(page.name, block) for page in pages for block in BLOCK.findall(page.read_text())]
    return [(name, block) for name, block in blocks if OURS.search(block)]


def test_the_documents_show_jobs_queues_and_a_topology() -> None:
    shown = {found[1] for _, block in documented_objects() if (found := OURS.search(block))}
    assert {"TrainingJob", "TrainingQueue", "ClusterTopology"} <= shown


@pytest.mark.parametrize(("page", "text"), documented_objects())
def test_a_documented_object_is_accepted(page: str, text: str) -> None:
    for document in yaml.safe_load_all(text):
        assert load_object(document).metadata.name, page


@pytest.mark.parametrize("path", sorted((ROOT / "manifests" / "samples").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_sample_is_accepted(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        assert load_object(document).metadata.name


def test_a_misspelt_required_field_is_reported_as_misspelt_not_as_missing() -> None:
    manifest = yaml.safe_load((ROOT / "manifests" / "samples" / "quickstart.yaml").read_text())
    manifest["spec"]["training"]["stepz"] = manifest["spec"]["training"].pop("steps")
    with pytest.raises(InvalidConfigError, match=r"spec\.training\.stepz, did you mean 'steps'"):
        load_job(manifest)
