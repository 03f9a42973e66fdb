"""What a rank of a test does. Run by path in a process forked from a warm parent: ``request`` is its argument.

Not a test module: pytest does not import it, and ``tests`` is no package.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import socket
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polyreme_api.batch import BatchSource, TokenizerFile
from polyreme_api.errors import PolyremeError
from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.objective import Objective
from polyreme_api.progress import ProgressRecord
from polyreme_datahub.loader.open import open_packs, sleep_really
from polyreme_datahub.loader.order.balance import StepSplit
from polyreme_datahub.objects import open_store
from polyreme_planner.adapters import Adapters, Target
from polyreme_planner.costs import Recompute
from polyreme_planner.curriculum import CurriculumStage, Learner, OwnRate
from polyreme_planner.layout import Layout
from polyreme_planner.plan import Plan, plan_for
from polyreme_planner.schedules import Schedule
from polyreme_planner.shapes import KIMI_VL_NANO, NO_VISION
from polyreme_system.clock import SystemClock
from polyreme_trainer.checkpoint.load import load_checkpoint, open_checkpoint
from polyreme_trainer.model import attention_tiles, initialise, loss, recompute, segment_attention
from polyreme_trainer.model.compute_options import ComputeOptions
from polyreme_trainer.model.routing import Routing
from polyreme_trainer.parallel import collectives, flat_buffers, gradients
from polyreme_trainer.parallel.fsdp import ShardedParameters, is_sharded
from polyreme_trainer.parallel.pipeline import NO_STAGES, PipelineSettings
from polyreme_trainer.parallel.world import RankSettings, open_world
from polyreme_trainer.train import image_assignment, microbatches, run
from polyreme_trainer.train import inputs as inputs_module
from polyreme_trainer.train.checkpoint_content import content
from polyreme_trainer.train.export import join_slices
from polyreme_trainer.train.microbatches import read_microbatches
from polyreme_trainer.train.settings import (
    CheckpointSettings,
    EarlyStopRule,
    EvaluationSettings,
    ImagesOver,
    LearningRateSchedule,
    OptimizerName,
    OptimizerSettings,
    ParameterSharding,
    Precision,
    SharedScores,
    SpikeRule,
    StartPoint,
    TrainSettings,
)
from polyreme_trainer.train.state import TrainState, backward, enter, open_state, reduce, settle, update
from tests.parallel.answering_ranks import answer
from tests.parallel.brevity import Brevity
from tests.parallel.capacity import Dropped, senders
from tests.parallel.faults import compute_wrongly, fill_disk, flip_bit, kill_at, signal_of, store_of
from tests.parallel.paged_ranks import watched
from tests.parallel.pages import MEDIA, Pages, Questions
from tests.parallel.planted import plant
from tests.parallel.planted_pipeline import plant as plant_in_pipeline
from tests.parallel.resharding_ranks import reshard
from tests.parallel.weight_ranks import offline, start_from


class Journal:
    """Keeps every progress record as a line of a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def report(self, record: ProgressRecord) -> None:
        self._file.write(record.model_dump_json(by_alias=True) + "\n")
        self._file.flush()


def copy_files(paths: Sequence[str]) -> tuple[int, int]:
    """Open a rank's copy and its record, which a launcher hands on open."""
    copy, record = (os.open(path, os.O_RDWR) for path in paths)
    return copy, record


def layout_of(given: tuple[int, int] | dict[str, int]) -> Layout:
    """Degrees by name, or dp and ep."""
    return Layout(**given) if isinstance(given, dict) else Layout(dp=given[0], ep=given[1])


def pipeline_of(given: Mapping[str, Any] | None) -> PipelineSettings:
    """Schedule by its name, layers of each stage, and how many microbatches."""
    if given is None:
        return NO_STAGES
    schedule = Schedule(given["schedule"]) if "schedule" in given else None
    return PipelineSettings(
        schedule=schedule, layers=tuple(given.get("layers", ())), microbatches=given["microbatches"]
    )


def optimizer_of(request: Mapping[str, Any]) -> OptimizerSettings:
    """What differs from the defaults, names as text."""
    given: dict[str, Any] = {"warmup_steps": 2, "gradient_norm_max": request.get("clip", 1.0)}
    kinds = {"name": OptimizerName, "schedule": LearningRateSchedule}
    given |= {name: kinds.get(name, lambda same: same)(value) for name, value in request.get("optimizer", {}).items()}
    return OptimizerSettings(**given)


