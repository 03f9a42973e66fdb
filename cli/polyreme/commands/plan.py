"""``polyreme plan``."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme.commands.job_arguments import OptionalJobFiles, SetOption
from polyreme.commands.plan_serving import ANSWER, BATCH, BUDGET, DEVICES, MODEL, PROMPT, SERVING, Asked, serve
from polyreme.commands.plan_slow_device import SLOW, keep_pace
from polyreme.job_overrides import read_manifest
from polyreme.views.output import Format, emit, emit_tables, lines
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.load import parse_new_job
from polyreme_planner.adapters import adapters_of
from polyreme_planner.automatic import quick_search
from polyreme_planner.costs import Measured, Setting
from polyreme_planner.curriculum import kinds_of_packs
from polyreme_planner.drawing import draws_s
from polyreme_planner.hardware import HARDWARE, Hardware
from polyreme_planner.hardware_file import hardware_from_json
from polyreme_planner.plan import shape_of
from polyreme_planner.plan_inputs import generation_ep_of, hardware_of, mix_of, numerics_of, recomputes_of
from polyreme_planner.refusals import what_does_not_fit
from polyreme_planner.schedule_picture import LEGEND, picture
from polyreme_planner.search import Estimate, Found, simulate

RUNNERS_UP = 5
IMAGE_PATCHES = typer.Option(
    help="Patches of one image, before the tower joins them.", show_default="1024, or what fits a pack"
)
VISUAL_SHARE = typer.Option(help="Share of the tokens that are image features, 0 to 1.", show_default="0.5")


def plan(
    job: OptionalJobFiles = None,
    settings: SetOption = None,
    hardware: Annotated[
        str | None,
        typer.Option(help=f"Device that the plan is for: {', '.join(HARDWARE)}.", show_default="the job's"),
    ] = None,
    hardware_file: Annotated[
        Path | None,
        typer.Option(help="JSON file with a row of hardware of your own, for devices that the table does not have."),
    ] = None,
    image_patches: Annotated[int | None, IMAGE_PATCHES] = None,
    visual_share: Annotated[float | None, VISUAL_SHARE] = None,
    costs: Annotated[
        Path | None,
        typer.Option(help="File of measured times (from polyreme profile --costs), used instead of estimates."),
    ] = None,
    runners_up: Annotated[int, typer.Option(min=0, max=40, help="Number of runners-up to show.")] = RUNNERS_UP,
    serving: Annotated[bool, SERVING] = False,
    model: Annotated[str | None, MODEL] = None,
    devices: Annotated[str | None, DEVICES] = None,
    prompt_tokens: Annotated[int, PROMPT] = 1024,
    answer_tokens: Annotated[int, ANSWER] = 256,
    batch: Annotated[int, BATCH] = 32,
    quality_budget: Annotated[float, BUDGET] = 0.5,
    slow_device: Annotated[str | None, SLOW] = None,
    output: Annotated[Format, typer.Option("-o", "--output", help="Output format.")] = Format.TABLE,
) -> int:
    """Search the layout for a job's workers: the choice, the runners-up and why they lost, and the schedule as text.

    A job with curriculum stages is planned for the longest packs; validate checks the layout against all stages. Times
    are estimates from operations, bytes and the rates of the hardware; nothing is started. With --serving: the layers,
    bits of weights and microbatches with which unlike devices answer prompts fastest. With --slow-device: the bits of
    each layer with which a slower device trains in step with the job's. Exit codes: 0, or 2 if the job
    is refused or nothing fits the memory.

    Examples:

      polyreme plan job.yaml

      polyreme plan job.yaml --hardware h200-141g --visual-share 0.3

      polyreme plan job.yaml --hardware-file mine.json

      polyreme plan job.yaml --set workers.replicas=4 --set training.packsPerStep=64

      polyreme plan job.yaml --costs costs.json -o json

      polyreme plan job.yaml --hardware a100-80g --slow-device l4-24g

      polyreme plan --serving --model kimi-vl-a3b --devices a100-80g,l40s-48g
    """
    if serving or job is None:
        shape = None if job is None else shape_of(parse_new_job(read_manifest(job, settings or ())).spec)
        asked = Asked(prompt_tokens, answer_tokens, batch, quality_budget, visual_share, image_patches)
        serve(shape, asked, serving=serving, model=model, devices=devices, output=output)
        return ExitCode.OK
    spec = parse_new_job(read_manifest(job, settings or ())).spec
    measured = None if costs is None else Measured.from_json(_text(costs, what="measured times", option="--costs"))
    setting = _setting(
        spec, _hardware(hardware, hardware_file), measured, image_patches=image_patches, visual_share=visual_share
    )
    if slow_device is not None:
        ranks, packs = spec.workers.replicas * spec.workers.devices, kinds_of_packs(spec)[0].per_step
        keep_pace(setting, slow_device, ranks=ranks, packs_per_step=packs, output=output)
        return ExitCode.OK
    found, best = _searched(spec, setting, runners_up)
    draws = draws_s(spec, setting, best.candidate.layout, prompt_tokens=prompt_tokens)
    _show(setting, found, best, draws, output)
    return ExitCode.OK


def _searched(spec: TrainingJobSpec, setting: Setting, runners_up: int) -> tuple[Found, Estimate]:
    """Search the layout.

    Raises:
        InvalidConfigError: If nothing fits.
    """
    workers, packs = spec.workers, kinds_of_packs(spec)[0].per_step

    def searched(world: int, others: int) -> Found:
        return quick_search(
            setting, world=world, packs_per_step=packs, recomputes=recomputes_of(spec), runners_up=others
        )

    found = searched(workers.replicas * workers.devices, runners_up)
    if found.best is None:
        raise what_does_not_fit(
            setting,
            found.leanest,
            replicas=workers.replicas,
            devices=workers.devices,
            packs_per_step=packs,
            found=lambda world: searched(world, 0).best,
        )
    return found, found.best


def _setting(
    spec: TrainingJobSpec,
    hardware: str | Hardware | None,
    measured: Measured | None,
    *,
    image_patches: int | None,
    visual_share: float | None,
) -> Setting:
    """Return what is searched for: the job's own, but for what the options say.

    Raises:
        InvalidConfigError: If the job has no layout of ours, or an option is out of its bounds.
    """
    if spec.workers.runtime.mode == "Environment":
        raise InvalidConfigError(
            "nothing to search: the job's container brings its own training and chooses its own layout",
            field="spec.workers.runtime.mode",
        )
    shape = shape_of(spec)
    tokens = kinds_of_packs(spec)[0].tokens
    mix = mix_of(shape, tokens, image_patches=image_patches, visual_share=visual_share)
    if measured is not None and image_patches is None and visual_share is None:
        mix = dataclasses.replace(measured.mix, sequence_tokens=tokens)
    of = hardware_of(spec, hardware)
    return Setting(
        shape=shape,
        mix=mix,
        hardware=of,
        numerics=numerics_of(spec, shape, hardware=of.name),
        adapters=adapters_of(spec.training, shape),
        generation_ep=generation_ep_of(spec),
        measured=measured,
    )


def _hardware(name: str | None, file: Path | None) -> str | Hardware | None:
    if file is None:
        return name
    if name is not None:
        raise InvalidConfigError("--hardware and --hardware-file exclude each other: give one", field="--hardware")
    return hardware_from_json(_text(file, what="hardware", option="--hardware-file"))


def _text(path: Path, *, what: str, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: {path}", field=option) from error
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfigError(f"{what} can't be read: {path}: {error}", field=option) from error


def _show(setting: Setting, found: Found, best: Estimate, draws: Mapping[str, float], output: Format) -> None:
    simulated = simulate(setting, best)
    drawn = [] if simulated is None else picture(simulated)
    chosen = _row(best) | {
        "hardware": setting.hardware.name,
        "precision": setting.numerics.precision,
        "examined": found.examined,
        "doNotFit": found.too_large,
        "startGiB": round(best.memory.start_bytes / 2**30, 2),
        "largestConsumers": best.memory.largest(),
        "drawSeconds": {stage: round(taken_s, 6) for stage, taken_s in draws.items()},
        "sharesSeconds": {name: round(taken_s, 6) for name, taken_s in best.shares_s.items()},
    }
    kept = {"parallelism": _parallelism(best), "training": {"recompute": best.candidate.recompute.title()}}
    others = [_row(other) | {"why": why} for other, why in found.runners_up]
    if output is Format.JSON:
        emit("LayoutPlan", chosen | {"spec": kept, "runnersUp": others, "picture": drawn}, output=output)
        return
    shares = "; ".join(f"{name} {taken_s:.3g} s" for name, taken_s in best.shares_s.items() if taken_s)
    shown = chosen | {"shares": shares, "draws": "; ".join(f"{name} {taken_s:.3g}" for name, taken_s in draws.items())}
    emit("LayoutPlan", shown, output=output, columns=[*CHOSEN, DRAWS] if draws else CHOSEN)
    emit_tables([("runners-up", others, OTHERS)])
    if drawn:
        sys.stdout.write("\n" + "\n".join([*drawn, LEGEND]) + "\n")
    sys.stdout.write("\nto keep this layout, add to the job's spec:\n")
    sys.stdout.writelines(f"  {part}: {_flow(fields)}\n" for part, fields in kept.items())


def _parallelism(best: Estimate) -> dict[str, Any]:
    """Write a choice as a job names it."""
    of, layout = best.candidate, best.candidate.layout
    degrees = {name: getattr(layout, name) for name in ("ep", "pp", "cp", "tp") if getattr(layout, name) > 1}
    named = {"mode": "Explicit", "dp": layout.dp, **degrees}
    if of.schedule is not None:
        named["schedule"] = str(of.schedule)
    named["microbatches"] = of.microbatches
    return named if of.schedule is None else named | {"stageLayers": list(best.split)}


def _flow(fields: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(fields, default_flow_style=True, sort_keys=False, width=math.inf).strip()


CHOSEN = [
    ("plan", "plan"),
    ("layers per stage", "stageLayers"),
    ("hardware", "hardware"),
    ("precision", "precision"),
    ("step seconds", "stepSeconds"),
    ("breakdown", "shares"),
    ("bubble", "bubble"),
    ("memory GiB", "memoryGiB"),
    ("memory for", "largestConsumers"),
    ("at the start GiB", "startGiB"),
    ("examined", "examined"),
    ("do not fit", "doNotFit"),
]
DRAWS = ("draw seconds", "draws")
OTHERS = lines("plan", "stepSeconds:step seconds", "bubble", "memoryGiB:memory GiB", "why")


def _row(estimate: Estimate) -> dict[str, Any]:
    return {
        "plan": str(estimate.candidate),
        "recompute": estimate.candidate.recompute.title(),
        "stageLayers": " ".join(map(str, estimate.split)),
        "stepSeconds": round(estimate.step_s, 6),
        "bubble": round(estimate.bubble, 4),
        "memoryGiB": round(estimate.memory.total_bytes / 2**30, 2),
    }
