"""Answers that a model has drawn, with rewards, for both sides: ours, and TRL's GRPOTrainer on them.

The answers are those of the pairs: the chosen one is rewarded by 1. Log-probabilities of their draws are made up, so
the correction for the generator acts.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from benchmarks.preference.pairs import Pairs, packed

from polyreme_api.job.objective import Objective
from polyreme_trainer.train.inputs import Inputs, to_inputs
from polyreme_trainer.train.rollouts.record import NO_TEXT, Answer
from polyreme_trainer.train.rollouts.streams import DocumentPrompt, shares_of, with_answers

LIMIT = 2.0
LOSSES: Mapping[str, Mapping[str, Any]] = {
    "Tokens": {"loss_type": "dapo"},
    "Sequences": {"loss_type": "grpo"},
}
"""By our aggregation, as TRL's settings."""
PAD = 0


def objective(aggregation: str) -> Objective:
    """Return our settings."""
    return Objective.model_validate(
        {"kind": "GroupRelative", "reward": "a:b", "samples": 2, "aggregation": aggregation, "advantage": ADVANTAGE}
    )


ADVANTAGE = "MeanAndDeviation"
"""TRL's default."""


def groups(pairs: Pairs) -> list[list[Answer]]:
    """Return the answers to each prompt."""
    random = np.random.default_rng(8)

    def answer(tokens: list[int], reward: float) -> Answer:
        rewarded = dataclasses.replace(NO_TEXT, reward=reward)
        log_probs = random.normal(-6.2, 0.5, len(tokens)).tolist()
        return Answer(tokens=tuple(tokens), log_probs=tuple(log_probs), ended=True, rewarded=rewarded)

    return [[answer(one, 1.0), answer(other, 0.0)] for one, other in zip(pairs.chosen, pairs.rejected, strict=True)]


def our_inputs(pairs: Pairs, aggregation: str) -> Inputs:
    """Lay the answers out as one stream, as a rank does."""
    plain = packed(pairs, way="text")
    total = int(np.asarray(plain.tokens_T).shape[0])
    prompts = [
        DocumentPrompt.of(number, prompt, [number], np.asarray(plain.patches_PC), np.asarray(plain.grids_I2))
        for number, prompt in enumerate(pairs.prompts)
    ]
    of = objective(aggregation)
    answers = {prompt.key: group for prompt, group in zip(prompts, groups(pairs), strict=True)}
    shares = shares_of(answers, of, step=1)
    batch, drawn = with_answers(plain, prompts, answers, shares, objective=of, pack_tokens=total, pad=PAD)
    return to_inputs(dataclasses.replace(batch, sample_ids=[]), device="cpu", media_token=1, drawn=drawn)


def their_loss(model: Any, tokenizer: Any, pairs: Pairs, aggregation: str) -> Any:
    """Return TRL's loss of the same rollouts, with the same advantages."""
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        beta=0.0,
        num_generations=2,
        per_device_train_batch_size=2 * len(pairs.prompts),
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **LOSSES[aggregation],
    )
    trainer = GRPOTrainer(
        model,
        args=arguments,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=datasets.Dataset.from_list([{"prompt": "w2"}]),
        processing_class=tokenizer,
    )
    # As after a generation by another engine, whose log-probabilities are known.
    trainer.use_vllm, trainer.vllm_importance_sampling_correction = True, True
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer._compute_loss(trainer.model, _batch(trainer, pairs))  # noqa: SLF001 - without its loop


def _batch(trainer: Any, pairs: Pairs) -> dict[str, Any]:
    answers = [answer for group in groups(pairs) for answer in group]
    prompts = torch.tensor([prompt for prompt in pairs.prompts for _ in range(2)])
    longest = max(len(answer.tokens) for answer in answers)
    completions, mask = torch.full((2, len(answers), longest), PAD)
    drawn = torch.zeros(len(answers), longest)
    for row, answer in enumerate(answers):
        count = len(answer.tokens)
        completions[row, :count], mask[row, :count] = torch.tensor(answer.tokens), 1
        drawn[row, :count] = torch.tensor(answer.log_probs)
    rewards = torch.tensor([answer.reward for answer in answers]).view(-1, 2)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": completions,
        "completion_mask": mask,
        "advantages": advantages.flatten(),
        "num_items_in_batch": mask.sum(),
    }
    with torch.no_grad():
        now, *_ = trainer._get_per_token_logps_and_entropies(  # noqa: SLF001
            trainer.model,
            torch.cat((prompts, completions), 1),
            torch.cat((batch["prompt_mask"], mask), 1),
            longest,
        )
    return batch | {"importance_sampling_ratio": ((now - drawn) * mask).exp().clamp(max=LIMIT)}
