"""``polyreme profile``."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyreme.commands.plan import IMAGE_PATCHES, VISUAL_SHARE
from polyreme.views.output import Format, emit, emit_tables, note
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError
from polyreme_api.exit_codes import ExitCode

if TYPE_CHECKING:
    from polyreme_api.job import TrainingJobSpec
    from polyreme_planner.flops import Mix
    from polyreme_planner.hardware import Hardware
    from polyreme_planner.plan import Plan
    from polyreme_trainer.profile.steps import Profile

RANKS_MAX = 16
"""Largest number of ranks started on this machine."""
STEPS = 3
RUN_S_MAX = 3600.0
"""Longest wait for the ranks."""
LOOPBACK = "127.0.0.1"


def profile(
    job: Annotated[Path, typer.Argument(help="YAML file with one TrainingJob; - reads standard input.")],
    steps: Annotated[int, typer.Option(min=1, max=100, help="Measured steps, after one warm-up step.")] = STEPS,
    trace: Annotated[
        Path | None, typer.Option(help="Folder for a Chrome trace of each rank (chrome://tracing, Perfetto).")
    ] = None,
    costs: Annotated[
        Path | None,
        typer.Option(help="Also time each part of the model alone, and write the file that plan --costs reads."),
    ] = None,
    image_patches: Annotated[int | None, IMAGE_PATCHES] = None,
    visual_share: Annotated[float | None, VISUAL_SHARE] = None,
    output: Annotated[Format, typer.Option("-o", "--output", help="Output format.")] = Format.TABLE,
) -> int:
    """Run a few steps of a job's model on this machine, on synthetic packs: time by layer and by exchange, and MFU.

    All ranks of the job's plan are started here; no data, no checkpoint, nothing is kept. MFU is the model's operations
    over what the devices could do by their data sheet. Exit codes: 0, 2 where the job is refused, 7 where ranks fail.

    Examples:

      polyreme profile job.yaml --trace traces/

      polyreme profile job.yaml --costs costs.json && polyreme plan job.yaml --costs costs.json
    """
    from polyreme.job_files import read_job
    from polyreme_planner.costs import Measured
    from polyreme_planner.plan import plan_for
    from polyreme_planner.plan_inputs import hardware_of, mix_of
    from polyreme_planner.precision import precision_of
    from polyreme_system.clock import SystemClock

    spec = read_job(job).spec
    if spec.workers.runtime.mode == "Environment":
        raise InvalidConfigError(
            "nothing to profile: the job's container brings its own training", field="spec.workers.runtime.mode"
        )
    plan = plan_for(spec)
    if plan.layout.world > RANKS_MAX:
        raise InvalidConfigError(
            f"too many ranks for one machine: {plan.layout.world}, expected at most {RANKS_MAX}",
            field="spec.workers.replicas",
        )
    mix = mix_of(plan.shape, plan.pack_tokens, image_patches=image_patches, visual_share=visual_share)
    if trace is not None:
        trace.mkdir(parents=True, exist_ok=True)
    profiles = _run(spec, plan, mix, steps=steps, trace=trace)
    _show(plan, mix, profiles, hardware_of(spec), output)
    if costs is not None:
        import torch

        from polyreme_trainer.parallel.device import take_device
        from polyreme_trainer.profile.parts import measure_parts

        device = take_device(plan.hardware, local_rank=0)
        dtype = getattr(torch, precision_of(spec.training, plan.hardware))
        times = measure_parts(plan.shape, mix, device=device, clock=SystemClock(), dtype=dtype)
        measured = Measured(hardware=plan.hardware, mix=mix, seconds_per_token=times)
        costs.write_text(measured.to_json() + "\n", encoding="utf-8")
        note(f"times of the parts: {costs}")
    return ExitCode.OK


def _run(spec: TrainingJobSpec, plan: Plan, mix: Mix, *, steps: int, trace: Path | None) -> list[Profile]:
    """Start the ranks, wait for them, and read what each measured."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler tells of itself, line by line
    import polyreme_launcher.rank  # noqa: F401 - imported once, before ranks are forked

    with (
        tempfile.TemporaryDirectory(prefix="polyreme-profile-") as folder,
        socket.create_server((LOOPBACK, 0)) as server,
    ):
        fork = multiprocessing.get_context("fork")
        ranks = [
            fork.Process(target=_be_rank, args=(rank, server, Path(folder), spec, plan, mix, steps, trace))
            for rank in range(plan.layout.world)
        ]
        for process in ranks:
            process.start()
        _wait(ranks)
        return [_read(Path(folder) / f"{rank}.json") for rank in range(plan.layout.world)]


