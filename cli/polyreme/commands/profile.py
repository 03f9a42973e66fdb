"""``polyreme profile``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyreme.commands.plan import IMAGE_PATCHES, VISUAL_SHARE
from polyreme.job_files import read_job
from polyreme.views.output import Format, emit, emit_tables, lines, note
from polyreme_api.errors import InvalidConfigError
from polyreme_api.exit_codes import ExitCode
from polyreme_planner.flops import Mix, model_flops_utilisation
from polyreme_planner.hardware import Hardware
from polyreme_planner.plan import Plan, memory_of_plan, plan_for
from polyreme_planner.plan_inputs import hardware_of, mix_of

if TYPE_CHECKING:
    from polyreme_trainer.profile.steps import Profile

RANKS_MAX = 16
"""Largest number of ranks started on this machine."""
STEPS = 3


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
    over what the devices could do by their data sheet. Exposed is the part of exchanges during which nothing was
    computed; host waits are those for the device in a step; peak is the most memory that torch held there, beside what
    was planned. Exit codes: 0, 2 where the job is refused or planned for other devices, 7 where ranks fail, 100 where
    memory is full.

    Examples:

      polyreme profile job.yaml --trace traces/

      polyreme profile job.yaml --costs costs.json && polyreme plan job.yaml --costs costs.json
    """
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
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler tells of itself, line by line
    # Imports torch, which a job that is refused does not need.
    from polyreme.local_run.profile_ranks import measure_costs, profile_ranks

    profiles = profile_ranks(spec, plan, mix, steps=steps, trace=trace)
    _show(plan, mix, profiles, hardware_of(spec), output, planned_bytes=memory_of_plan(spec, plan).total_bytes)
    if costs is not None:
        costs.write_text(measure_costs(spec, plan, mix).to_json() + "\n", encoding="utf-8")
        note(f"times of the parts: {costs}")
    return ExitCode.OK


def _show(
    plan: Plan, mix: Mix, profiles: list[Profile], hardware: Hardware, output: Format, *, planned_bytes: float
) -> None:
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
        "exposedExchangeSeconds": max(profile.exposed_s for profile in profiles),
        "hostWaits": max(profile.host_waits for profile in profiles),
        "peakBytes": max((profile.peak_bytes for profile in profiles if profile.peak_bytes is not None), default=None),
        "plannedBytes": round(planned_bytes),
    }
    layers = [
        _row(profile, line, forward=line.forward_s, backward=line.backward_s)
        for profile in profiles
        for line in profile.layers
    ]
    exchanges = [_row(profile, line, calls=line.calls) for profile in profiles for line in profile.exchanges]
    if output is Format.JSON:
        emit("Profile", whole | {"layers": layers, "exchanges": exchanges}, output=output)
        return
    emit("Profile", whole, output=output, columns=WHOLE)
    emit_tables([("layers, seconds per step", layers, LAYERS), ("exchanges, seconds per step", exchanges, EXCHANGES)])


def _row(profile: Profile, line: Any, **more: float) -> dict[str, Any]:
    share = line.seconds / profile.step_s
    return {"rank": profile.rank, "name": line.name, "seconds": line.seconds, "share": f"{share:.1%}", **more}


WHOLE = [
    ("layout", "layout"),
    ("hardware", "hardware"),
    ("step seconds", "stepSeconds"),
    ("tokens per second", "tokensPerSecond"),
    ("MFU", "mfu"),
    ("exposed exchange s", "exposedExchangeSeconds"),
    ("host waits", "hostWaits"),
    ("peak bytes", "peakBytes"),
    ("planned bytes", "plannedBytes"),
]
LAYERS = lines("rank", "name:layer", "seconds", "share", "forward", "backward")
EXCHANGES = lines("rank", "name:exchange", "seconds", "share", "calls")
