"""``polyreme plan --serving``: devices, layers, bits and microbatches that serve a model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import typer

from polyreme.views.output import Format, emit, emit_tables
from polyreme_api.errors import InvalidConfigError
from polyreme_planner.hardware import GIB, Hardware
from polyreme_planner.plan_inputs import mix_of
from polyreme_planner.serving import SERVING_DEVICES, ServingPlan, Stage, plan_serving
from polyreme_planner.serving_prices import Phases, ServingSetting, indicator_without_data
from polyreme_planner.shapes import PRESETS, ModelShape

_PANEL = "Serving"
SERVING = typer.Option("--serving", help="Plan how devices answer prompts, not how they train.", rich_help_panel=_PANEL)
MODEL = typer.Option(
    help=f"Model without a job: {', '.join(PRESETS)}.", show_default="the job's", rich_help_panel=_PANEL
)
DEVICES = typer.Option(
    help=f"Devices that serve, with commas between, unlike ones too: {', '.join(SERVING_DEVICES)}.",
    rich_help_panel=_PANEL,
)
PROMPT = typer.Option(
    help="Tokens of a prompt, also of those that a stage with rewards answers.", rich_help_panel=_PANEL
)
ANSWER = typer.Option(help="Tokens of an answer.", rich_help_panel=_PANEL)
BATCH = typer.Option(help="Prompts that are answered together.", rich_help_panel=_PANEL)
BUDGET = typer.Option(
    help="Error of rounded weights that is allowed: share of that of 4 bits everywhere, 0 to 1.", rich_help_panel=_PANEL
)
CHOSEN = [
    ("batch seconds", "seconds"),
    ("tokens per second", "tokensPerSecond"),
    ("prefill seconds", "prefillSeconds"),
    ("decode seconds", "decodeSeconds"),
    ("microbatches", "microbatches"),
    ("error of 4 bits everywhere", "error"),
    ("orders not tried", "ordersNotTried"),
]
STAGES = [
    ("device", "device"),
    ("layers", "layers"),
    ("bits", "bits"),
    ("memory GiB", "memoryGiB"),
    ("of GiB", "usableGiB"),
    ("prefill s", "prefillSeconds"),
    ("decode s", "decodeSeconds"),
]


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What the options ask for."""

    prompt_tokens: int
    answer_tokens: int
    batch: int
    quality_budget: float
    visual_share: float | None
    image_patches: int | None

    def setting(self, shape: ModelShape, devices: tuple[Hardware, ...]) -> ServingSetting:
        """Return the inputs of a plan.

        Raises:
            InvalidConfigError: If a value is out of its range.
        """
        if self.prompt_tokens < 1:
            raise InvalidConfigError(
                f"prompt-tokens is {self.prompt_tokens}, expected at least 1", field="--prompt-tokens"
            )
        mix = mix_of(shape, self.prompt_tokens, visual_share=self.visual_share, image_patches=self.image_patches)
        return ServingSetting(
            shape=shape,
            devices=devices,
            phases=Phases(mix=mix, answer_tokens=self.answer_tokens, batch=self.batch),
            indicator=indicator_without_data(shape),
            budget=self.quality_budget,
        )


def serve(
    shape: ModelShape | None, asked: Asked, *, serving: bool, model: str | None, devices: str | None, output: Format
) -> None:
    """Plan and print.

    Args:
        shape: The job's model; None without a job.
        asked: Tokens, batch and budget.
        serving: Whether --serving was given.
        model: Name of a model without a job.
        devices: Names of the devices.
        output: Table or JSON.

    Raises:
        InvalidConfigError: If there is no job and nothing to serve, or a value is refused.
    """
    if not serving:
        raise InvalidConfigError("nothing to plan: no job is given, and --serving neither", field="JOB or --serving")
    if (shape is None) == (model is None):
        given = "none" if shape is None else "both a job and --model"
        raise InvalidConfigError(f"serving needs one model, of a job or by --model: {given} given", field="--model")
    if shape is not None and not shape.decoder.layers:
        raise InvalidConfigError(
            "nothing to plan: the job's container brings its own model", field="spec.workers.runtime.mode"
        )
    if model is not None and model not in PRESETS:
        raise InvalidConfigError(f"unknown model: {model!r}, known are {', '.join(PRESETS)}", field="--model")
    setting = asked.setting(shape or PRESETS[model or ""], _devices_named(devices))
    found = plan_serving(setting)
    chosen = _row(found, setting.phases) | {"model": setting.shape.name}
    stages = [_stage(stage) for stage in found.stages]
    if output is Format.JSON:
        for row, stage in zip(stages, found.stages, strict=True):
            row["bits"] = list(stage.bits)
        emit("ServingPlan", chosen | {"stages": stages}, output=output)
        return
    emit("ServingPlan", chosen, output=output, columns=CHOSEN)
    emit_tables([("stages of the pipeline", stages, STAGES)])


def _devices_named(names: str | None) -> tuple[Hardware, ...]:
    """Look the devices of a list up, names with commas between.

    Raises:
        InvalidConfigError: If there is none, or one is not known.
    """
    found = [name.strip() for name in (names or "").split(",") if name.strip()]
    if not found:
        raise InvalidConfigError("no devices to serve on are given: name them, with commas between", field="--devices")
    for name in found:
        if name not in SERVING_DEVICES:
            raise InvalidConfigError(
                f"unknown device: {name!r}, known are {', '.join(SERVING_DEVICES)}", field="--devices"
            )
    return tuple(SERVING_DEVICES[name] for name in found)


def _row(found: ServingPlan, phases: Phases) -> dict[str, Any]:
    return {
        "seconds": round(found.total_s, 6),
        "tokensPerSecond": round(phases.batch * phases.answer_tokens / found.total_s, 1),
        "prefillSeconds": round(found.seconds[0], 6),
        "decodeSeconds": round(found.seconds[1], 6),
        "microbatches": "{} prompts in prefill, {} answers in decode".format(*found.sequences),
        "prefillSequences": found.sequences[0],
        "decodeSequences": found.sequences[1],
        "error": round(found.error, 4),
        "ordersNotTried": found.orders_left_out,
    }


def _stage(stage: Stage) -> dict[str, Any]:
    counts = sorted(Counter(stage.bits).items())
    return {
        "device": stage.hardware.name,
        "layers": len(stage.bits),
        "bits": ", ".join(f"{count} x {bits}" for bits, count in counts),
        "memoryGiB": round(stage.memory_bytes / GIB, 2),
        "usableGiB": round(stage.hardware.usable_bytes / GIB, 2),
        "prefillSeconds": round(stage.seconds[0], 6),
        "decodeSeconds": round(stage.seconds[1], 6),
    }
