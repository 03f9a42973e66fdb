"""The GPU suite without a GPU: it says what is missing, and parts of it run at toy sizes on a processor."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from polyreme_api.exit_codes import ExitCode

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Import files of the suite as its runners do, with no peers but those that the environment has."""
    names = {path.stem for path in FOLDER.glob("*.py")}
    monkeypatch.setenv("POLYREME_GPU_PEERS", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    before = {name: sys.modules.pop(name) for name in names & sys.modules.keys()}
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(before)


def test_without_a_device_one_sentence_says_what_is_missing(
    part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        part("harness").find_place(rehearse=False)
    assert ended.value.code == ExitCode.ENVIRONMENT
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("no CUDA device: torch sees none here")
    assert said.err.count("\n") == 1


def test_a_device_with_unknown_limits_is_refused(
    part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A10")
    with pytest.raises(SystemExit, match="7"):
        part("harness").find_place(rehearse=False)
    assert "NVIDIA A10, known are A100, B200, H100, H20, H200" in capsys.readouterr().err


@pytest.mark.slow
def test_a_rehearsal_runs_and_names_each_peer_that_it_leaves_out(part: Callable[[str], Any]) -> None:
    place = part("harness").find_place(rehearse=True)
    head, _, head_ok = part("g4_head").bench(place)
    assert head_ok
    assert skipped(head) == {"liger", "cut_cross_entropy", "torchtitan_chunked"}
    assert head["ours_loss"] == pytest.approx(head["torch_plain_loss"], rel=1e-5)
    alone = part("harness").find_place(rehearse=True, ours_only=True)
    tower, _, tower_ok = part("g3_tower").bench(alone)
    assert tower_ok
    assert skipped(tower) == {"transformers", "torchtitan"}
    assert tower["transformers_skipped"] == "left out by --ours-only"
    assert all(figures["floor_ms"] > 0 for figures in (head, tower))


def test_a_peer_that_fails_is_a_figure_and_our_own_failure_is_a_miss(
    part: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, head = part("harness").find_place(rehearse=True), part("g4_head")

    def broken(*_: Any) -> Any:
        raise RuntimeError("no kernel image\nis available")

    monkeypatch.setattr(head, "liger", lambda _: lambda *given: 2 * head.plain(*given))
    monkeypatch.setattr(head, "torch_head_loss", broken)
    monkeypatch.setattr(head, "operands", lambda *_: smaller(place))
    figures, _, ok = head.bench(place)
    assert figures["torch_chunked_skipped"] == "RuntimeError: no kernel image is available"
    assert "not the same work" in figures["liger_skipped"]
    assert ok
    monkeypatch.setattr(head, "ours", broken)
    assert not head.bench(place)[2]


def smaller(place: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_TD, head_VD = (torch.randn(size, 8, generator=generator).requires_grad_() for size in (6, 32))
    return hidden_TD, head_VD, torch.randint(32, (6,), generator=generator)


def skipped(figures: dict[str, Any]) -> set[str]:
    return {name.removesuffix("_skipped") for name in figures if name.endswith("_skipped")}