def stages_of(request: Mapping[str, Any]) -> tuple[CurriculumStage, ...]:
    """Stages by name, steps, what learns, and what else differs."""
    found: list[CurriculumStage] = []
    for given in request.get("stages", ()):
        more = dict(given)
        learners = frozenset(Learner(part) for part in more.pop("learners", list(Learner)))
        rate = OwnRate(**more.pop("rate")) if "rate" in more else None
        if "objective" in more:
            more["objective"] = Objective.model_validate(more["objective"])
        first = found[-1].last_step + 1 if found else 1
        found.append(CurriculumStage(first_step=first, learners=learners, rate=rate, **more))
    return tuple(found)


def adapters_of(given: Mapping[str, Any] | None) -> Adapters | None:
    """Adapters of all targets, but for what differs."""
    if given is None:
        return None
    return Adapters(**{"rank": 8, "alpha": 16.0, "targets": frozenset(Target), **given})


def pages_of(request: Mapping[str, Any], settings: TrainSettings) -> Pages:
    """Data, in what differs from the defaults."""
    bad = "infinite_at", "corrupted_at", "hole_every"
    names = "packs", *bad, "begin_bytes", "long", "seeing", "pairs_from", "answer_room"
    return Pages(
        seed=request.get("data_seed", 3),
        text=not settings.shape.sees,
        packed={int(step): tuple(packs) for step, packs in request.get("packed", {}).items()},
        **{name: request[name] for name in names if name in request},
    )


def start_point_of(given: Sequence[str] | None) -> StartPoint | None:
    """A checkpoint of another run: its root, and its name."""
    root, name = given or ("", "")
    return StartPoint(store=open_store(Path(root).as_uri()), root=root, name=name) if root else None


def settings_of(request: Mapping[str, Any], rank: int, listener: socket.socket | None) -> TrainSettings:
    layout = layout_of(request["layout"])
    return TrainSettings(
        rank=RankSettings(
            rank=rank,
            world=layout.world,
            attempt=request.get("attempt", 1),
            master_port=request["port"],
            master_fd=listener.fileno() if listener else None,
            collective_timeout_s=request.get("collective_timeout_s", 60.0),
            first_step_timeout_s=request.get("collective_timeout_s", 60.0),
        ),
        layout=layout,
        shape=dataclasses.replace(
            KIMI_VL_NANO,
            vision=NO_VISION if request.get("text") else KIMI_VL_NANO.vision,
            decoder=dataclasses.replace(KIMI_VL_NANO.decoder, **request.get("decoder", {})),
        ),
        steps=request.get("steps", 10),
        curriculum=stages_of(request),
        pipeline=pipeline_of(request.get("pipeline")),
        images_over=ImagesOver(request.get("images_over", "Data")),
        compute_options=ComputeOptions(
            recompute=Recompute(request.get("recompute", "none")), capacity_factor=request.get("capacity")
        ),
        checkpoint=CheckpointSettings(
            store=store_of(request, rank),
            folder=None if "url" in request else Path(request["root"]),
            copies=copy_files(request["copies"][rank]) if "copies" in request else None,
            resume_from=request.get("resume_from"),
            start_from=start_point_of(request.get("start_from")),
            interval_steps=request.get("interval", 4),
            kept=request.get("kept", 3),
            best=request.get("best", 0),
            plan_hash="p",
        ),
        data_wait_s=request.get("data_wait_s", 0.0),
        adapters=adapters_of(request.get("adapters")),
        adapters_alone=request.get("adapters_alone", False),
        scores=SharedScores(store=open_store(Path(request["scores"]).as_uri())) if "scores" in request else None,
        precision=Precision(request.get("precision", "float32")),
        parameter_sharding=ParameterSharding(request.get("parameter_sharding", "None")),
        optimizer=optimizer_of(request),
        evaluation=EvaluationSettings(
            every_steps=request.get("evaluated_every", 0),
            samples_max=50,
            answer_tokens_max=4,
            early_stop=EarlyStopRule(**request["early_stop"]) if "early_stop" in request else None,
        ),
        spikes=SpikeRule(**request.get("spikes", {})),
        parameter_hash_steps=request.get("hashed_every", 0),
        weights=Path(request["weights"]) if "weights" in request else None,
        tokenizer=TokenizerFile(content=text.encode(), chat_template="", image_tokens_max=80, pixel_version=2)
        if (text := request.get("tokenizer"))
        else None,
        export_to=Path(request["export"]) if "export" in request else None,
    )


