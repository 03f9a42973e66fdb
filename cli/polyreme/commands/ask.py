"""``polyreme ask``: questions to a trained model."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme.commands.asked_model import TARGET_HELP, AskedModel, open_asked
from polyreme.views.output import Format, emit, note
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_api.exit_codes import ExitCode
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.prompts import Prompt, PromptReader
from polyreme_datahub.sources.records import IMAGE_BYTES_MAX

STANDARD_INPUT = "-"
TOKENS_MAX = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a person asks."""

    text: str
    images: Sequence[Path]
    number: int = 1
    """Of its line."""


def ask(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="RUN", help=TARGET_HELP)],
    question: Annotated[
        str, typer.Argument(help='The question; - reads lines of {"images": [...], "question": "..."} instead.')
    ],
    images: Annotated[list[Path] | None, typer.Option("--image", help="An image; may be repeated.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Name of the checkpoint.", show_default="the newest")] = None,
    tokens_max: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer in tokens.")] = TOKENS_MAX,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")] = None,
    output: Annotated[Format, typer.Option("-o", "--output", help="Output format.")] = Format.TABLE,
) -> int:
    """Ask a trained model about images; it answers as the evaluation of its run does.

    Images stand in front of the question, or where it says <image>. With -, each line of standard input is a question,
    and each line of output its answer; with -o json that is an object with the answer's tokens.

    Examples:

      polyreme ask quickstart --image page.png "Which digits, left to right?"

      polyreme ask ./model --image page.png "Which digits, left to right?" -o json

      polyreme ask quickstart - -o json < questions.jsonl
    """
    many = question == STANDARD_INPUT
    if many and images:
        raise InvalidConfigError("each line names its own images", field="--image")
    if not many and not question.strip() and not images:
        raise InvalidConfigError("question is empty, expected text", field="QUESTION")
    if not many:
        _check_files(images or ())
    asked = open_asked(context.obj, target, checkpoint, device=device)
    with asked.reader() as reader:
        if many:
            return _answer_lines(asked, reader, tokens_max, output)
        one = Question(text=question, images=images or ())
        (answer,) = _answers(asked, reader, [_prompt(reader, one)], tokens_max)
    item = _item(one, answer)
    emit("Answer", item, output=output) if output is Format.JSON else print(answer["answer"])
    return ExitCode.OK
