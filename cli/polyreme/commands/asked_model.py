"""The model that ``ask`` and ``serve`` answer with: of a run's checkpoint, or of a folder of exported weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyreme.commands.checkpoint import chosen_checkpoint, saved_settings
from polyreme.commands.runs import find
from polyreme.job_files import read_job
from polyreme.run_files.paths import Home, RunDirectory
from polyreme.run_files.records import checkpoint_url
from polyreme.views.output import note
from polyreme.views.spinner import busy
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_api.history import COMMIT_MARKER
from polyreme_api.urls import folder_path, is_folder
from polyreme_datahub.prompts import Prompt, PromptReader, PromptRules, rules_of_export, rules_of_job
from polyreme_datahub.sandbox.tasks import Limits
from polyreme_datahub.sources.records import IMAGE_BYTES_MAX
from polyreme_launcher.urls import checkpoint_folder
from polyreme_planner.int4_weights import WeightsKind, check_device
from polyreme_planner.memory import size_words
from polyreme_system.files import read_json

if TYPE_CHECKING:
    from polyreme.serving.answers import Answer
    from polyreme_trainer.model.vlm import KimiVL
    from polyreme_trainer.serve.engine import Engine

WEIGHTS_HELP = "Auto: weights as the model has them; Int4: the decoder's products in 4 bits, on the processor."
TARGET_HELP = "Name of a run, NAMESPACE/NAME, or a folder: a checkpoint of a run, or an exported model."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AskedModel:
    """A model in memory, with what its prompts follow from."""

    name: str
    """What a person calls it."""
    place: str
    """Where it was read from, for people."""
    model: KimiVL
    rules: PromptRules

    def answers(
        self,
        prompts: Iterable[Prompt | None],
        *,
        stop_token: int,
        prompt_tokens_max: int,
        new_tokens_max: int,
        rows: int,
    ) -> Iterator[Answer | None]:
        """Yield the answer of each prompt, in order; None for one that is None.

        Args:
            prompts: What to answer.
            stop_token: Ends an answer.
            prompt_tokens_max: Longest prompt.
            new_tokens_max: Longest answer [tokens].
            rows: Answers that run at once.

        Raises:
            RefusedError: If the cache has no room for one.
        """
        from polyreme.serving.answers import answers_in_order

        engine = self.engine(tokens_max=prompt_tokens_max + new_tokens_max, rows_max=rows)
        yield from answers_in_order(engine, prompts, stop_token=stop_token, new_tokens_max=new_tokens_max)

    def engine(self, *, tokens_max: int, rows_max: int, **cache: Any) -> Engine:
        """Return an engine of this model; sizes and the cache's options are those of ``settings_for``."""
        from polyreme_trainer.serve import answers, engine

        sizes = answers.settings_for(self.model, tokens_max=tokens_max, rows_max=rows_max, **cache)
        return engine.Engine(self.model, sizes)

    def reader(self, limits: Limits | None = None) -> PromptReader:
        """Return what makes prompts for it; limits are those of decoding."""
        return PromptReader(self.rules, limits)


def open_asked(
    home: Home,
    target: str,
    checkpoint: str | None,
    *,
    device: str | None = None,
    weights: WeightsKind = WeightsKind.AUTO,
) -> AskedModel:
    """Read the model that a person named, and move it to its device.

    Args:
        home: Where runs are.
        target: Name of a run, or a folder.
        checkpoint: Name of one of the run's checkpoints; None: the newest on its committed history.
        device: ``cpu`` or ``cuda``; None: an accelerator if there is one.
        weights: How they are held.

    Raises:
        NotFoundError: If there is no such run, checkpoint or folder.
        InvalidConfigError: If the folder holds no whole model, there is no such device, or it does not multiply
            weights in 4 bits.
        RefusedError: If the checkpoint is torn, damaged, or of another model.
    """
    run, folder, checkpoint = _located(home, target, checkpoint)
    place = _device(device, weights)
    from polyreme_trainer.serve.int4 import weights_bytes

    with busy(f"loading {target}"):
        try:
            if run is not None:
                asked = _of_run(home, run, target, checkpoint, weights)
            else:
                asked = _of_export(Path(folder), weights)
        except (InvalidConfigError, NotFoundError) as error:
            # Reading weights names the field of a job.
            error.field = error.field if error.field == "--checkpoint" else "RUN"
            raise
        asked.model.to(place)
    note(f"loaded {asked.place} on {place}: {size_words(weights_bytes(asked.model))} of weights")
    return asked


