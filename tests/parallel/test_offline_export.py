"""One process exports what many ranks saved, as they would have exported it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

NAME = "a000001-s00000003"


def files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("layout", [(4, 2), {"cp": 2, "tp": 2, "ep": 4}], ids=str)
def test_an_offline_export_is_the_runs_own_bit_for_bit(start: Any, tmp_path: Path, layout: Any) -> None:
    """The run answers its questions first: layers that ranks share decode together."""
    run = tmp_path / "run"
    own, offline = tmp_path / "own", tmp_path / "offline"
    gang = start("train", layout=layout, root=run, steps=3, export=str(own), questions=7)
    assert gang.wait() == [0] * 4, gang.logs()
    pages = json.loads((run / "evaluation" / "a000001.json").read_text())["pages"]
    assert [page["sampleId"] for page in pages] == [f"page-{number}" for number in range(7)]
    gang = start("offline", layout=(1, 1), root=run, resume_from=NAME, output=str(offline))
    assert gang.wait() == [0], gang.logs()
    assert files(offline) == files(own)
    assert len(files(own)) > 5


def test_a_torn_or_damaged_checkpoint_is_not_exported(start: Any, tmp_path: Path) -> None:
    run, output = tmp_path / "run", tmp_path / "offline"
    assert start("train", layout=(4, 2), root=run, steps=3).wait() == [0] * 4
    with (run / NAME / "00002-000.bin").open("r+b") as file:
        file.truncate(100)
    gang = start("offline", layout=(1, 1), root=run, resume_from=NAME, output=str(output))
    assert gang.wait() == [4]
    assert f"checkpoint is damaged: {NAME}: 00002-000.bin: it has 100 bytes" in gang.logs()
    (run / NAME / "COMMIT.json").unlink()
    gang = start("offline", layout=(1, 1), root=run, resume_from=NAME, output=str(output))
    assert gang.wait() == [4]
    assert f"checkpoint is torn: {NAME} has no COMMIT.json" in gang.logs()
    gang = start("offline", layout=(1, 1), root=run, resume_from="a000009-s00000003", output=str(output))
    assert gang.wait() == [3]
    assert not output.exists()
