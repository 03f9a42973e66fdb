"""``polyreme data``: ingest to version, and every verb on it, as a table and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyreme.main import invoke
from polyreme_api.exit_codes import ExitCode
from tests.unit.datahub.test_ingestion import write_source

pytestmark = pytest.mark.slow
Call = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Call a command on a home of the test's own; returns exit code, JSON or text, and messages."""

    def on_home(*arguments: str) -> tuple[int, Any, str]:
        capsys.readouterr()
        code = invoke(["--home", str(tmp_path / "home"), "data", *arguments])
        shown = capsys.readouterr()
        parsed = json.loads(shown.out) if "json" in arguments and shown.out else None
        return code, shown.out if parsed is None else parsed.get("item", parsed.get("items")), shown.err

    return on_home


def test_ingest_and_every_verb_on_its_version(call: Call, tmp_path: Path) -> None:
    source = str(write_source(tmp_path / "source"))
    dry = ("ingest", source, "--recipe", "captioned-pages", "--name", "pages", "--dry-run")
    _, estimate, _ = call(*dry, "-o", "json")
    assert (estimate["records"], estimate["known"], estimate["probed"]) == (15, 0, 9)
    assert estimate["secondsEach"] > 0
    assert call("show", "pages")[0] == ExitCode.NOT_FOUND
    code, report, said = call("ingest", source, "--recipe", "captioned-pages", "--name", "pages", "-o", "json")
    assert (code, report["samples"], report["dead"], report["dropped"]) == (0, 11, 3, 1)
    assert "pages@1: 11 samples, 1 dropped, 3 dead letters: polyreme data show pages@1" in said
    code, shown, _ = call("ingest", source, "--recipe", "captioned-pages", "--name", "pages")
    assert code == 0
    assert "15; 15 are known already" in call(*dry)[1]
    assert "deduplicate-images" in shown
    _, listed, _ = call("ls", "-o", "json")
    assert {row["name"]: row["kind"] for row in listed}.items() >= {"pages": "samples"}.items()
    _, details, _ = call("show", "pages", "-o", "json")
    assert [letter["stage"] for letter in details["deadLetters"]] == ["decode", "ingest", "ingest"]
    assert "pages/source@1, by a recipe of 7 operations" in call("show", "pages")[1]
    _, tags, _ = call("tag", "pages@1", "golden", "-o", "json")
    assert tags == [{"tag": "pages@golden", "version": "pages@1"}]
    _, subset, _ = call("subset", "pages@golden", "--name", "pages/few", "--where", "ordinal < 3", "-o", "json")
    assert [row["records"] for row in subset] == [3]
    _, found, _ = call("diff", "pages", "pages/few", "-o", "json")
    assert (found["removed"], found["same"]) == (8, 3)
    _, parts, _ = call("split", "pages", "train=2", "heldout=1", "-o", "json")
    assert sum(row["records"] for row in parts) == 11
    _, lineage, _ = call("lineage", "pages", "r3", "-o", "json")
    assert (lineage["source"], lineage["steps"][0]["inputs"]) == ("pages/source@1", [lineage["record"]])
    _, statistics, _ = call("stats", "pages", "-o", "json")
    assert (statistics["samples"], statistics["width_px"]["p50"]) == (11, 200)
    _, collected, _ = call("gc", "--dry-run", "-o", "json")
    assert collected["deleted"] == {"objects": 0, "bytes": 0}
    (tmp_path / "home" / "data" / "registry.sqlite").rename(tmp_path / "lost.sqlite")
    code, rebuilt, said = call("rebuild-registry", "-o", "json")
    assert (code, rebuilt["versions"], rebuilt["samples"], rebuilt["damaged"]) == (0, 5, 14 + 3 + 11, [])
    assert "pages@1: not all of its samples are listed; polyreme data ingest or polyreme run reads the rest" in said
    names = {row["name"] for row in call("ls", "-o", "json")[1]}
    assert names >= {"pages", "pages/source", "pages/few", "pages/heldout", "pages/train"}
    (tmp_path / "lost.sqlite").rename(tmp_path / "home" / "data" / "registry.sqlite")
    _, replayed, said = call("replay", "pages", "--operation", "decode", "-o", "json")
    assert replayed["records"] == 1
    assert "1 records are tried again" in said


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["ingest", "./none", "--recipe", "captioned-pages", "--name", "x"], ExitCode.NOT_FOUND, "no dataset ./none"),
        (["ingest", ".", "--recipe", "captioned", "--name", "x"], ExitCode.NOT_FOUND, "captioned-pages"),
        (["replay", "nothing"], ExitCode.NOT_FOUND, "no dataset nothing"),
        (["split", "nothing", "train"], ExitCode.USAGE, "expected PART=SHARE"),
        (["link", "0" * 64], ExitCode.USAGE, "bucket"),
        (["gc"], ExitCode.USAGE, "add --yes"),
    ],
)
def test_wrong_calls_are_one_line_and_an_exit_code(
    call: Call, arguments: list[str], code: ExitCode, words: str
) -> None:
    seen, _, said = call(*arguments)
    assert seen == code
    assert words in said
    assert len(said.strip().splitlines()) == 1


def test_the_page_about_operations_does_what_it_says(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/data-operations.md").read_text()
    blocks = dict(reversed(re.findall(r"```(python|yaml)\n(.*?)```", page, flags=re.DOTALL)))
    (tmp_path / "short_answers.py").write_text(blocks["python"])
    (tmp_path / "recipe.yaml").write_text(blocks["yaml"])
    monkeypatch.syspath_prepend(str(tmp_path))
    source, recipe = str(write_source(tmp_path / "source")), str(tmp_path / "recipe.yaml")
    code, report, _ = call("ingest", source, "--recipe", recipe, "--name", "pages", "-o", "json")
    assert (code, report["samples"], report["dropped"]) == (ExitCode.OK, 11, 1)
    _, chosen, _ = call(
        "subset", "pages", "--name", "pages/short", "--where", "short_answers_characters <= 9", "-o", "json"
    )
    assert chosen[0]["records"] == 9