def _wait(ranks: list[Any]) -> None:
    """Wait until all are done or one has failed; then none is left."""
    end_s = time.monotonic() + RUN_S_MAX
    try:
        while any(rank.is_alive() for rank in ranks) and time.monotonic() < end_s:
            if any(rank.exitcode for rank in ranks):
                break
            for rank in ranks:
                rank.join(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    failed = [number for number, rank in enumerate(ranks) if rank.exitcode != ExitCode.OK]
    if failed:
        raise EnvironmentFailedError(
            f"{len(failed)} of {len(ranks)} ranks failed or took longer than {RUN_S_MAX:.0f} s, rank {failed[0]} among "
            "them; their output is above"
        )


def _be_rank(
    number: int,
    server: socket.socket,
    folder: Path,
    spec: TrainingJobSpec,
    plan: Plan,
    mix: Mix,
    steps: int,
    trace: Path | None,
) -> None:
    from polyreme_api.environment import RankEnvironment
    from polyreme_launcher.rank import settings_of
    from polyreme_system.clock import SystemClock
    from polyreme_trainer.parallel.device import take_device
    from polyreme_trainer.profile.steps import profile_rank

    environment = RankEnvironment(
        rank=number,
        local_rank=number,
        world_size=plan.layout.world,
        master_address=LOOPBACK,
        master_port=server.getsockname()[1],
        master_fd=server.detach() if number == 0 else None,
        progress_fd=None,
        attempt=1,
        job_file="",
        plan_file="",
        checkpoint_url=folder.as_uri(),
        resume_from=None,
    )
    settings = settings_of({}, environment, spec, plan)
    device = take_device(plan.hardware, local_rank=number)
    measured = profile_rank(
        dataclasses.replace(settings, rank=dataclasses.replace(settings.rank, device_type=device)),
        mix,
        packs_per_rank=plan.packs_per_rank,
        steps=steps,
        trace=None if trace is None else trace / f"rank{number}.json",
        clock=SystemClock(),
    )
    (folder / f"{number}.json").write_text(json.dumps(dataclasses.asdict(measured)), encoding="utf-8")


def _read(path: Path) -> Profile:
    from polyreme_trainer.profile.steps import Profile, ProfileRow

    data = json.loads(path.read_text(encoding="utf-8"))
    return Profile(
        rank=data["rank"],
        step_s=data["step_s"],
        layers=tuple(ProfileRow(**line) for line in data["layers"]),
        exchanges=tuple(ProfileRow(**line) for line in data["exchanges"]),
    )


def _show(plan: Plan, mix: Mix, profiles: list[Profile], hardware: Hardware, output: Format) -> None:
    from polyreme_planner.flops import model_flops_utilisation

    step_s, world = max(profile.step_s for profile in profiles), plan.layout.world
    tokens = plan.packs_per_step * plan.pack_tokens
    mfu = model_flops_utilisation(
        plan.shape,
        mix,
        tokens=tokens,
        step_s=step_s,
        devices=world,
        peak_flops_per_s=hardware.peak_flops_per_s,
    )
    whole = {
        "layout": str(plan.layout),
        "hardware": plan.hardware,
        "stepSeconds": step_s,
        "tokensPerSecond": tokens / step_s,
        "mfu": mfu,
    }
    layers = [_row(profile, line, forward=line.forward_s, backward=line.backward_s) for profile, line in _all(profiles)]
    exchanges = [_row(profile, line, calls=line.calls) for profile in profiles for line in profile.exchanges]
    if output is Format.JSON:
        emit("Profile", whole | {"layers": layers, "exchanges": exchanges}, output=output)
        return
    emit("Profile", whole, output=output, columns=WHOLE)
    emit_tables([("layers, seconds per step", layers, LAYERS), ("exchanges, seconds per step", exchanges, EXCHANGES)])


def _all(profiles: list[Profile]) -> list[tuple[Profile, Any]]:
    return [(profile, line) for profile in profiles for line in profile.layers]


def _row(profile: Profile, line: Any, **more: float) -> dict[str, Any]:
    share = line.seconds / profile.step_s
    return {"rank": profile.rank, "name": line.name, "seconds": line.seconds, "share": f"{share:.1%}", **more}


WHOLE = [
    ("layout", "layout"),
    ("hardware", "hardware"),
    ("step seconds", "stepSeconds"),
    ("tokens per second", "tokensPerSecond"),
    ("MFU", "mfu"),
]
LAYERS = [
    ("rank", "rank"),
    ("layer", "name"),
    ("seconds", "seconds"),
    ("share", "share"),
    ("forward", "forward"),
    ("backward", "backward"),
]
EXCHANGES = [("rank", "rank"), ("exchange", "name"), ("seconds", "seconds"), ("share", "share"), ("calls", "calls")]
