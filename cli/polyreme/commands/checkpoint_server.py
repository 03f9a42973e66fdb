"""``polyreme checkpoint check-server``: whether a server computes what the model that it serves computes."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from polyreme.commands.asked_model import TARGET_HELP, AskedModel, open_asked, read_image
from polyreme.serving.access import read_token
from polyreme.serving.served_model import ServedModel
from polyreme.views.output import Format, OutputOption, emit, lines
from polyreme.views.spinner import busy
from polyreme_api.errors import RefusedError
from polyreme_datahub.prompts import Prompt, PromptReader

TEXT_TOKENS = 64
"""Tokens of a text prompt, unless the model was made for shorter ones."""
ANSWER_TOKENS = 16
WITHIN = 1.0
"""Twice what a trained model in bfloat16 differs by in 500 random tokens; a wrong rotation differs by 4 and more."""
QUESTION = "What is on the picture?"


def check_server(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="RUN", help=TARGET_HELP)],
    url: Annotated[str, typer.Argument(metavar="URL", help="Base URL of the server, http://HOST:PORT.")],
    prompts: Annotated[int, typer.Option(min=1, help="Texts to compare, drawn by a fixed seed.")] = 8,
    images: Annotated[list[Path] | None, typer.Option("--image", help="An image to ask about; repeatable.")] = None,
    question: Annotated[str, typer.Option(help="Question about each image.")] = QUESTION,
    token_file: Annotated[Path | None, typer.Option(help="File with the token that the server wants.")] = None,
    within: Annotated[float, typer.Option(min=0.0, help="Largest difference of a token's log-probability.")] = WITHIN,
    checkpoint: Annotated[str | None, typer.Option(help="Name of the checkpoint.", show_default="the newest")] = None,
    output: OutputOption = Format.TABLE,
) -> None:
    """Compare a server's log-probabilities with those of the exported model or run; exit code 4 if they differ.

    A server with a wrong kernel or configuration answers fluently, so only such a comparison finds it. Texts are random
    tokens. With --image, the answers to the question about each image are compared too, and the prompt's tokens. A
    server in float32 differs by about 0.0001, one in bfloat16 by up to 0.6. polyreme serve has no completions of texts
    and can't be checked.

    Examples:

      polyreme checkpoint check-server ./model http://127.0.0.1:8000

      polyreme checkpoint check-server ./model http://127.0.0.1:8000 --image page.png --question "Which digits?"
    """
    server = ServedModel(url, read_token(token_file, characters_min=1))
    data = [read_image(path) for path in images or ()]
    asked = open_asked(context.obj, target, checkpoint)
    with busy(f"asking {server.model}"), asked.reader() as reader:
        texts = [_difference_of_text(asked, server, prompt) for prompt in _texts(reader, asked, prompts)]
        shown = [_difference_of_image(asked, server, reader, question, image) for image in data]
    differences = [one for part in (*texts, *shown) for one in part]
    worst, mean = max(differences), statistics.fmean(differences)
    if not worst <= within:
        raise RefusedError(
            f"server computes something else: a log-probability of model {server.model} differs by {worst:.3g} (mean "
            f"{mean:.2g} over {len(differences)} tokens), expected at most {within:g}; its kernels, its type or its "
            "weights are not those of the model",
            field="--within, or what is served",
        )
    emit(
        "ServerChecked",
        {
            "model": server.model,
            "prompts": len(texts) + len(shown),
            "tokens": len(differences),
            "worst": worst,
            "mean": mean,
            "within": within,
        },
        output=output,
        columns=lines("model", "prompts", "tokens", "worst", "mean", "within"),
    )


def _texts(reader: PromptReader, asked: AskedModel, count: int) -> Iterator[Prompt]:
    """Draw texts: any token but special ones."""
    draw = random.Random(0)
    known = [token for token in range(asked.model.shape.decoder.vocabulary) if reader.token_bytes(token)]
    length = max(2, min(TEXT_TOKENS, reader.tokens_max // 2))
    values = asked.model.shape.vision.channels * asked.model.shape.vision.patch_px**2
    for _ in range(count):
        tokens = draw.choices(known, k=length)
        yield Prompt(
            prompt_tokens=tokens,
            patches_PC=np.zeros((0, values), np.uint8),
            grids_I2=np.zeros((0, 2), np.int32),
        )


def _log_probs(asked: AskedModel, prompt: Prompt, answer: Sequence[int] = ()) -> list[float]:
    from polyreme.serving.log_probs import log_probs

    return log_probs(asked.model, prompt, answer)


def _difference_of_text(asked: AskedModel, server: ServedModel, prompt: Prompt) -> list[float]:
    return _differences(_log_probs(asked, prompt), server.prompt_log_probs(prompt.prompt_tokens))


def _difference_of_image(
    asked: AskedModel, server: ServedModel, reader: PromptReader, question: str, image: bytes
) -> list[float]:
    prompt = reader.read([{"role": "user", "content": question}], [image])
    answer = server.answer(question, image, tokens_max=ANSWER_TOKENS)
    if list(answer.prompt_tokens) != list(prompt.prompt_tokens):
        raise RefusedError(
            f"server reads a question as other tokens: {len(answer.prompt_tokens)} of them, expected the model's "
            f"{len(prompt.prompt_tokens)}; give it the export's chat template and processor",
            field="--question, or what is served",
        )
    ours = _log_probs(asked, prompt, answer.tokens)
    return _differences(ours[len(prompt.prompt_tokens) - 1 :], answer.log_probs)


def _differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    if len(ours) != len(theirs):
        raise RefusedError(
            f"server scores other tokens: {len(theirs)} log-probabilities, expected {len(ours)}", field="URL"
        )
    return [abs(own - other) for own, other in zip(ours, theirs, strict=True)]