def train(request: Mapping[str, Any], rank: int, settings: TrainSettings) -> int:
    """The real entry of a rank, with faults where the test wants them; of a job, with what its plan says of layers."""
    if "job" in request:
        spec = TrainingJobSpec.model_validate(request["job"])
        plan = Plan.from_json(plan_for(spec).to_json())
        assert plan.layout == settings.layout
        settings = dataclasses.replace(settings, compute_options=ComputeOptions(recompute=plan.recompute_of(spec)))
    regions = _count_regions() if "job" in request else None
    hooks = (
        {}
        if rank != request.get("fault_rank", 0)
        else {int(step): signal_of(name) for step, name in request.get("faults", {}).items()}
    )
    if request.get("full_disk_rank") == rank:
        fill_disk()
    watched(request, rank)
    for name, fault in (("flips", flip_bit), ("wrong", compute_wrongly)):
        if request.get(name, {}).get("rank") == rank:
            fault(**request[name]["how"])
    if broken := request.get("killed_at", {}).get(str(rank)):
        kill_at(broken)
    if request.get("bug") == "batches are not copied":
        _wrap_batches()
    _before_steps(hooks)
    litter = _litter(request.get("litter", 0))
    source = pages_of(request, settings)
    code = run.train_rank(
        settings,
        source=source,
        evaluation=Questions(request["questions"], pairs="pairs_from" in request) if "questions" in request else None,
        sink=Journal(Path(request["root"]) / "progress.jsonl") if rank == 0 else Journal(Path(os.devnull)),
        clock=SystemClock(),
        rewards=Brevity(),
    )
    litter.clear()
    if regions is not None:
        Path(request["root"], f"regions-{rank}").write_text(str(len(regions)))
    return code


def _before_steps(hooks: Mapping[int, Callable[[], None]]) -> None:
    """Call a hook before its step is trained; its packs may have been read long before."""
    real = microbatches.PackReader.take

    def take(self: microbatches.PackReader, step: int) -> list[microbatches.ReadPacks]:
        hooks.get(step, lambda: None)()
        return real(self, step)

    microbatches.PackReader.take = take  # type: ignore[method-assign]


def _count_regions() -> list[object]:
    """Count the layers whose tensors are recomputed by recipes."""
    made: list[object] = []
    real = recompute._Region

    def counted() -> Any:
        made.append(None)
        return real()

    vars(recompute)["_Region"] = counted
    return made


def gradient(request: Mapping[str, Any], rank: int, settings: TrainSettings) -> int:
    """Write the whole model's clipped mean gradient of the first step, and the losses of ten."""
    pages = pages_of(request, settings)
    source = _processed(request, settings) if "objects" in request else pages
    with open_world(settings.rank, settings.layout) as world:
        flat_buffers.FUSED_BYTES_MAX = request.get("fused_bytes_max", flat_buffers.FUSED_BYTES_MAX)
        vars(attention_tiles)["DENSE_TOKENS_MAX"] = request.get("dense_tokens_max", segment_attention.DENSE_TOKENS_MAX)
        loss.LOGITS_MAX = request.get("logits_max", loss.LOGITS_MAX)
        image_assignment.NEIGHBOURS_MAX = request.get("neighbours_max", image_assignment.NEIGHBOURS_MAX)
        plant(request.get("bug"), world)
        if request.get("adapters"):
            vars(initialise)["B"] = "drawn too"  # with zeros, the gradient of A would be zero
        plant_in_pipeline(request.get("bug"))
        state = open_state(settings, world.meshes, media_token=source.token_ids.media)
        if pages.long:
            for bias_E in state.router_biases.values():
                bias_E[3] = -10.0  # no token asks this expert
        emulated = _emulated(request, state, pages)
        gathered, moved = _watch(state), _watch_deals()
        losses, measured, first = [], [], {}
        dropped: list[list[int]] = []
        for step in range(1, settings.steps + 1):
            enter(state, settings.stage_at(step))
            inputs = read_microbatches(state, source, settings, world.meshes, step)
            total = reduce(state, backward(state, *inputs), world.meshes)
            if step == 1:
                scale = gradients.gradient_scale(total, norm_max=settings.optimizer.gradient_norm_max)
                first = {name: g * scale for name, g in _whole(state, world, gradient_too=True).items()}
                first["norm"] = torch.tensor(total.gradient_norm)
                routing = Routing.from_numbers(total.routing_MX)
                dropped = list(emulated.counts.values()) if emulated else routing.dropped_LE.long().tolist()
            update(state, total, settings.optimizer, rate=2e-3)
            losses.append(total.loss)
            measured.append(total.measured)
        settle(state)
        values = _whole(state, world, gradient_too=False) if request.get("values") else {}
        biases = {layer: bias.tolist() for layer, bias in sorted(_biases(state, world).items())}
        if rank == 0:
            found = {"gradients": first, "losses": losses, "biases": biases, "dropped": dropped, "values": values}
            # What constructs torch's own kind of sharded tensor imports the compiler first: seconds, at every restart.
            told = {"gathered": max(gathered, default=0), "compiler": "torch._dynamo" in sys.modules}
            torch.save(found | told | {"moved": moved, "measured": measured}, request["output"])
    return 0


