"""Gangs of real ranks: forked from one warm parent, which has torch imported and no thread started."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import socket
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch

from polyreme_planner.layout import Layout

END_TIMEOUT_S = 120.0
_BODY = Path(__file__).with_name("rank_body.py")


@dataclasses.dataclass
class Gang:
    """The ranks of one attempt."""

    root: Path
    processes: list[ForkServerProcess]

    def wait(self) -> list[int | None]:
        """Wait for all ranks; their exit codes, minus the signal that ended a rank."""
        for process in self.processes:
            process.join(END_TIMEOUT_S)
        codes = [process.exitcode for process in self.processes]
        self.kill()
        assert None not in codes, f"ranks did not end: {codes}; {self.logs()}"
        return codes

    def kill(self) -> None:
        """End every rank that still runs, at once."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join(END_TIMEOUT_S)

    def logs(self) -> str:
        """What the ranks logged."""
        return "\n".join(path.read_text() for path in sorted(self.root.glob("rank-*.log")))


Start = Callable[..., Gang]


def warm() -> Any:
    """Make the parent of all ranks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["polyreme_trainer.train.run", "polyreme_trainer.train.offline_export"])
    return context


def start_gang(
    context: Any, body: str, *, layout: tuple[int, int] | dict[str, int], root: Path, **request: Any
) -> Gang:
    """Start the ranks of one attempt: a layout's degrees by name, or dp and ep."""
    root.mkdir(parents=True, exist_ok=True)
    world = Layout(**layout).world if isinstance(layout, dict) else layout[0]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        request |= {"body": body, "layout": layout, "root": str(root), "port": listener.getsockname()[1]}
        return Gang(root, [_fork(context, request, rank, listener) for rank in range(world)])


def _fork(context: Any, request: dict[str, Any], rank: int, listener: socket.socket) -> ForkServerProcess:
    given = {"request": request, "rank": rank, "listener": listener if rank == 0 else None}
    process: ForkServerProcess = context.Process(target=runpy.run_path, args=(str(_BODY), given, "rank"))
    process.start()
    return process


def gradients(start: Start, root: Path, layout: tuple[int, int] | dict[str, int], **request: Any) -> Mapping[str, Any]:
    """Gradients of the whole model in the first step, and the losses of some steps."""
    output = root / "output.pt"
    gang = start("gradient", layout=layout, root=root, output=str(output), **request)
    assert set(gang.wait()) == {0}, gang.logs()
    result: Mapping[str, Any] = torch.load(output)
    return result


def answered(start: Start, root: Path, *, rows: int, **way: Any) -> list[str]:
    """What a gang answers, with so many rows at once."""
    output = root / "answers.json"
    gang = start("answer", root=root, output=str(output), rows=rows, new=8, **way)
    assert set(gang.wait()) == {0}, gang.logs()
    answers: list[str] = json.loads(output.read_text())
    return answers


def largest_difference(seen: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Over all tensors, the largest difference relative to the largest gradient of that tensor."""
    assert seen["gradients"].keys() == expected["gradients"].keys()
    return max(
        float((seen["gradients"][name] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        for name, value in expected["gradients"].items()
    )
