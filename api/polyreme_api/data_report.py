"""The datahub controller's report on the data of one job, an annotation of the TrainingJob.

The status of a job has one writer, the operator, which copies the report into the condition ``DataReady``. A report
names the data that it is about, so that a report on another spec is never read as one on this spec.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.labels import GROUP

ANNOTATION_DATA = f"{GROUP}/data-report"
"""On the TrainingJob: the newest ``DataReport`` as JSON."""
REPORT_BYTES_MAX = 8192
"""Largest report; a longer one can't be read."""
OPERATIONS_MAX = 32
"""Operations whose progress one report names."""
MESSAGE_CHARACTERS_MAX = 1024
COUNT_MAX = 2**53 - 1
BLOCKS_OPERATION = "blocks"
"""Operation whose progress counts the blocks that ranks can read, of a job that starts while its data are processed."""


class DataState(StrEnum):
    """What is known about the data of a job."""

    PROCESSING = "Processing"
    READABLE = "Readable"
    """Ranks can train on its first blocks while the others are processed (``data.startWhileProcessing``)."""
    PROCESSED = "Processed"
    FAILED = "Failed"
    """The environment failed; the controller tries again by itself."""
    REFUSED = "Refused"
    """The data can't be what the spec says; the data or the job must change."""
    MISSING = "Missing"
    """It was processed once, and is gone; the controller processes it again."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


class OperationProgress(_Part):
    """Progress of one operation of the data pipeline."""

    operation: Annotated[str, Field(min_length=1, max_length=63)]
    done: Annotated[int, Field(ge=0, le=COUNT_MAX)]
    total: Annotated[int, Field(ge=0, le=COUNT_MAX)]


class DataReport(_Part):
    """State of a job's data. It changes only when the state or the progress does."""

    state: DataState
    about: Annotated[str, Field(min_length=1, max_length=64)]
    """``data_digest`` of the spec that it is about."""
    progress: Annotated[tuple[OperationProgress, ...], Field(max_length=OPERATIONS_MAX)] = ()
    message: Annotated[str, Field(max_length=MESSAGE_CHARACTERS_MAX)] = ""
    """An error, or what came of the data, for people."""
    plan: Annotated[str, Field(max_length=256)] = ""
    """Key of the plan object that ranks read, once the data is processed."""

    def to_annotation(self) -> str:
        """Return the value of the annotation; a report that is too long loses progress first, then its message."""
        report = self
        while len(text := _text(report)) > REPORT_BYTES_MAX:
            if report.progress:
                report = report.model_copy(update={"progress": report.progress[len(report.progress) // 2 + 1 :]})
            else:
                report = report.model_copy(update={"message": report.message[: len(report.message) // 2]})
        return text

    @property
    def words(self) -> str:
        """The message, or else the progress of the operation at work: ``decode 400 of 1,000``."""
        return self.message or progress_words(self.progress)


def progress_words(progress: Sequence[OperationProgress]) -> str:
    """Name the first operation that is not done, or else the last one; empty if there is none."""
    at_work = next((each for each in progress if each.done < each.total), progress[-1] if progress else None)
    return "" if at_work is None else f"{at_work.operation} {at_work.done:,} of {at_work.total:,}"


def read_report(annotations: object) -> tuple[DataReport | None, str]:
    """Return the report among a job's annotations, and why it can't be read; never raises, whatever is stored."""
    text = annotations.get(ANNOTATION_DATA) if isinstance(annotations, Mapping) else None
    if text is None:
        return None, ""
    if not isinstance(text, str):
        return None, f"annotation {ANNOTATION_DATA} is not text"
    if len(text.encode("utf-8", "replace")) > REPORT_BYTES_MAX:
        return None, f"annotation {ANNOTATION_DATA} has more than {REPORT_BYTES_MAX:,} bytes"
    try:
        return DataReport.model_validate_json(text), ""
    except (ValidationError, ValueError, RecursionError) as error:
        first = error.errors(include_url=False)[0] if isinstance(error, ValidationError) else {"msg": str(error)}
        field = ".".join(str(part) for part in first.get("loc", ()))
        words = f"annotation {ANNOTATION_DATA} can't be read: {field or 'it'}: {first['msg']}"
        return None, words[:MESSAGE_CHARACTERS_MAX]


def data_digest(spec: TrainingJobSpec) -> str:
    """Return a digest of the parts of a spec that decide what its data is made of.

    Fields with their default values don't count, so that a new field changes no digest. How ranks read it does neither.
    """

    def given(part: BaseModel) -> dict[str, Any]:
        return part.model_dump(mode="json", by_alias=True, exclude_defaults=True)

    read = {"augment", "onDamage", "packsBy", "schedule", "waitSeconds"}
    data = {name: part for name, part in given(spec.data).items() if name not in read}
    data["sources"] = [{name: part for name, part in of.items() if name != "augment"} for of in data["sources"]]
    sets = [] if spec.evaluation is None else [held_out.dataset for held_out in spec.evaluation.sets]
    packs = [stage.sequence_tokens for stage in spec.training.stages]
    text = json.dumps([data, sets, packs, given(spec.model)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _text(report: DataReport) -> str:
    # ASCII, so that characters are bytes.
    return json.dumps(report.model_dump(mode="json", by_alias=True, exclude_defaults=True), separators=(",", ":"))