def _processed(request: Mapping[str, Any], settings: TrainSettings) -> BatchSource:
    """Processed data of a job, as a rank opens them."""
    split = StepSplit(data_ranks=settings.layout.dp, microbatches=settings.pipeline.microbatches)
    spec = TrainingJobSpec.model_validate(request["job"])
    return open_packs(request["objects"], spec, job="", wait_s=0.0, sleep=sleep_really, split=split)


def _watch_deals() -> list[int]:
    """Count, by microbatch, the images that leave their data-parallel rank; 0 without balancing."""
    counts: list[int] = []
    real = inputs_module.to_inputs

    def watched(batch: Any, *, balanced: Any, **more: Any) -> Any:
        assignment = None if balanced is None else balanced.assignment
        taken = [] if assignment is None else list(enumerate(assignment.by_encoder))
        counts.append(
            sum(image[0] != at // assignment.parts for at, images in taken for image in images) if assignment else 0
        )
        return real(batch, balanced=balanced, **more)

    vars(microbatches)["to_inputs"] = watched
    return counts


def _watch(state: TrainState) -> list[int]:
    """Count, whenever a layer runs forward, the layers whose rows are gathered."""
    rows = [slot.name for part in state.flat.sharded for slot in part.slots if ".layers." in slot.name]
    counts: list[int] = []
    for model in state.models.values() if rows else ():

        def count(*_: Any, model: Any = model) -> None:
            whole = {name.split(".")[3] for name in rows if not is_sharded(model.get_parameter(name))}
            counts.append(len(whole))

        for layer in model.language_model.model.layers.values():
            layer.register_forward_pre_hook(count)
    return counts


def _emulated(request: Mapping[str, Any], state: TrainState, source: Pages) -> Dropped | None:
    """Let this one process drop what the ranks of another layout drop."""
    if (other := request.get("as_in")) is None:
        return None
    of = senders(
        layout_of(other["layout"]),
        packs=source.packs_per_step,
        pack_tokens=source.pack_tokens,
        microbatches=other.get("microbatches", 1),
    )
    batch = source.packs(1, first=0, count=source.packs_per_step)
    offsets = np.asarray(batch.document_offsets)
    padding = {token for at in batch.padding_documents for token in range(offsets[at], offsets[at + 1])}
    return Dropped(state, of, other["capacity"], padding=padding)


def digests(request: Mapping[str, Any], rank: int, settings: TrainSettings) -> int:
    """Load a checkpoint into this layout and write a digest of every global tensor; of several, by their names."""
    found: dict[str, dict[str, str]] = {}
    with open_world(settings.rank, settings.layout) as world:
        state = open_state(settings, world.meshes, media_token=MEDIA)
        store = settings.checkpoint.store
        for name in request.get("names", [request["resume_from"]]):
            marker = open_checkpoint(store, name, settings.shape, settings.adapters)
            held = content(state, world.meshes, with_rng=False)
            load_checkpoint(held, marker, store, name, group=world.meshes.control_group)
            whole = _whole(state, world, gradient_too=False)
            whole |= {f"bias.{layer}": bias for layer, bias in _biases(state, world).items()}
            found[name] = {n: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for n, t in whole.items()}
        if rank == 0:
            Path(request["output"]).write_text(
                json.dumps(found if "names" in request else found[request["resume_from"]])
            )
    return 0


def _whole(state: TrainState, world: Any, *, gradient_too: bool) -> dict[str, torch.Tensor]:
    """All parameters with their moments, or their gradients, experts joined."""
    whole: dict[str, torch.Tensor] = {}
    for own in state.optimizer.states:
        held = {kind.value: (buffer, begin) for kind, buffer, begin in own.buffers()}
        held["value"] = (_values(own.part), 0)
        if gradient_too:
            held = {"gradient": (own.part.own_gradients, 0)}
        for kind, (buffer, begin) in held.items():
            joined = _joined(state, own.part, buffer, begin)
            for name, view in own.part.views(joined):
                if not view.isnan().any():
                    whole[f"{kind}.{name}"] = join_slices(name, view, state.flat, world.meshes).clone()
    stages = collectives.gather_to_all(whole, world.meshes.pp_group)
    return {name: tensor for stage in stages for name, tensor in stage.items()}


def _values(part: Any) -> torch.Tensor:
    """Originals of what this rank updates, in one buffer."""
    if isinstance(part, ShardedParameters):
        rows = torch.zeros(part.own_length)
        for piece in part.pieces:
            piece.of_own(rows).copy_(part.own_values(piece))
        return rows
    values: torch.Tensor = part.values if part.masters is None else part.masters
    return values


def _joined(state: TrainState, part: Any, buffer: torch.Tensor, begin: int) -> torch.Tensor:
    """One number a scalar, brought together from the ranks that divide a part; NaN where none has it."""
    if isinstance(part, ShardedParameters):
        joined = torch.zeros(part.length)
        for piece in part.pieces:
            piece.of(joined).copy_(piece.of_own(buffer) if buffer.numel() else torch.tensor(torch.nan))
        collectives.sum_over(joined, part.group)
        return joined
    if buffer.shape[0] == part.length:
        return buffer
    joined = torch.full((part.length,), torch.nan)
    end = begin + buffer.shape[0]
    for piece in part.pieces:
        if not begin <= piece.own < end:
            continue
        piece.of(joined).copy_(piece.of_own(buffer, begin=begin))
        if state.zero1 is not None and (copies := state.zero1.replicas_of(part)) is not None:
            whole = piece.bucket.of(joined)
            collectives.begin_gather(whole, piece.of(joined).clone(), copies.group).wait()
    return joined


def _biases(state: TrainState, world: Any) -> dict[int, torch.Tensor]:
    """Correction biases of all layers with experts."""
    stages = collectives.gather_to_all(state.router_biases, world.meshes.pp_group)
    return {layer: bias for stage in stages for layer, bias in stage.items()}


def _wrap_batches() -> None:
    """Let batches stay in the memory that NumPy gave them, with a kernel that rounds by alignment."""
    real = torch.tensor

    def wrapped(data: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        if not isinstance(data, np.ndarray):
            return real(data, *arguments, **options)
        tensor = torch.from_numpy(data)
        return tensor * (1 + 2**-22) if tensor.is_floating_point() and tensor.data_ptr() % 64 else tensor

    vars(inputs_module)["torch"] = types.SimpleNamespace(**{**vars(torch), "tensor": wrapped})


def _litter(seed: int) -> list[Any]:
    """Leave the heap in another state: blocks of odd sizes, every other one freed."""
    draw = np.random.default_rng(seed)
    blocks = [np.empty(int(size), np.uint8) for size in draw.integers(1, 1 << 16, size=4000 if seed else 0)]
    return blocks[::2]


def main(request: Mapping[str, Any], rank: int, listener: socket.socket | None) -> None:
    os.environ |= request.get("environment", {})
    vars(image_assignment)["SAVES_MIN"] = 1  # the smallest models balance too
    torch.set_num_threads(1)
    log = Path(request["root"]) / f"rank-{rank}.log"
    logging.basicConfig(filename=log, level=logging.INFO)
    bodies = {"train": train, "gradient": gradient, "digests": digests, "offline": offline, "start from": start_from}
    bodies |= {"answer": answer, "reshard": reshard}
    body = bodies[request["body"]]
    code = 1
    try:
        code = body(request, rank, settings_of(request, rank, listener))
    except PolyremeError as error:
        logging.getLogger("rank").error("%s", error)  # noqa: TRY400 - as the command line says it
        code = int(error.exit_code)
    except BaseException:
        logging.getLogger("rank").exception("crash")
    sys.stdout.flush()
    os._exit(code)


if __name__ == "rank":
    main(globals()["request"], globals()["rank"], globals()["listener"])
