"""Ranks that profile a job's model on this machine: forked, waited for, and read."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from polyreme_api.environment import RankEnvironment
from polyreme_api.errors import EnvironmentFailedError, PolyremeError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.job import TrainingJobSpec
from polyreme_launcher.rank import out_of_memory_error, settings_of
from polyreme_launcher.rank_processes import with_torch_settings
from polyreme_planner.costs import Measured
from polyreme_planner.flops import Mix
from polyreme_planner.plan import Plan
from polyreme_planner.precision import precision_of
from polyreme_system.clock import SystemClock
from polyreme_trainer.parallel.device import check_shared_memory, full_memory, take_device
from polyreme_trainer.profile.parts import measure_parts
from polyreme_trainer.profile.steps import Profile, ProfileRow, profile_rank
from polyreme_trainer.train.settings import TrainSettings

RUN_S_MAX = 3600.0
"""Longest wait for the ranks."""
LOOPBACK = "127.0.0.1"


def measure_costs(spec: TrainingJobSpec, plan: Plan, mix: Mix) -> Measured:
    """Time each part of the model alone."""
    device = take_device(plan.hardware, local_rank=0, tf32=spec.training.tf32)
    dtype = getattr(torch, precision_of(spec.training, plan.hardware))
    times = measure_parts(plan.shape, mix, device=device, clock=SystemClock(), dtype=dtype)
    return Measured(hardware=plan.hardware, mix=mix, seconds_per_token=times)


def profile_ranks(spec: TrainingJobSpec, plan: Plan, mix: Mix, *, steps: int, trace: Path | None) -> list[Profile]:
    """Start the ranks, wait for them, and read what each measured.

    Raises:
        PolyremeError: The first error of a rank.
        EnvironmentFailedError: If a rank ends otherwise, or they take longer than ``RUN_S_MAX``.
    """
    with (
        tempfile.TemporaryDirectory(prefix="polyreme-profile-") as folder,
        socket.create_server((LOOPBACK, 0)) as server,
    ):
        fork = multiprocessing.get_context("fork")
        errors = fork.SimpleQueue()
        given = {"spec": spec, "plan": plan, "mix": mix, "steps": steps, "trace": trace}
        ranks = [
            fork.Process(target=_be_rank, args=(rank, server, Path(folder), errors.put), kwargs=given)
            for rank in range(plan.layout.world)
        ]
        for process in ranks:
            process.start()
        try:
            _wait(ranks)
        except EnvironmentFailedError:
            if errors.empty():
                raise
            raise errors.get() from None
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
    report: Callable[[PolyremeError], object],
    *,
    spec: TrainingJobSpec,
    plan: Plan,
    mix: Mix,
    steps: int,
    trace: Path | None,
) -> None:
    # As a launcher does; torch reads them when it first uses a device.
    os.environ.update(with_torch_settings(os.environ, trace or folder))
    try:
        device = take_device(plan.hardware, local_rank=number, tf32=spec.training.tf32)
        if device != "cpu":
            check_shared_memory(plan.layout.world)
        settings = _settings(number, server, folder, spec=spec, plan=plan)
        measured = profile_rank(
            dataclasses.replace(settings, rank=dataclasses.replace(settings.rank, device_type=device)),
            mix,
            packs_per_rank=plan.packs_per_rank,
            steps=steps,
            trace=None if trace is None else trace / f"rank{number}.json",
            clock=SystemClock(),
        )
    except (PolyremeError, MemoryError, RuntimeError) as error:
        if isinstance(error, PolyremeError):
            report(error)
        elif (message := full_memory(error)) is not None:
            report(out_of_memory_error(spec, plan, message))
        else:
            raise
        raise SystemExit(ExitCode.ENVIRONMENT) from None  # the parent raises what was reported
    (folder / f"{number}.json").write_text(json.dumps(dataclasses.asdict(measured)), encoding="utf-8")


def _settings(number: int, server: socket.socket, folder: Path, *, spec: TrainingJobSpec, plan: Plan) -> TrainSettings:
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
    return settings_of({}, environment, spec, plan)


def _read(path: Path) -> Profile:
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = {part: tuple(ProfileRow(**line) for line in data[part]) for part in ("layers", "exchanges")}
    return Profile(**data | rows)
