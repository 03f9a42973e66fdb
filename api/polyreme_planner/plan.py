"""The plan of an attempt: made before pods exist, frozen with its hash, obeyed by every rank."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from functools import cached_property
from typing import Any

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_planner.automatic import distance, quick_search
from polyreme_planner.costs import Recompute, Setting
from polyreme_planner.curriculum import Packs, check_answer_room, check_generation, check_learners, kinds_of_packs
from polyreme_planner.hardware import PROCESSOR
from polyreme_planner.layout import (
    Layout,
    fitting_layouts,
    fitting_worlds,
    gives_each_packs,
    mesh_misfits,
    misfits,
    packs_of_rank,
    ulysses_degree,
)
from polyreme_planner.memory import Memory
from polyreme_planner.pipelines import (
    DEFAULT_SCHEDULE,
    WHOLE,
    Cut,
    accumulated_microbatches,
    cut_step,
    stream_volumes,
)
from polyreme_planner.plan_inputs import hardware_of, recomputes_of, setting_of
from polyreme_planner.precision import precision_of
from polyreme_planner.refusals import check_memory, memory_of_cut, what_does_not_fit
from polyreme_planner.schedules import Schedule, chunks_of
from polyreme_planner.search import Candidate, Estimate, Found, Pricer
from polyreme_planner.shapes import (
    ANY_MODEL,
    DecoderShape,
    ModelShape,
    VisionShape,
    check_shape,
    model_shape,
    shape_content,
)
from polyreme_planner.traffic_volume import GroupVolume, group_volumes, nominal_volumes

HASH_CHARACTERS = 16
PLAN_CHARACTERS_MAX = 16_384
"""Longest plan that a status carries; one for 1,024 devices takes 1,300."""
ANY_HARDWARE = ""
"""Hardware of a plan for a container that brings its own training."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Layout, stages, batch split and traffic of an attempt. Jobs of equal specs share one, with its hash and text."""

    shape: ModelShape
    replicas: int
    devices: int
    layout: Layout
    packs_per_step: int
    pack_tokens: int
    volumes: tuple[GroupVolume, ...]
    cut: Cut = WHOLE
    """Pipeline schedule, layers of each stage, microbatches."""
    hardware: str = ANY_HARDWARE
    """Kind of the devices (``hardware.py``); a rank on others refuses the plan."""
    recompute: Recompute | None = Recompute.NONE
    """What layers recompute; None in a plan of an earlier version, which left it to the job."""

    @property
    def packs_per_rank(self) -> int:
        """Packs that one data-parallel rank trains on in one step."""
        return packs_of_rank(self.packs_per_step, self.layout.dp)

    @cached_property
    def hash(self) -> str:
        """Digest of everything in the plan; a rank refuses another.

        Without recomputation it is that of earlier versions, whose plans did not have the field.
        """
        content = dataclasses.asdict(self) | {"shape": shape_content(self.shape)}
        if content["recompute"] in {None, Recompute.NONE}:
            del content["recompute"]
        return _digest(content)

    def to_json(self) -> str:
        """Convert the plan to JSON data, with its hash."""
        return self._text

    @cached_property
    def _text(self) -> str:
        return json.dumps({**dataclasses.asdict(self), "hash": self.hash}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan back.

        Raises:
            InvalidConfigError: If it is no plan, or the hash does not fit the content.
        """
        try:
            data = json.loads(text)
            plan = cls._of(data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidConfigError(f"plan is damaged: {type(error).__name__}, {error}") from error
        if plan.hash != data.get("hash"):
            raise InvalidConfigError(f"plan is damaged: hash {data.get('hash')!r}, its content has {plan.hash!r}")
        return plan

    @classmethod
    def _of(cls, data: Any) -> Plan:
        shape = data["shape"]
        return cls(
            shape=ModelShape(
                name=shape["name"], vision=VisionShape(**shape["vision"]), decoder=DecoderShape(**shape["decoder"])
            ),
            replicas=data["replicas"],
            devices=data["devices"],
            layout=Layout(**data["layout"]),
            packs_per_step=data["packs_per_step"],
            pack_tokens=data["pack_tokens"],
            volumes=tuple(GroupVolume(**volume) for volume in data["volumes"]),
            cut=_cut(data["cut"]),
            hardware=data["hardware"],
            recompute=None if data.get("recompute") is None else Recompute(data["recompute"]),
        )

    def recompute_of(self, spec: TrainingJobSpec) -> Recompute:
        """Return what layers recompute; if the plan does not say it, what the job names."""
        return self.recompute or recomputes_of(spec)[0]

    @property
    def recompute_label(self) -> str:
        """What layers recompute as a job names it, ``Selective``; empty if they keep everything."""
        return "" if self.recompute in {None, Recompute.NONE} else str(self.recompute).title()


def shape_of(spec: TrainingJobSpec) -> ModelShape:
    """Return the model shape that a spec names.

    Raises:
        InvalidConfigError: If preset, sizes and tokenizer do not fit together.
    """
    overrides = {"vision": dict(spec.model.overrides.vision), "decoder": dict(spec.model.overrides.decoder)}
    shape = model_shape(spec.model.preset, {part: sizes for part, sizes in overrides.items() if sizes})
    hardware = hardware_of(spec).name
    half = precision_of(spec.training, hardware) == "bfloat16"
    check_shape(shape, scalar_bytes=2 if half else 4, flash=half and hardware != PROCESSOR)
    if spec.data.tokenizer.vocabulary > shape.decoder.vocabulary:
        raise InvalidConfigError(
            f"tokenizer does not fit the model: {spec.data.tokenizer.vocabulary} tokens, "
            f"the model embeds {shape.decoder.vocabulary}",
            field="spec.data.tokenizer.vocabulary",
        )
    return shape


def memory_of_plan(spec: TrainingJobSpec, plan: Plan) -> Memory:
    """Compute the fullest rank of a job's plan, at its first kind of packs."""
    return memory_of_cut(
        setting_of(spec, plan.shape),
        plan.layout,
        plan.cut,
        packs_per_step=kinds_of_packs(spec)[0].per_step,
        recompute=plan.recompute_of(spec),
    )


def step_of_plan(spec: TrainingJobSpec, plan: Plan) -> float:
    """Estimate the time of a step of a job's plan, at its first kind of packs, as ``polyreme plan`` does [seconds]."""
    layout, cut = plan.layout, plan.cut
    candidate = Candidate(
        layout=layout,
        schedule=cut.schedule,
        recompute=plan.recompute_of(spec),
        microbatch_packs=packs_of_rank(kinds_of_packs(spec)[0].per_step, layout.dp) // cut.microbatches,
        microbatches=cut.microbatches,
        chunks=chunks_of(cut.schedule, layout.pp, len(cut.stage_layers)),
    )
    split = cut.stage_layers or (plan.shape.decoder.layers,)
    return Pricer(setting_of(spec, plan.shape)).divided(candidate, split).step_s


def shape_digest(shape: ModelShape) -> str:
    """Digest of a model shape, by which a checkpoint of another model is recognised."""
    return _digest(shape_content(shape))


def plan_for(spec: TrainingJobSpec, *, replicas: int | None = None) -> Plan:
    """Plan an attempt.

    Args:
        spec: The job's specification.
        replicas: Worker pods, if they are not ``spec.workers.replicas`` (elastic resize). An Explicit layout then
            scales its dp only.

    Raises:
        InvalidConfigError: If no layout fits, naming the nearest worker counts that would.
    """
    count = spec.workers.replicas if replicas is None else replicas
    world = count * spec.workers.devices
    if spec.workers.runtime.mode == "Environment":
        return _plan_of_any_model(spec, count=count, scaled=replicas is not None)
    shape = shape_of(spec)
    check_learners(spec, shape)
    check_answer_room(spec)
    check_generation(spec, shape, world=world)
    longest, *others = kinds_of_packs(spec)
    setting, recomputes = setting_of(spec, shape), recomputes_of(spec)
    if spec.parallelism.mode == "Explicit":
        scaled = replicas is not None
        layout = _explicit(spec, setting, longest, world=world, scaled=scaled)
        cut = _cut_for(spec, shape, layout, longest, scaled=scaled)
    else:
        chosen = _automatic(spec, setting, longest, replicas=count)
        layout, cut = chosen.candidate.layout, _cut_of(chosen)
        recomputes = recomputes[recomputes.index(chosen.candidate.recompute) :]
    fitting = check_memory(setting, layout, cut, packs_per_step=longest.per_step, recomputes=recomputes)
    for packs in others:
        fitting = _check_stage(spec, shape, layout, cut, packs, recomputes=fitting)
    packs_per_rank = packs_of_rank(spec.training.packs_per_step, layout.dp)
    tokens_per_rank = packs_per_rank * spec.data.sequence_tokens
    return Plan(
        shape=shape,
        replicas=count,
        devices=spec.workers.devices,
        layout=layout,
        packs_per_step=spec.training.packs_per_step,
        pack_tokens=spec.data.sequence_tokens,
        volumes=(
            *group_volumes(
                layout,
                shape=shape,
                tokens_per_rank=tokens_per_rank,
                numerics=setting.numerics,
                microbatches=cut.microbatches,
                adapters=setting.adapters,
            ),
            *stream_volumes(
                cut, layout=layout, shape=shape, tokens_per_rank=tokens_per_rank, numerics=setting.numerics
            ),
        ),
        cut=cut,
        hardware=setting.hardware.name,
        recompute=fitting[0],
    )


def _check_stage(
    spec: TrainingJobSpec,
    shape: ModelShape,
    layout: Layout,
    cut: Cut,
    packs: Packs,
    *,
    recomputes: tuple[Recompute, ...],
) -> tuple[Recompute, ...]:
    """Check the layout, which was found for the longest packs of all curriculum stages, with those of another stage.

    Returns:
        The recomputation choices with which these fit.

    Raises:
        InvalidConfigError: Naming the stage and what does not fit.
    """
    broken = list(
        misfits(layout, world=layout.world, shape=shape, packs_per_step=packs.per_step, pack_tokens=packs.tokens)
    )
    share = packs_of_rank(packs.per_step, layout.dp)
    if not broken and share % cut.microbatches:
        broken = [f"{cut.microbatches} microbatches do not divide {share} packs of a rank"]
    where = f"layout {layout} of the longest packs does not fit stage {packs.stage!r}"
    if broken:
        raise InvalidConfigError(
            f"{where}, which has {packs.per_step} packs of {packs.tokens} tokens: {'; '.join(broken)}; one layout "
            "must train all stages",
            field="spec.training.stages[].packsPerStep or spec.parallelism",
        )
    setting = setting_of(spec, shape, pack_tokens=packs.tokens)
    try:
        return check_memory(setting, layout, cut, packs_per_step=packs.per_step, recomputes=recomputes)
    except InvalidConfigError as error:
        raise InvalidConfigError(f"{where}: {error.message}", field=error.field) from error


def _cut_of(chosen: Estimate) -> Cut:
    of = chosen.candidate
    return Cut(schedule=of.schedule, stage_layers=chosen.split if of.schedule else (), microbatches=of.microbatches)


def _cut_for(spec: TrainingJobSpec, shape: ModelShape, layout: Layout, packs: Packs, *, scaled: bool) -> Cut:
    """Cut a step as the job asks; at another size than it was written for, a microbatch keeps its packs."""
    packs_per_rank = packs_of_rank(packs.per_step, layout.dp)
    asked = spec.parallelism
    schedule = None if asked.schedule is None else Schedule(asked.schedule)
    microbatches = asked.microbatches
    if scaled and (microbatches is not None or layout.pp == 1):
        order = schedule or (DEFAULT_SCHEDULE if layout.pp > 1 else None)
        written = packs_of_rank(packs.per_step, asked.dp or layout.dp) // (microbatches or 1)
        microbatches = accumulated_microbatches(order, pp=layout.pp, packs_per_rank=packs_per_rank, packs=written)
    return cut_step(
        shape,
        pp=layout.pp,
        packs_per_rank=packs_per_rank,
        pack_tokens=packs.tokens,
        schedule=schedule,
        microbatches=microbatches,
        stage_layers=tuple(asked.stage_layers or ()),
    )


def _cut(data: dict[str, Any]) -> Cut:
    schedule = None if data["schedule"] is None else Schedule(data["schedule"])
    return Cut(schedule=schedule, stage_layers=tuple(data["stage_layers"]), microbatches=data["microbatches"])


def _plan_of_any_model(spec: TrainingJobSpec, *, count: int, scaled: bool) -> Plan:
    """Plan for a container that brings its own training: only the meshes must hold."""
    world = count * spec.workers.devices
    layout = Layout(dp=world) if spec.parallelism.mode == "Auto" else _asked(spec, world=world, scaled=scaled)
    if broken := mesh_misfits(layout, world=world):
        raise InvalidConfigError(f"layout does not fit: {'; '.join(broken)}", field="spec.parallelism")
    return Plan(
        shape=ANY_MODEL,
        replicas=count,
        devices=spec.workers.devices,
        layout=layout,
        packs_per_step=0,
        pack_tokens=0,
        volumes=nominal_volumes(layout),
    )


def _asked(spec: TrainingJobSpec, *, world: int, scaled: bool, heads: int = 1) -> Layout:
    asked = spec.parallelism
    pp, cp, tp = asked.pp or 1, asked.cp or 1, asked.tp or 1
    dp = max(1, world // (pp * cp * tp)) if scaled else asked.dp or 1
    ulysses = ulysses_degree(cp, heads // tp) if heads % tp == 0 else 1
    return Layout(dp=dp, ep=asked.ep or 1, pp=pp, cp=cp, tp=tp, ulysses=ulysses)


def _explicit(spec: TrainingJobSpec, setting: Setting, longest: Packs, *, world: int, scaled: bool) -> Layout:
    shape = setting.shape
    layout = _asked(spec, world=world, scaled=scaled, heads=shape.decoder.heads)
    packs, tokens = longest.per_step, longest.tokens
    broken = misfits(layout, world=world, shape=shape, packs_per_step=packs, pack_tokens=tokens)
    if broken:
        fitting = fitting_layouts(world=world, shape=shape, packs_per_step=packs, pack_tokens=tokens)
        near = sorted(fitting, key=lambda other: distance(other, layout))[:3]
        words = f"; layouts of {world} ranks that fit: {', '.join(map(str, near))}" if near else ""
        stage = f" stage {longest.stage!r}" if longest.stage else ""
        raise InvalidConfigError(f"layout does not fit{stage}: {'; '.join(broken)}{words}", field="spec.parallelism")
    return layout


def _automatic(spec: TrainingJobSpec, setting: Setting, longest: Packs, *, replicas: int) -> Estimate:
    """Search; ranks that can't have a pack each must be worth having.

    They can still be used, by cutting layers or packs. But if fewer workers, each with packs of its own, would be as
    fast, the others would idle, so the job is refused with the counts that fit.
    """
    packs, devices = longest.per_step, spec.workers.devices
    world = replicas * devices

    def searched(ranks: int, recomputes: tuple[Recompute, ...]) -> Found:
        return quick_search(setting, world=ranks, packs_per_step=packs, recomputes=recomputes)

    def found(ranks: int) -> Estimate | None:
        return searched(ranks, asked).best

    asked = recomputes_of(spec)
    not_asked = tuple(recompute for recompute in Recompute if recompute not in asked)
    best, leanest = found(world), searched(world, asked).leanest
    if not gives_each_packs(packs, world) and leanest is None:
        worlds = fitting_worlds(near=world, step=devices, shape=setting.shape, packs_per_step=packs)
        fewer = max((size for size in worlds if size < world), default=0)
        others = found(fewer) if fewer else None
        if best is None or (others is not None and others.step_s <= best.step_s):
            counts = ", ".join(str(count) for count in sorted(size // devices for size in worlds)) or "none"
            slower = "" if best is None else f", and {best.candidate} would be no faster than {fewer} ranks"
            raise InvalidConfigError(
                f"no layout fits {replicas} workers x {devices} devices = {world} ranks: packsPerStep {packs} leaves "
                f"ranks of dp {world} without a pack{slower}; worker counts that fit: {counts}",
                field="spec.workers.replicas or spec.training.packsPerStep",
            )
    if best is None:
        raise what_does_not_fit(
            setting,
            leanest,
            replicas=replicas,
            devices=devices,
            packs_per_step=packs,
            found=found,
            with_recompute=lambda: searched(world, not_asked).best,
        )
    return best


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]
