"""The sandbox: real child processes, each kind of misbehaviour, and what becomes of the samples beside it."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.sandbox.process import ENVIRONMENT
from polyreme_datahub.sandbox.sandbox import RESTARTS_MAX, Sandbox
from polyreme_datahub.sandbox.tasks import (
    Limits,
    SampleOutcome,
    SampleTask,
    SandboxStep,
    StepDropped,
    StepMade,
    StepVerdict,
)

HERE = "tests.unit.datahub.sandbox_operations"
ACT = SandboxStep(name="act", operation=f"{HERE}:act", inputs=("record",))
COPY = SandboxStep(name="copy", operation=f"{HERE}:copy", inputs=("act",))
MANY = SandboxStep(name="act", operation=f"{HERE}:act_on_many", inputs=("record",))
LIMITS = Limits(memory_bytes=256 * 2**20, wall_s=20.0, cpu_s=1, output_bytes=2**20)


def task(key: str, *do: Any, blob: bytes | None = None) -> SampleTask:
    return SampleTask(key=key, values={"record": Value.of({"do": list(do)}, kept=[] if blob is None else [Blob(blob)])})


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox([ACT], LIMITS) as shared:
        yield shared


def run_one(sandbox: Sandbox, *do: Any) -> StepMade | StepVerdict | StepDropped:
    (outcome,) = sandbox.run([task("one", *do)])
    return outcome.steps[-1]


def rules(outcomes: list[SampleOutcome]) -> dict[str, str]:
    ends = {outcome.key: outcome.steps[-1] for outcome in outcomes}
    return {key: end.rule if isinstance(end, StepVerdict) else "made" for key, end in ends.items()}


@pytest.mark.parametrize(
    ("do", "rule", "message"),
    [
        (["segfault"], "crash", "act ended its process, which died of SIGSEGV"),
        (["abort"], "crash", "act ended its process, which died of SIGABRT"),
        (["exit"], "crash", "act ended its process, which exited with code 3"),
        (["loop"], "time", "act used up its CPU time, expected at most 20 s and 1 s of CPU"),
        (["memory"], "memory", "act failed: MemoryError: "),
        (["fork"], "operation", "act failed: PermissionError: [Errno 1] Operation not permitted"),
        (["program"], "operation", "act failed: PermissionError"),
        (["file", "/tmp/polyreme-was-here"], "operation", "act failed: PermissionError"),
        (["network"], "operation", "act failed: PermissionError"),
        (["kill parent"], "operation", "act failed: PermissionError"),
        (["exception"], "operation", "act failed: KeyError: 'missing'"),
        (["stop"], "operation", "act failed: SystemExit: 0"),
        (["address"], "operation", "act failed: ValueError: <object object>"),
        (["type"], "type", "operation act returned a str, expected a Value"),
        (["not json"], "type", "operation act returned data that is not JSON"),
        (["foreign blob"], "type", "operation act returned a blob that is neither new nor one of its inputs'"),
        (["large", 2**20], "output", "outputs are too large"),
        (["bad"], "badness", "sample is bad"),
    ],
)
def test_each_misbehaviour_has_its_verdict(sandbox: Sandbox, do: list[Any], rule: str, message: str) -> None:
    end = run_one(sandbox, *do)
    assert isinstance(end, StepVerdict)
    assert (end.step, end.rule) == ("act", rule)
    assert end.message.startswith(message)
    assert not Path("/tmp/polyreme-was-here").exists()
    assert isinstance(run_one(sandbox, "nothing"), StepMade)


def test_a_filter_drops_and_the_chain_ends_there() -> None:
    with Sandbox([ACT, COPY], LIMITS) as chain:
        first, second = chain.run([task("a", "drop"), task("b", "nothing", blob=b"abc")])
    assert first.steps == (StepDropped(step="act", reason="too plain"),)
    assert [type(end) for end in second.steps] == [StepMade, StepMade]


def test_values_and_blobs_pass_through_a_chain_and_known_steps_are_not_run() -> None:
    kept = Blob(bytes(range(256)) * 4000)
    with Sandbox([ACT, COPY], LIMITS) as chain:
        (outcome,) = chain.run([task("a", "nothing", blob=kept.data)])
        acted, copied = outcome.steps
        assert isinstance(acted, StepMade)
        assert isinstance(copied, StepMade)
        assert acted.value.data == {"did": "nothing"}
        assert acted.value.blobs[kept.digest].data == kept.data
        assert not acted.value.new
        (made,) = copied.value.new
        assert copied.value.blobs[made].data == kept.data[::-1]
        known = SampleTask(key="b", values={**task("b", "segfault").values, "act": acted.value})
        (outcome,) = chain.run([known])
        assert [end.step for end in outcome.steps] == ["copy"]
        assert outcome.steps[0] == copied


def test_a_crash_in_a_later_step_keeps_what_the_steps_before_it_made() -> None:
    with Sandbox([ACT, COPY], LIMITS) as chain:
        crashed, whole = chain.run([task("a", "nothing", blob=b"crash"), task("b", "nothing", blob=b"abc")])
        (only,) = chain.run([dataclasses.replace(task("c", "nothing", blob=b"crash"), steps=("act",))])
    acted, verdict = crashed.steps
    assert isinstance(acted, StepMade)
    assert acted.value.data == {"did": "nothing"}
    assert isinstance(verdict, StepVerdict)
    assert (verdict.step, verdict.rule) == ("copy", "crash")
    assert [type(end) for end in whole.steps] == [StepMade, StepMade]
    assert [type(end) for end in only.steps] == [StepMade]


def test_samples_beside_a_bad_one_are_made_each_once() -> None:
    deeds = ["nothing"] * 20
    deeds[3], deeds[7], deeds[8], deeds[12] = "segfault", "exception", "exit", "memory"
    with Sandbox([ACT], LIMITS) as chain:
        outcomes = list(chain.run(task(f"{at}", deed) for at, deed in enumerate(deeds)))
    assert sorted(int(outcome.key) for outcome in outcomes) == list(range(20))
    assert rules(outcomes) == {
        f"{at}": {"segfault": "crash", "exception": "operation", "exit": "crash", "memory": "memory"}.get(deed, "made")
        for at, deed in enumerate(deeds)
    }


def test_memory_that_others_leaked_is_not_charged_to_a_sample() -> None:
    with Sandbox([ACT], LIMITS) as chain:
        assert rules(list(chain.run(task(f"{at}", "leak") for at in range(5)))) == {f"{at}": "made" for at in range(5)}


def test_a_batch_with_a_crash_costs_the_others_nothing() -> None:
    deeds = ["nothing", "segfault", "nothing", "bad", "exception", "nothing", "drop", "nothing"]
    with Sandbox([MANY], LIMITS) as chain:
        outcomes = list(chain.run(task(f"{at}", deed) for at, deed in enumerate(deeds)))
        sizes = [
            end.value.data["batch"]
            for outcome in chain.run(task(f"{at}", "nothing") for at in range(6))
            for end in outcome.steps
            if isinstance(end, StepMade)
        ]
    expected = {"1": "crash", "3": "badness", "4": "operation"}
    assert rules(outcomes) == {f"{at}": expected.get(f"{at}", "made") for at in range(8)}
    assert sizes == [4, 4, 4, 4, 2, 2]


def test_a_sample_that_waits_too_long_has_a_verdict() -> None:
    limits = Limits(memory_bytes=256 * 2**20, wall_s=0.3)
    with Sandbox([ACT], limits) as chain:
        end = run_one(chain, "sleep", 60)
    assert end == StepVerdict(
        step="act", rule="time", message="act took too long, expected at most 0.3 s and 60 s of CPU"
    )


def test_a_consumer_that_takes_its_time_costs_no_sample_its_time() -> None:
    limits = Limits(memory_bytes=256 * 2**20, wall_s=0.3, output_bytes=8 * 2**20)
    outcomes, now_s = [], [0.0]
    # By a clock of its own: a busy machine takes longer than that for a sample.
    with Sandbox([ACT], limits, now_s=lambda: now_s[0]) as chain:
        for outcome in chain.run(task(f"{at}", "large", 3 * 2**20) for at in range(4)):
            now_s[0] += 0.4
            outcomes.append(outcome)
    assert set(rules(outcomes).values()) == {"made"}


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096
    except OSError:
        return 0


def large_jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((9000, 9000)).convert("RGB").save(buffer, "JPEG", quality=30)
    return buffer.getvalue()


def test_a_sound_image_of_81_megapixels_survives_five_kills() -> None:
    jpeg = Blob(large_jpeg())
    content = {"kind": "images", "images": [jpeg.digest], "masks": [None], "boxes": []}
    sample = SampleTask(key="large", values={"record": Value.of(content, kept=[jpeg])})
    step = SandboxStep(name="decode", operation="decode", inputs=("record",))
    kills: list[int] = []

    def kill() -> None:
        """Kill the child while it holds more pixels than any of its imports take."""
        while len(kills) < 5:
            pid = chain.pid
            if pid is not None and pid not in kills and resident_bytes(pid) > 200e6:
                os.kill(pid, signal.SIGKILL)
                kills.append(pid)
            time.sleep(0.002)

    with Sandbox([step], Limits(memory_bytes=2**30)) as chain:
        killer = threading.Thread(target=kill)
        killer.start()
        (outcome,) = chain.run([sample])
        killer.join()
    assert len(kills) == 5
    (end,) = outcome.steps
    assert isinstance(end, StepMade)
    assert end.value.data["images"][0]["width"] == 9000


def test_a_child_that_is_killed_again_and_again_is_the_environments_failure(tmp_path: Path) -> None:
    hunger = tmp_path / "hunger"
    hunger.write_bytes(b"x")
    tmp_path.chmod(0o755)
    with (
        Sandbox([ACT], LIMITS) as chain,
        pytest.raises(EnvironmentFailedError, match=f"died of SIGKILL {RESTARTS_MAX} times"),
    ):
        list(chain.run([task("a", "nothing"), task("b", "die while", str(hunger))]))
    hunger.write_bytes(b"")
    with Sandbox([ACT], LIMITS) as chain:
        assert rules(list(chain.run([task("b", "die while", str(hunger))]))) == {"b": "made"}


def test_a_memory_limit_that_others_lowered_is_no_verdict() -> None:
    resource = pytest.importorskip("resource")
    with Sandbox([ACT], LIMITS) as chain:
        assert isinstance(run_one(chain, "nothing"), StepMade)
        assert chain.pid is not None
        resource.prlimit(chain.pid, resource.RLIMIT_AS, (2**20, 2**20))
        assert isinstance(run_one(chain, "large", 2**19), StepMade)


def test_a_child_sees_no_environment_and_gave_up_what_it_does_not_need(sandbox: Sandbox) -> None:
    end = run_one(sandbox, "environment")
    assert isinstance(end, StepMade)
    assert set(end.value.data["names"]) <= {*ENVIRONMENT, "LC_CTYPE"}
    assert sandbox.granted["system_calls"]
    assert sandbox.granted["no_new_privileges"]
    assert sandbox.granted["unprivileged"] == (end.value.data["user"] != 0)


def test_an_unconfined_child_sees_the_devices_that_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with Sandbox([ACT], Limits(memory_bytes=None, confine=False)) as chain:
        end = run_one(chain, "environment")
        assert isinstance(end, StepMade)
        assert set(end.value.data["names"]) - {"LC_CTYPE", "LD_LIBRARY_PATH"} == {*ENVIRONMENT, "CUDA_VISIBLE_DEVICES"}
        assert not any(chain.granted.values())


def test_an_operation_that_can_not_be_imported_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfigError, match="nowhere"):
        Sandbox([SandboxStep(name="a", operation="nowhere:at_all", inputs=("record",))])


PARENT = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from tests.unit.datahub.test_sandbox import ACT, LIMITS, Sandbox, task
chain = Sandbox([ACT], LIMITS)
list(chain.run([task("a", "nothing")]))
print(chain.pid, flush=True)
list(chain.run([task("b", "sleep", 60)]))
"""


def test_a_child_ends_with_its_parent() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        parent.kill()
    until_s = time.monotonic() + 60
    while is_alive(child):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
