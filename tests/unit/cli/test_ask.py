"""Questions to the models of runs and exports."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyreme.main import invoke
from polyreme.run_files.paths import Home
from tests.kept.folders import FINISHED, VERSIONS, copy_home

ANSWER_TOKENS = 8

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A kept home: its finished run has a checkpoint, an export and held-out pages."""
    return Home(path=copy_home(VERSIONS[0], tmp_path_factory.mktemp("asked")))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files that are no good images."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "text").write_text("hello")
    Image.new("1", (20_000, 20_000)).save(folder / "bomb", "PNG")
    Image.new("RGB", (700, 700)).save(folder / "large", "PNG")
    return folder


@pytest.fixture
def call(home: Home, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run ``polyreme ask``; return its exit code and what it wrote."""

    def call(*arguments: str, lines: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        code = invoke(["--home", str(home.path), "ask", *arguments])
        return code, *capsys.readouterr()

    return call


def write_pages(folder: Path) -> list[tuple[Path, str]]:
    """Draw pages of some sizes; return them with questions."""
    drawn = np.random.default_rng(3)
    asked = []
    for number, side in enumerate((28, 56, 84)):
        Image.fromarray(drawn.integers(0, 256, (28, side, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        asked.append((folder / f"{number}.png", f"Which digits, left to right, in {number}?"))
    return asked


def test_lines_are_answered_in_order_and_as_one_question_is(home: Home, call: Call, tmp_path: Path) -> None:
    """More lines than answers that run at once; a line that can't be read costs no other one its answer."""
    pages = write_pages(tmp_path)
    wanted = [call(FINISHED, "--image", str(path), text, "--max-tokens", "8")[1][:-1] for path, text in pages]
    assert len(set(wanted)) > 1
    lines = [json.dumps({"images": [str(path)], "question": text}) for path, text in pages]
    typed = [*(lines * 6), "no json", *lines]
    code, output, said = call(FINISHED, "-", "-o", "json", "--max-tokens", "8", lines="\n".join(typed))
    items = [json.loads(line) for line in output.splitlines()]
    assert [item["answer"] for item in items] == [*(wanted * 6), "", *wanted]
    assert code == 2
    assert f"line {len(lines) * 6 + 1}: not JSON" in said
    assert len(items[0]["tokens"]) == 8 or items[0]["ended"]
    assert all(token["logProb"] < 0 for token in items[0]["tokens"])


def test_an_export_and_the_folder_of_a_checkpoint_answer_as_the_run(
    home: Home, call: Call, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, text = write_pages(tmp_path)[1]
    question = ("--image", str(path), text)
    exported = tmp_path / "export"
    assert invoke(["--home", str(home.path), "checkpoint", "export", FINISHED, "--to", str(exported)]) == 0
    capsys.readouterr()
    (folder,) = home.run("default", FINISHED).checkpoints.glob("a*-s*")
    code, wanted, said = call(FINISHED, *question, "-o", "json")
    assert (code, bool(json.loads(wanted)["item"]["answer"])) == (0, True), said
    for target in (exported, exported.as_uri(), folder):
        code, output, said = call(str(target), *question, "-o", "json")
        assert (code, json.loads(output)) == (0, json.loads(wanted)), said


def test_groups_of_an_export_fit_the_ranks_that_will_serve_it(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    form = ("--dtype", "int4", "--group", "8", "--ranks", "7")
    command = ["--home", str(home.path), "checkpoint", "export", FINISHED, "--to", str(tmp_path / "export"), *form]
    assert invoke(command) == 2
    assert "expected a multiple of 8 for each of 7 ranks; take a smaller group" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (("nosuch", "hello"), 3, "no run 'nosuch'"),
        (("./nosuch", "hello"), 3, "no folder nosuch"),
        (("stopped", "--checkpoint", "a1", "hello"), 3, "no committed checkpoint 'a1' of run 'stopped'"),
        ((FINISHED, " "), 2, "question is empty"),
        ((FINISHED, "--image", "nowhere.png", "hello"), 3, "no image nowhere.png"),
        ((FINISHED, "--image", "{text}", "hello"), 2, "not an image: begins with b'hello'"),
        ((FINISHED, "--image", "{bomb}", "hello"), 2, "image is too large: 20000 x 20000 pixels"),
        ((FINISHED, *(["--image", "{large}"] * 3), "hello"), 2, "of 3 images, expected fewer than 96"),
        ((FINISHED, "<image>"), 2, "1 <image> marks, 0 images"),
        ((FINISHED, "-", "--image", "{large}"), 2, "each line names its own images; change --image"),
        (("{folder}", "hello"), 3, "has neither model.safetensors.index.json nor model.safetensors"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_sentence(
    arguments: tuple[str, ...], code: int, sentence: str, call: Call, files: Path
) -> None:
    named = {name: str(files / name) for name in ("text", "bomb", "large")}
    ended, output, said = call(*(argument.format(**named, folder=files) for argument in arguments))
    assert (ended, output) == (code, "")
    assert sentence in said
    assert said.splitlines()[-1].startswith("polyreme: ")
    assert "Traceback" not in said


def test_a_run_without_a_checkpoint_and_a_checkpoint_of_no_run_are_refused(
    home: Home, call: Call, tmp_path: Path
) -> None:
    lost = copy_home(VERSIONS[0], tmp_path)
    shutil.rmtree(lost / "checkpoints/default/stopped")
    assert invoke(["--home", str(lost), "ask", "stopped", "hello"]) == 3
    (folder,) = home.run("default", FINISHED).checkpoints.glob("a*-s*")
    (tmp_path / "elsewhere").mkdir()
    copied = shutil.copytree(folder, tmp_path / "elsewhere" / folder.name)
    code, _, said = call(str(copied), "hello")
    assert code == 3
    assert "checkpoint of no run" in said
