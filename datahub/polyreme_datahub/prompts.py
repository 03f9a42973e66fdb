"""Prompts of questions that belong to no dataset: the same tokens and patches as those of a held-out sample.

Images are decoded in a sandbox, by the rules and limits of processing: who asks may be anyone.

Shape suffixes as in ``polyreme_api.batch``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from polyreme_api.batch import TokenIds
from polyreme_api.errors import InvalidConfigError
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub.digests import digest_bytes
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.index.format import BY_CONVOLUTION, pixels_of
from polyreme_datahub.job_data import ImageSizes, longest_pack
from polyreme_datahub.loader.open import read_plan
from polyreme_datahub.loader.read.blob_files import read_blob
from polyreme_datahub.loader.sample import cut_images
from polyreme_datahub.loader.sample.pixels import CHANNELS
from polyreme_datahub.objects import SAMPLES, open_store
from polyreme_datahub.operations.declare import RECORD
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.record_tokens import encode_record
from polyreme_datahub.released_tokenizer import read_released
from polyreme_datahub.sandbox.sandbox import Sandbox
from polyreme_datahub.sandbox.tasks import Limits, SampleTask, SandboxStep, StepMade, StepVerdict
from polyreme_datahub.sources.records import IMAGE_BYTES_MAX, IMAGES_MAX, checked_turns
from polyreme_datahub.tokenizer_file import TokenText, tokenizer_json
from polyreme_datahub.tokens import TOKEN_CHARACTERS_MAX, TextTokenizer

PREPROCESSOR_FILE = "preprocessor_config.json"
NO_ANSWER: Mapping[str, str] = {"role": "assistant", "content": ""}
"""The turn that the model shall write."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a model continues."""

    prompt_tokens: Sequence[int]
    patches_PC: npt.NDArray[np.uint8]
    grids_I2: npt.NDArray[np.int32]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptRules:
    """What a model was trained with, as far as its prompts follow from it."""

    tokenizer: bytes
    """As it is stored (``tokenizer_file``)."""
    images: ImageSizes | None
    """How images become patches; None: the model takes none."""
    tokens_max: int
    """Longest sequence that the model was made for."""
    pixel_version: int = BY_CONVOLUTION
    """How images become pixels (``index.format.PIXELS``)."""


def rules_of_job(objects_url: str, spec: TrainingJobSpec, *, job: str, sees: bool) -> PromptRules:
    """Return the rules of a processed job's data; reads its tokenizer, and no samples.

    Args:
        objects_url: Object store of the processed data.
        spec: The job's spec.
        job: UID of the job whose data it is.
        sees: Whether its model takes images.

    Raises:
        EnvironmentFailedError: If the data is not processed.
        IndexDamagedError: If its plan or tokenizer is damaged.
    """
    store = open_store(objects_url, patience=SAMPLES)
    plan = read_plan(store, spec, job)
    return PromptRules(
        tokenizer=read_blob(store, plan["tokenizer"]),
        images=ImageSizes.of(spec) if sees else None,
        tokens_max=longest_pack(spec),
        pixel_version=pixels_of(plan),
    )


def rules_of_export(folder: Path, *, embedded: int, tokens_max: int, sees: bool) -> PromptRules:
    """Return the rules of an exported model, or of released weights with a template beside them.

    Args:
        folder: Holds ``tokenizer.json`` and ``polyreme-template.json``, and ``preprocessor_config.json`` of a model
            that takes images.
        embedded: Tokens that the model embeds.
        tokens_max: Longest sequence that its configuration names.
        sees: Whether the model takes images.

    Raises:
        InvalidConfigError: If a file is missing or damaged, or does not fit the model.
    """
    try:
        tokenizer = read_released(folder.resolve().as_uri(), embedded=embedded)
    except InvalidConfigError as error:
        raise InvalidConfigError(error.message, field="RUN") from error
    if not sees:
        return PromptRules(tokenizer=tokenizer, images=None, tokens_max=tokens_max)
    file = folder / PREPROCESSOR_FILE
    try:
        config = json.loads(file.read_text())
        merge = int(config["merge_kernel_size"][0])
        images = ImageSizes(
            patch_px=int(config["patch_size"]), merge=merge, image_tokens_max=int(config["in_token_limit"]) // merge**2
        )
        pixel_version = int(config.get("pixel_version", BY_CONVOLUTION))
    except FileNotFoundError as error:
        raise InvalidConfigError(
            f"export is not whole: there is no {PREPROCESSOR_FILE} in {folder}; export the model again", field="RUN"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, IndexError, ZeroDivisionError) as error:
        raise InvalidConfigError(
            f"{file} can't be read ({type(error).__name__}: {error}), expected patch_size, merge_kernel_size and "
            "in_token_limit",
            field="RUN",
        ) from error
    return PromptRules(tokenizer=tokenizer, images=images, tokens_max=tokens_max, pixel_version=pixel_version)


