"""Count the source files that two everyday paths run through: ``python tools/walks.py`` (``--files`` names them).

``sample``: a record of a JSONL file becomes a tensor on the device (registered, processed, opened, one step).
``node``: a node's condition becomes new pods on other nodes. A file counts when one of its functions runs; children of
the sandbox are counted with their parent.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import tests.unit.operator.test_operator_evacuation as evacuation
from polyreme.torch_dataset import PackedDataset
from tests.unit.datahub.jobs import Home, make_spec, picture, record, write_jsonl

ROOT = Path(__file__).resolve().parents[1]
PLACES = tuple(f"{ROOT}/{name}/" for name in ("api", "cli", "datahub", "operator", "trainer"))
IN_CHILD = """
import os as _os, sys as _sys
_seen = set()
def _profile(frame, event, argument, seen=_seen, write=_os.write):
    name = frame.f_code.co_filename
    if event == "call" and name not in seen and frame.f_code.co_name != "<module>":
        seen.add(name)
        write(%d, (name + "\\n").encode())
_sys.setprofile(_profile)
"""
"""Goes before the first line of a sandboxed child: it reports each file once, through a pipe."""
CHILD_CODE_AT = 4
SAMPLES = 24


class Files:
    """Source files in which a function ran, of all threads and of the children of the sandbox."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def _profile(self, frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>":
            self.seen.add(code.co_filename)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Collect what runs inside the block."""
        reading, writing = os.pipe()
        popen = subprocess.Popen

        def started(command: list[str], *rest: Any, **options: Any) -> subprocess.Popen[bytes]:
            if command[1:CHILD_CODE_AT] == ["-I", "-S", "-c"]:
                command[CHILD_CODE_AT] = IN_CHILD % writing + command[CHILD_CODE_AT]
                options["pass_fds"] = (*options["pass_fds"], writing)
            return popen(command, *rest, **options)

        subprocess.Popen = started  # type: ignore[assignment, misc]
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            subprocess.Popen = popen  # type: ignore[misc]
            os.close(writing)
            with os.fdopen(reading, encoding="utf-8") as children:
                self.seen.update(children.read().split())

    def of_ours(self) -> list[str]:
        """The files of the source roots, sorted."""
        return sorted(name.removeprefix(f"{ROOT}/") for name in self.seen if name.startswith(PLACES))


def walk_of_a_sample() -> dict[str, list[str]]:
    """Take records with an image each from a JSONL file to tensors."""
    parts: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder))
        for at in range(SAMPLES):
            (home.folder / f"{at}.png").write_bytes(picture(40, 40, seed=at))
        source = write_jsonl(home.folder, [record(str(at), [f"{at}.png"]) for at in range(SAMPLES)])
        spec = make_spec(["mine"], sequence_tokens=128, packs_per_step=2)
        with of_part(parts, "register"):
            home.register("mine", source)
        with of_part(parts, "process"):
            home.process(spec)
        with of_part(parts, "open and first step"):
            batches = iter(PackedDataset(home.objects, spec))
            next(batches)
        with of_part(parts, "a further step, to the device"):
            found = next(batches)
            [value.to("cpu", copy=True) for value in found.values() if isinstance(value, torch.Tensor)]
    return parts


def walk_of_a_node() -> dict[str, list[str]]:
    """Let a condition take a node out of service, and the job's workers move."""
    stage = evacuation.EvacuationStage(8)
    parts: dict[str, list[str]] = {}
    stage.begin(action="Now")

    async def story() -> None:
        await asyncio.sleep(5.0)
        await stage.train(10)
        await asyncio.sleep(1.0)
        faulty = stage.nodes[0]
        with of_part(parts, "condition to new pods"):
            stage.show(faulty)
            await asyncio.sleep(2.0)
        assert stage.attempt["number"] == 2
        assert faulty not in stage.nodes

    stage.run(story)
    return parts


@contextmanager
def of_part(parts: dict[str, list[str]], name: str) -> Iterator[None]:
    """Collect one part of a walk."""
    files = Files()
    with files.collect():
        yield
    parts[name] = files.of_ours()


def main() -> int:
    """Walk both, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="name the files, too")
    named = parser.parse_args().files
    for walk, parts in {"sample": walk_of_a_sample(), "node": walk_of_a_node()}.items():
        distinct = {name for names in parts.values() for name in names}
        print(f"{walk}: {len(distinct)} files ({', '.join(f'{part} {len(names)}' for part, names in parts.items())})")
        for part, names in parts.items() if named else ():
            print(f"  {part}:", *names, sep="\n    ")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
