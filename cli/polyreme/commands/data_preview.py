"""``polyreme data preview``, ``trace``, ``mixture``: what a step trains on, which steps see a sample, shares."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme.commands.runs import find
from polyreme.job_files import read_job
from polyreme.report.preview_page import build_preview
from polyreme.run_files.data import open_run_data, run_uid
from polyreme.run_files.packs import read_packs
from polyreme.run_files.paths import Home
from polyreme.run_files.records import checkpoint_url, read_points
from polyreme.views.output import Format, OutputOption, columns_of, emit, note
from polyreme.views.spinner import busy
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub.loader.inspect.preview import PreviewDocument, PreviewPack, Span
from polyreme_datahub.loader.open import open_steps
from polyreme_datahub.loader.order.outlook import SourceOutlook
from polyreme_datahub.loader.source import PackedSource

PACKS_MAX = 64
TRACE_STEPS_MAX = 1_000_000
TURNS_MAX = 10_000
"""Turns of a sample that are listed."""
SHOWS_EVERY_S = 0.2

JobOption = Annotated[str, typer.Option("--job", help="Name of a run on this machine, or NAMESPACE/NAME.")]


def preview(
    context: typer.Context,
    job: JobOption,
    step: Annotated[int, typer.Option(min=1, help="Step, from 1.")],
    first: Annotated[int, typer.Option("--pack", min=0, help="First pack to show, from 0.")] = 0,
    count: Annotated[int, typer.Option("--packs", min=1, max=PACKS_MAX, help="How many packs to show.")] = 4,
    to: Annotated[Path | None, typer.Option("--to", help="HTML file to write.", show_default="JOB-step-N.html")] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show what a step trains on: each pack with its images as the model sees them, its text, and what is learned.

    Images are augmented as at that step, and masks, boxes, points and polygons are drawn over them.

    The packs are those that the ranks get. They are written as one HTML file; -o json prints their text instead.

    Examples:

      polyreme data preview --job quickstart --step 33

      polyreme data preview --job quickstart --step 33 --pack 2 --packs 1 -o json
    """
    home, (spec, source, uid) = context.obj, _opened(context.obj, job)
    _check_step(step, spec.training.steps_known)
    of_packs = source.packs_in(step)
    if first >= of_packs:
        raise InvalidConfigError(f"no pack {first}: step {step} has {of_packs}, from 0 on", field="--pack")
    with busy(f"reading step {step}"):
        shown = read_packs(home, spec, uid, source, step, first=first, count=count)
    rows = [_row(pack) for pack in shown]
    if output is Format.JSON:
        item = {"job": job, "step": step, "packsPerStep": of_packs, "packs": rows}
        emit("StepPreview", item, output=output)
        return
    path = to or Path(f"{job.replace('/', '-')}-step-{step}.html")
    path.write_text(build_preview(f"{job}, step {step}", shown, of_packs=of_packs))
    columns = columns_of("pack", "samples", "tokens", "tokensMax:of", "learned", "images")
    emit("StepPreview", rows, output=output, columns=columns)
    note(f"written to {path}")


