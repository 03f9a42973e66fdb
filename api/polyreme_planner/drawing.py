"""Time that a step takes to draw answers, where a stage learns from rewards: by the prices of serving, without search.

Ranks answer the prompts of a step in waves of as many rows as an engine has. A pipeline runs a wave in as many groups
as it has stages (``serving``); tensor-parallel ranks are priced as one device of their rates together, without
exchanges.
"""

from __future__ import annotations

import dataclasses
import math

from polyreme_api.job.objective import Objective
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_planner.costs import Setting
from polyreme_planner.curriculum import generation_layout, packs_of_stages
from polyreme_planner.layout import Layout
from polyreme_planner.memory import generation_bytes
from polyreme_planner.model_parts import all_parts
from polyreme_planner.serving_prices import Phases, decode_s, handover_s, prefill_s

ROWS_MAX = 64
"""Answers that a rank decodes together."""


def draws_s(spec: TrainingJobSpec, setting: Setting, layout: Layout, *, prompt_tokens: int) -> dict[str, float]:
    """Estimate the time to draw a step's answers, by the stage that learns from them [seconds].

    Args:
        spec: The job's specification.
        setting: Of its plan.
        layout: Of training.
        prompt_tokens: Of a prompt, unless a pack has less room.
    """
    found = {}
    for packs, stage in zip(packs_of_stages(spec), spec.training.stages or (), strict=False):
        if stage.objective is None or not stage.objective.answers:
            continue
        tokens = min(prompt_tokens, packs.tokens - packs.answer_room)
        prompts = packs.per_step * max(1, packs.tokens // (tokens + packs.answer_room))
        phases = Phases(
            mix=dataclasses.replace(setting.mix, sequence_tokens=tokens),
            answer_tokens=stage.objective.answer_tokens,
            batch=prompts,
        )
        found[stage.name] = draw_s(setting, layout, stage.objective, phases)
    return found


def draw_s(setting: Setting, layout: Layout, objective: Objective, phases: Phases) -> float:
    """Estimate the time to answer the prompts of a step [seconds].

    Args:
        setting: Model and hardware.
        layout: Of training.
        objective: Says how many answers, and in which layout.
        phases: All prompts of a step, and the longest answer.
    """
    own = generation_layout([objective], world=layout.world)
    sent_s = generation_bytes(setting) / setting.hardware.far_bytes_per_s if own is not None else 0.0
    drawn = own or layout
    prompts = math.ceil(phases.batch / (drawn.dp * drawn.cp))
    answers = prompts * objective.samples
    waves = math.ceil(answers / ROWS_MAX)
    groups = min(drawn.pp, math.ceil(answers / waves))
    first_s = _stage_s(setting, drawn, phases, prompts=math.ceil(prompts / waves / groups))
    later_s = _stage_s(setting, drawn, phases, answers=math.ceil(answers / waves / groups))
    steps = (phases.answer_tokens - 1) * max(groups, drawn.pp)
    return sent_s + waves * ((groups + drawn.pp - 1) * first_s + steps * later_s)


def _stage_s(setting: Setting, layout: Layout, phases: Phases, *, prompts: int = 0, answers: int = 0) -> float:
    """Price a pipeline stage of equal work: prompts in prefill, or one token of each answer."""
    shape, tp = setting.shape, layout.tp
    hardware = dataclasses.replace(
        setting.hardware,
        flops_per_s=setting.hardware.flops_per_s * tp,
        bytes_per_s=setting.hardware.bytes_per_s * tp,
    )
    taken_s = sum(
        prefill_s(shape, part, hardware, phases, sequences=prompts, ep=layout.ep)
        if prompts
        else decode_s(shape, part, hardware, phases, sequences=answers, ep=layout.ep)
        for part in all_parts(shape)
    )
    sent = handover_s(shape, hardware, tokens=prompts * phases.mix.sequence_tokens + answers) if layout.pp > 1 else 0.0
    return taken_s / layout.pp + sent
