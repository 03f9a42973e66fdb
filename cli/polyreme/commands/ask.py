"""``polyreme ask``: questions to a trained model."""

from __future__ import annotations

import dataclasses
import json
import reprlib
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polyreme.commands.asked_model import TARGET_HELP, WEIGHTS_HELP, AskedModel, open_asked, read_image
from polyreme.views.output import Format, emit, note
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_api.exit_codes import ExitCode
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.prompts import Prompt, PromptReader
from polyreme_planner.int4_weights import WeightsKind

if TYPE_CHECKING:
    from polyreme.serving.answers import Answer

STANDARD_INPUT = "-"
TOKENS_MAX = 64
LINE_TOKENS_MAX = 16_384
"""Longest prompt of a line, if the model was made for longer ones [tokens]."""
ROWS_MAX = 16
"""Lines that are answered at once."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """What a person asks."""

    text: str
    images: Sequence[Path]


def ask(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="RUN", help=TARGET_HELP)],
    question: Annotated[
        str,
        typer.Argument(help="The question; - reads one a line from standard input, as JSON with question and images."),
    ],
    images: Annotated[list[Path] | None, typer.Option("--image", help="An image; may be repeated.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Name of the checkpoint.", show_default="the newest")] = None,
    tokens_max: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer in tokens.")] = TOKENS_MAX,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")] = None,
    weights: Annotated[WeightsKind, typer.Option(case_sensitive=False, help=WEIGHTS_HELP)] = WeightsKind.AUTO,
    output: Annotated[Format, typer.Option("-o", "--output", help="Output format.")] = Format.TABLE,
) -> int:
    """Ask a trained model about images; it answers as the evaluation of its run does.

    Images stand in front of the question, or where it says <image>. With -, each line of standard input is a question,
    and each line of output its answer; with -o json that is an object with the answer's tokens.

    Examples:

      polyreme ask quickstart --image page.png "Which digits, left to right?"

      polyreme ask ./model --image page.png "Which digits, left to right?" -o json

      polyreme ask quickstart - -o json
    """
    many = question == STANDARD_INPUT
    if many and images:
        raise InvalidConfigError("each line names its own images", field="--image")
    if not many and not question.strip() and not images:
        raise InvalidConfigError("question is empty, expected text", field="QUESTION")
    asked = _Question(text=question, images=images or ())
    data = [] if many else [read_image(path) for path in asked.images]
    opened = open_asked(context.obj, target, checkpoint, device=device, weights=weights)
    with opened.reader() as reader:
        if many:
            return _answer_lines(opened, reader, tokens_max, output)
        prompt = _prompt(reader, asked, data)
        (answer,) = opened.answers(
            [prompt],
            stop_token=reader.token_ids.end,
            prompt_tokens_max=len(prompt.prompt_tokens),
            new_tokens_max=tokens_max,
            rows=1,
        )
        assert answer is not None
        item = _item(reader, asked, answer)
    if output is Format.JSON:
        emit("Answer", item, output=output)
    else:
        sys.stdout.write(item["answer"] + "\n")
        if not answer.ended:
            note(f"the answer is cut after {tokens_max} tokens; --max-tokens allows more")
    return ExitCode.OK


def _answer_lines(opened: AskedModel, reader: PromptReader, tokens_max: int, output: Format) -> int:
    """Answer each line of standard input by a line; return the exit code."""
    wrong = 0
    asked: deque[_Question | str] = deque()

    def prompts() -> Iterator[Prompt | None]:
        for number, line in enumerate(sys.stdin, start=1):
            if not line.strip():
                continue
            try:
                question = _parse(line)
                prompt = _prompt(reader, question, [read_image(path) for path in question.images])
            except (InvalidConfigError, NotFoundError) as error:
                asked.append(f"line {number}: {error.message}")
                yield None
            else:
                asked.append(question)
                yield prompt

    for answer in opened.answers(
        prompts(),
        stop_token=reader.token_ids.end,
        prompt_tokens_max=min(reader.tokens_max, LINE_TOKENS_MAX),
        new_tokens_max=tokens_max,
        rows=ROWS_MAX,
    ):
        question = asked.popleft()
        if isinstance(question, str) or answer is None:
            wrong += 1
            note(f"polyreme ask: {question}")
            item: dict[str, Any] = {"answer": "", "error": question}
        else:
            item = _item(reader, question, answer)
        line = json.dumps(item) if output is Format.JSON else " ".join(item["answer"].splitlines())
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    return ExitCode.USAGE if wrong else ExitCode.OK


def _parse(line: str) -> _Question:
    """Read a line of JSON.

    Raises:
        InvalidConfigError: If it is none, or has another form.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidConfigError(f"not JSON: {error}") from error
    text = value.get("question") if isinstance(value, dict) else None
    images = value.get("images", []) if isinstance(value, dict) else None
    if not isinstance(text, str) or not isinstance(images, list) or not all(isinstance(each, str) for each in images):
        raise InvalidConfigError(
            f'not a question: {reprlib.repr(value)}, expected {{"images": [paths], "question": text}}'
        )
    return _Question(text=text, images=[Path(each) for each in images])


def _prompt(reader: PromptReader, question: _Question, images: Sequence[bytes]) -> Prompt:
    """Make a prompt.

    Raises:
        InvalidConfigError: If the question or an image breaks a rule.
    """
    try:
        return reader.read([{"role": "user", "content": question.text}], images)
    except BadRecordError as error:
        raise InvalidConfigError(error.message) from error


def _item(reader: PromptReader, question: _Question, answer: Answer) -> dict[str, Any]:
    return {
        "question": question.text,
        "images": [str(path) for path in question.images],
        "answer": reader.text(answer.tokens),
        "ended": answer.ended,
        "promptTokens": answer.prompt_tokens,
        "tokens": [
            {"token": token, "text": reader.text([token]), "logProb": log_prob}
            for token, log_prob in zip(answer.tokens, answer.log_probs, strict=True)
        ],
    }