def trace(
    context: typer.Context,
    sample: Annotated[str, typer.Argument(help="Id of a sample, as previews, reports and dead letters name it.")],
    job: JobOption,
    steps: Annotated[str | None, typer.Option("--steps", help="Steps, as 1-100.", show_default="all")] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Name the steps of a run that train on a sample. It follows from the order; nothing is read but the index.

    Examples:

      polyreme data trace sample-17 --job quickstart

      polyreme data trace sample-17 --job quickstart --steps 1-100 -o json
    """
    spec, source, _ = _opened(context.obj, job)
    begin, end = _range(steps, spec.training.steps_known)
    found = source.find(sample)
    if not found:
        raise NotFoundError(f"no sample {sample!r} in the training data of {job}", field="SAMPLE")
    turns: list[dict[str, Any]] = []
    shown_s = time.monotonic()
    with busy(f"looking at steps {begin} to {end}") as show:
        for step in range(begin, end + 1):
            turns += [
                {"step": turn.step, "pack": turn.pack, "source": turn.source, "epoch": turn.epoch}
                for turn in source.turns(found, step)
            ]
            if time.monotonic() - shown_s > SHOWS_EVERY_S:
                shown_s = time.monotonic()
                show(f"step {step:,} of {end:,}: {len(turns):,} turns")
            if len(turns) >= TURNS_MAX:
                note(f"the first {TURNS_MAX:,} turns, up to step {step}; name later steps by --steps")
                break
    emit("SampleTrace", turns, output=output, columns=columns_of("step", "pack", "source", "epoch"))
    both = zip(spec.data.sources, source.preference_sets, strict=True)
    if turns and any(of.name in found for of, pairs in both if pairs is not None):
        note("each of these steps trains on both of its answers, the chosen one and the rejected one")
    if not turns:
        note(f"no step from {begin} to {end} trains on {sample}")


def mixture(context: typer.Context, job: JobOption, output: OutputOption = Format.TABLE) -> None:
    """Show the sources of a run: shares, epochs and visits by step, and when a limit ends one.

    There is a row for each source with a share, between the changes of the mixture. The figures follow from the job and
    the lengths of its samples, also for steps that are still to come; steps are exact to some percent. Visits say how
    often samples that fit were trained on by the end of the row: the least, the most, and how many were never seen.
    They are counted; of runs of more than 400,000 samples they are exact to some percent.

    Examples:

      polyreme data mixture --job quickstart

      polyreme data mixture --job quickstart -o json
    """
    spec, source, _ = _opened(context.obj, job)
    rows = [
        {
            "fromStep": row.first_step,
            "toStep": row.last_step,
            "source": of.name,
            "samplesPercent": round(100 * of.samples_ratio, 2),
            "tokensPercent": round(100 * of.tokens_ratio, 2),
            "epochs": round(of.epochs, 3),
            "endsAtStep": of.ends_step,
            **_visits(of),
        }
        for row in source.outlook(spec.training.steps_known)
        for of in row.sources
        if of.samples_ratio
    ]
    columns = [("FROM STEP", "fromStep"), ("TO", "toStep"), ("SOURCE", "source"), ("SAMPLES %", "samplesPercent")]
    columns += [("TOKENS %", "tokensPercent"), ("EPOCHS", "epochs"), ("ENDS AT STEP", "endsAtStep")]
    columns += [("VISITS MIN", "visitsMin"), ("MAX", "visitsMax"), ("NEVER SEEN", "neverSeen")]
    emit("Mixture", rows, output=output, columns=columns)


def _visits(of: SourceOutlook) -> dict[str, Any]:
    visits = of.visits
    if visits is None:
        return {}
    least = {"visitsMin": visits.least, "visitsMax": visits.most, "neverSeen": visits.unseen}
    return {**least, "visitsCounted": visits.exact}


def _opened(home: Home, job: str) -> tuple[TrainingJobSpec, PackedSource, str]:
    """Open the training data of a run; return its spec, the data, and the UID under which they were processed.

    Changes appended to the schedule take effect where the run's newest attempt has them; later ones are not known yet.

    Raises:
        NotFoundError: If there is no such run.
        EnvironmentFailedError: If its data is not processed.
    """
    run = find(home, job, field="--job")
    stored = read_job(run.job_file)
    points = read_points(checkpoint_url(run, stored))
    mixture = points[-1].mixture if points else None
    source, uid = open_run_data(home, run, stored.spec, mixture), run_uid(run)
    return open_steps(home.objects_url, stored.spec, job=uid), source, uid


def _check_step(step: int, steps: int) -> None:
    if step > steps:
        raise InvalidConfigError(f"no step {step}: the job trains {steps:,}, see spec.training.steps", field="--step")


def _range(given: str | None, steps: int) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", given or f"1-{min(steps, TRACE_STEPS_MAX)}")
    begin, end = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= begin <= end <= steps or end - begin >= TRACE_STEPS_MAX:
        raise InvalidConfigError(
            f"no steps {given}: expected FIRST-LAST between 1 and {steps:,}, at most {TRACE_STEPS_MAX:,} at once",
            field="--steps",
        )
    return begin, end


def _row(pack: PreviewPack) -> dict[str, Any]:
    documents = [_document(document) for document in pack.documents]
    return {
        "pack": pack.number,
        "samples": len(documents),
        "tokens": pack.tokens,
        "tokensMax": pack.tokens_max,
        "learned": sum(document["learned"] for document in documents),
        "images": sum(part["kind"] == "image" for document in documents for part in document["parts"]),
        "documents": documents,
    }


def _document(document: PreviewDocument) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [
        {"kind": part.answer or ("learned" if part.learned else "read"), "text": part.text, "tokens": part.tokens}
        if isinstance(part, Span)
        else {
            "kind": "image",
            "height": part.height,
            "width": part.width,
            "tokens": part.tokens,
            "shapes": list(part.shapes),
            "augmented": part.change,
            "mask": bool(part.mask),
        }
        for part in document.parts
    ]
    pair = {"sameTokens": document.same} if any(part["kind"] == "chosen" for part in parts) else {}
    return {
        "sample": document.sample_id,
        "tokens": document.tokens,
        "learned": document.learned,
        **pair,
        "parts": parts,
    }