class PromptReader:
    """Reads conversations as prompts. Use it from one thread: the sandbox's child ends with the thread that started it.

    Args:
        rules: Of the model.
        limits: Of the sandbox; None: those of processing.
    """

    def __init__(self, rules: PromptRules, limits: Limits | None = None) -> None:
        self._rules = rules
        self._tokenizer = TextTokenizer(rules.tokenizer)
        self._text = TokenText(tokenizer_json(rules.tokenizer))
        self._sandbox = None
        if rules.images is not None:
            self._sandbox = Sandbox([_step(rules.images, rules.pixel_version)], limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        """End the sandbox's child."""
        if self._sandbox is not None:
            self._sandbox.close()

    @property
    def token_ids(self) -> TokenIds:
        """Special tokens."""
        form = self._tokenizer.format
        return TokenIds(media=form.media, end=form.end, pad=form.pad)

    @property
    def tokens_max(self) -> int:
        """Longest sequence that the model was made for."""
        return self._rules.tokens_max

    def text(self, tokens: Sequence[int]) -> str:
        """Decode answer tokens to text, without special tokens."""
        return self._text.decode(tokens)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token's text; a special token has none."""
        return self._text.token_bytes(token)

    def read(self, turns: Sequence[Mapping[str, str]], images: Sequence[bytes]) -> Prompt:
        """Make the prompt for the answer to a conversation.

        Args:
            turns: ``{role, content}``; the last one is the user's. Without marks (``<image>``), images stand in front
                of the first user turn's text.
            images: Encoded images, in the order of their marks.

        Raises:
            BadRecordError: If turns or an image break a rule, or there are more tokens than the model was made for.
            EnvironmentFailedError: If the sandbox can't be started.
        """
        asked = checked_turns(list(turns), len(images))
        if asked[-1]["role"] != "user" or not (asked[-1]["content"].strip() or images):
            seen = "empty" if asked[-1]["role"] == "user" else f"of {asked[-1]['role']}"
            raise BadRecordError(f"nothing is asked: the last turn is {seen}, expected a question", rule="question")
        if (characters := sum(len(turn["content"]) for turn in asked)) > self.tokens_max * TOKEN_CHARACTERS_MAX:
            raise BadRecordError(
                f"prompt is too long: {characters} characters, expected at most {TOKEN_CHARACTERS_MAX} for each of the "
                f"{self.tokens_max} tokens that the model was made for",
                rule="prompt",
            )
        grids_I2, patches_PC = self._cut(images)
        merge = self._rules.images.merge if self._rules.images is not None else 1
        cells = [int(rows) * int(columns) // merge**2 for rows, columns in grids_I2]
        encoded = encode_record(self._tokenizer, {"conversations": [*asked, NO_ANSWER]}, {}, [], cells)
        tokens = encoded["tokens"][: encoded["prompt"]]
        if len(tokens) >= self.tokens_max:
            of = f", {sum(cells)} of them of {len(cells)} images" if cells else ""
            raise BadRecordError(
                f"prompt is too long: {len(tokens)} tokens{of}, expected fewer than {self.tokens_max}, the longest "
                "sequence that the model was made for; ask with fewer or smaller images, or less text",
                rule="prompt",
            )
        return Prompt(prompt_tokens=tokens, patches_PC=patches_PC, grids_I2=grids_I2)

    def _cut(self, images: Sequence[bytes]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
        """Return the grids of images and their patches."""
        sizes = self._rules.images
        values = 0 if sizes is None else CHANNELS * sizes.patch_px**2
        if not images:
            return np.zeros((0, 2), np.int32), np.zeros((0, values), np.uint8)
        if self._sandbox is None:
            raise BadRecordError(f"model takes no images: {len(images)} given, expected none", rule="images")
        if len(images) > IMAGES_MAX:
            raise BadRecordError(f"too many images: {len(images)}, expected at most {IMAGES_MAX}", rule="images")
        if (largest := max(map(len, images))) > IMAGE_BYTES_MAX:
            raise BadRecordError(
                f"image is too large: {largest} bytes, expected at most {IMAGE_BYTES_MAX}", rule="image-size"
            )
        cut = _outcome(self._sandbox, _record(images))
        patches = [np.frombuffer(cut.blobs[digest].data, np.uint8) for digest in cut.data["patches"]]
        grids_I2 = np.array(cut.data["grids"], np.int32).reshape(-1, 2)
        return grids_I2, np.concatenate(patches).reshape(-1, values)


def _step(images: ImageSizes, pixel_version: int) -> SandboxStep:
    parameters = {**dataclasses.asdict(images), "pixel_version": pixel_version}
    return SandboxStep(name="cut-images", operation=cut_images.NAME, inputs=(RECORD,), parameters=parameters)


def _record(images: Sequence[bytes]) -> Value:
    digests = [digest_bytes(data) for data in images]
    kept = [Blob(content, digest=digest) for content, digest in zip(images, digests, strict=True)]
    return Value.of({"images": digests}, kept=kept)


def _outcome(sandbox: Sandbox, record: Value) -> Value:
    """Run the step on a record; return what it made."""
    (outcome,) = sandbox.run([SampleTask(key="question", values={RECORD: record})])
    (end,) = outcome.steps
    if isinstance(end, StepMade):
        return end.value
    assert isinstance(end, StepVerdict)  # it drops nothing
    raise BadRecordError(end.message, rule=end.rule)
