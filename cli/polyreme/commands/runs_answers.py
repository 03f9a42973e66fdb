"""``polyreme runs answers``."""

from __future__ import annotations

from typing import Annotated

import typer

from polyreme.commands.runs import NameArgument, find
from polyreme.job_files import read_job
from polyreme.run_files.records import checkpoint_url
from polyreme.views.formatting import shortened
from polyreme.views.output import Format, OutputOption, columns_of, emit
from polyreme_api.errors import NotFoundError
from polyreme_datahub.objects import open_store

COUNT = 20
TEXT_CHARACTERS = 60
"""Of a text in the table; JSON has all of it."""


def answers(
    context: typer.Context,
    name: NameArgument,
    step: Annotated[int | None, typer.Option(min=1, help="Step that drew them; the newest one by default.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Answers to show, at most.")] = COUNT,
    output: OutputOption = Format.TABLE,
) -> None:
    """Show answers that a run has drawn and been rewarded for, in a stage of objective GroupRelative.

    Steps are kept that a checkpoint of the run would train again.

    Examples:

      polyreme runs answers reward-words

      polyreme runs answers reward-words --step 300 --count 100 -o json
    """
    from polyreme_trainer.train.rollouts.record import RolloutLog  # it imports no torch, but few commands need it

    run = find(context.obj, name)
    log = RolloutLog(open_store(checkpoint_url(run, read_job(run.job_file))), attempt=0)
    keys = log.steps()
    wanted = max(keys, default=0) if step is None else step
    if wanted not in keys:
        kept = f"steps {min(keys)} to {max(keys)} are kept" if keys else "no step of it has drawn any"
        what = "no answers" if step is None else f"no answers of step {step}"
        raise NotFoundError(f"run {name!r} has {what}: {kept}", field="NAME" if step is None else "--step")
    rows = [
        {
            "step": wanted,
            "reward": answer.reward,
            "answer": answer.rewarded.answer,
            "ended": answer.ended,
            "expected": answer.rewarded.expected,
            "prompt": answer.rewarded.prompt,
            "tokens": len(answer.tokens),
        }
        for of in (log.read(keys[wanted]) or {}).values()
        for answer in of
        if answer.rewarded is not None
    ][:count]
    if output is not Format.JSON:
        rows = [{key: _short(value) for key, value in row.items()} for row in rows]
    columns = columns_of("step", "reward", "answer", "ended", "expected", "prompt")
    emit("AnswerList", rows, output=output, columns=columns)


def _short(value: object) -> object:
    return shortened(" ".join(value.split()), TEXT_CHARACTERS) if isinstance(value, str) else value
