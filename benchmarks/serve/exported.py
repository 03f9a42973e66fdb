"""The model of bench-serve: the decoder of kimi-vl-nano with drawn weights, exported, which never ends an answer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from polyreme_api.batch import TokenIds, TokenizerFile
from polyreme_datahub.chat_format import OWN_TEMPLATE, jinja_of
from polyreme_datahub.tokens import train_tokenizer
from polyreme_planner.shapes import KIMI_VL_NANO, NO_VISION
from polyreme_trainer.export.huggingface import export_tensors
from polyreme_trainer.model.initialise import build_model

TOKENS = TokenIds(media=2, end=1, pad=0)
TEXT = "Which digits are on the page, from left to right? 0123456789"


def export_text(folder: Path) -> None:
    """Write the export."""
    shape = dataclasses.replace(KIMI_VL_NANO, vision=NO_VISION)
    model = build_model(shape, seed=3, media_token=TOKENS.media)
    with torch.no_grad():
        # A logit of 0 is never the largest of hundreds.
        model.language_model.lm_head.weight[TOKENS.end] = 0
    tokenizer = TokenizerFile(
        content=train_tokenizer({TEXT: 9}, vocabulary=300),
        chat_template=jinja_of(OWN_TEMPLATE),
        template=OWN_TEMPLATE.model_dump_json(by_alias=True).encode(),
        image_tokens_max=20,
        pixel_version=2,
    )
    state = model.state_dict()
    export_tensors(state, state.items(), shape, folder, tokens=TOKENS, tokenizer=tokenizer)