def read_image(path: Path) -> bytes:
    """Read the file of an image.

    Raises:
        NotFoundError: If there is no such file.
        InvalidConfigError: If it is a folder, too large, or can't be read.
    """
    try:
        if (size := path.stat().st_size) > IMAGE_BYTES_MAX:
            raise InvalidConfigError(
                f"image is too large: {path} has {size} bytes, expected at most {IMAGE_BYTES_MAX}", field="--image"
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"no image {path}", field="--image") from error
    except OSError as error:
        raise InvalidConfigError(f"image can't be read: {path}: {error.strerror}", field="--image") from error


def _located(home: Home, target: str, checkpoint: str | None) -> tuple[RunDirectory | None, str, str | None]:
    """Find what a person named: a run with a checkpoint's name, or the folder of an export."""
    path = Path(folder_path(target, field="RUN") if is_folder(target) else target)
    namespace, _, short = target.rpartition("/")
    if is_folder(target) or target.startswith(("/", ".")):
        if not path.is_dir():
            raise NotFoundError(f"no folder {path}", field="RUN")
    elif home.run(namespace or "default", short).exists or not path.is_dir():
        return find(home, target, field="RUN"), "", checkpoint
    if not (path / COMMIT_MARKER).is_file():
        if checkpoint is not None:
            raise InvalidConfigError(f"{target} is an export, which has one model", field="--checkpoint")
        return None, str(path.resolve()), None
    root = path.resolve().parent
    for run in home.runs():
        saved_in = checkpoint_folder(checkpoint_url(run, read_job(run.job_file)))
        if saved_in is not None and saved_in.resolve() == root:
            return run, "", path.resolve().name
    raise NotFoundError(
        f"checkpoint of no run under {home.path}: {path}, and without its run's tokenizer it can't be asked; name the "
        "home by --home, or export the model where the run is",
        field="RUN",
    )


def _of_run(home: Home, run: RunDirectory, name: str, checkpoint: str | None, weights: WeightsKind) -> AskedModel:
    from polyreme_trainer.serve.int4 import pack
    from polyreme_trainer.train.saved_model import answering_model

    job = read_job(run.job_file)
    chosen = chosen_checkpoint(checkpoint_url(run, job), name, checkpoint)
    settings = saved_settings(run, job, as_trained=True)
    uid = str((read_json(run.data_report) or {}).get("job", ""))
    rules = rules_of_job(home.objects_url, job.spec, job=uid, sees=settings.shape.sees)
    with PromptReader(rules) as reader:
        media = reader.token_ids.media
    model, _ = answering_model(settings, chosen, media_token=media)
    if weights is WeightsKind.INT4:
        pack(model)
    return AskedModel(name=run.name, place=f"checkpoint {chosen} of run {run.name}", model=model, rules=rules)


def _of_export(folder: Path, weights: WeightsKind) -> AskedModel:
    from polyreme_trainer.weights.whole_model import open_model, positions_of, read_config, shape_of

    config = read_config(folder)
    shape = shape_of(config)
    rules = rules_of_export(folder, embedded=shape.decoder.vocabulary, tokens_max=positions_of(config), sees=shape.sees)
    with PromptReader(rules) as reader:
        media = reader.token_ids.media
    model = open_model(folder, media_token=media, weights=weights)
    return AskedModel(name=folder.name, place=f"export {folder}", model=model, rules=rules)


def _device(wanted: str | None, weights: WeightsKind) -> str:
    """Return the device to answer on; an accelerator gets the kernels that ranks use."""
    import torch

    from polyreme_trainer.parallel.flash import use_newest_flash

    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise InvalidConfigError("no accelerator: torch sees no CUDA device on this machine", field="--device")
    if weights is WeightsKind.INT4:
        check_device(wanted or "cpu", field="--weights")
    if wanted == "cpu" or not there or weights is WeightsKind.INT4:
        return "cpu"
    use_newest_flash(torch.cuda.get_device_capability())
    return "cuda"
