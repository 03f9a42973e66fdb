"""Log-probabilities of given tokens by a model in memory.

Legend: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from polyreme_datahub.prompts import Prompt
from polyreme_trainer.model.vlm import KimiVL


@torch.no_grad()
def log_probs(model: KimiVL, prompt: Prompt, answer: Sequence[int] = ()) -> list[float]:
    """Return the log-probability of each token of a prompt and its answer but the first."""
    tokens = [*prompt.prompt_tokens, *answer]
    device = model.like.device
    tokens_T = torch.tensor(tokens, dtype=torch.int64, device=device)
    grids = [(int(rows), int(columns)) for rows, columns in np.asarray(prompt.grids_I2)]
    patches_PC = torch.tensor(prompt.patches_PC, device=device)
    places_T = torch.arange(len(tokens), device=device)
    hidden_TD = model(tokens_T, places_T, [0, len(tokens)], patches_PC, grids).hidden_TD
    scores_TV = model.logits(hidden_TD[:-1]).float().log_softmax(-1)
    found: list[float] = scores_TV.gather(1, tokens_T[1:, None])[:, 0].tolist()
    return found
