"""Record of a step's rollouts: written before the update, so that a resumed run learns from the same answers.

One object a step, ``rollouts/step-<step>-<digest>.json``; the first commit wins::

    {"form", "step", "attempt",
     "prompts": {KEY: {"prompt", "expected", "experts",
                       "answers": [{"tokens", "logProbs", "ended", "reward", "text", "experts"}]}}}

``experts`` are the choices of routers, where the stage replays them: type, shape (tokens, layers, experts of a token),
bytes in base64.

``KEY`` names a prompt by its content, so the record is the same in every layout. The digest covers what prompts and
answers follow from: the data and their order, the objective, the seed. Records of steps that no kept checkpoint would
train again are deleted.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job.objective import Objective
from polyreme_api.rewards import Rewarded
from polyreme_api.store import ObjectExistsError, ObjectNotFoundError, ObjectStore

Chosen = npt.NDArray[np.integer]
FORM = 1
FOLDER = "rollouts/"
NO_TEXT = Rewarded(prompt="", answer="", expected="", reward=0.0)
_KEY = re.compile(r"rollouts/step-(\d+)-[0-9a-f]+\.json")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer of the model."""

    tokens: tuple[int, ...]
    """With the token that ends it, if it has one."""
    log_probs: tuple[float, ...]
    """Of each token, when it was drawn."""
    ended: bool
    """False: it was cut by its limit, or names an image that is not there; it is not learned."""
    rewarded: Rewarded | None = None
    """Its reward, and all texts; None: not yet."""
    chosen: Chosen | None = dataclasses.field(default=None, compare=False)
    """Experts that its tokens but the last went to (T, L, X); None: routers choose again."""
    prompt_chosen: Chosen | None = dataclasses.field(default=None, compare=False)
    """The same of its prompt, shared by all answers to it."""

    @property
    def reward(self) -> float:
        """Its reward; 0: it has none yet."""
        return 0.0 if self.rewarded is None else self.rewarded.reward


Answers = Mapping[str, Sequence[Answer]]
"""The answers to each prompt of a step, by its key."""


@dataclasses.dataclass(frozen=True, slots=True)
class RolloutLog:
    """The records of a run."""

    store: ObjectStore
    attempt: int

    def read(self, key: str) -> Answers | None:
        """Return the answers of a step; None: it has no record.

        Raises:
            InvalidConfigError: If it is damaged.
            StoreFailedError: If the store stays away.
        """
        try:
            return _parsed(self.store.get(key), key)
        except ObjectNotFoundError:
            return None

    def steps(self) -> dict[int, str]:
        """Return the key of each step that has a record; of several, the last by name."""
        found = sorted(info.key for info in self.store.list(FOLDER))
        return {int(named[1]): key for key in found if (named := _KEY.fullmatch(key))}

    def commit(self, key: str, step: int, answers: Answers) -> Answers:
        """Write the answers of a step, unless it has a record; return those of its record."""
        prompts = {name: _packed(of) for name, of in sorted(answers.items()) if of}
        content = {"form": FORM, "step": step, "attempt": self.attempt, "prompts": prompts}
        with contextlib.suppress(ObjectExistsError):
            self.store.put_if_absent(key, json.dumps(content, separators=(",", ":")).encode())
        return _parsed(self.store.get(key), key)

    def forget(self, before_step: int) -> None:
        """Delete the records of steps before one."""
        for found in list(self.store.list(FOLDER)):
            if (named := _KEY.fullmatch(found.key)) and int(named[1]) < before_step:
                self.store.delete(found.key)


def record_key(step: int, *, data: object, objective: Objective, seed: int) -> str:
    """Return the key of a step's record.

    Args:
        step: The step.
        data: Identity of the data and their order.
        objective: Of its stage; the layout of draws changes none, but weights in 4 bits draw others.
        seed: Of the run.
    """
    drawn_by = objective.model_dump(mode="json", exclude={"generation"})
    if objective.drawn_in_int4:
        drawn_by["weights"] = "Int4"
    facts = json.dumps([data, drawn_by, seed], sort_keys=True)
    return f"{FOLDER}step-{step:09d}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.json"


def measures_of(answers: Iterable[Sequence[Answer]]) -> dict[str, float]:
    """Measure a step's answers: their mean reward and length, and the share that was cut; none: there are none."""
    every = [answer for of in answers for answer in of]
    if not every:
        return {}
    return {
        "reward": sum(answer.reward for answer in every) / len(every),
        "answerTokens": sum(len(answer.tokens) for answer in every) / len(every),
        "cutRatio": sum(not answer.ended for answer in every) / len(every),
    }


def _packed(answers: Sequence[Answer]) -> dict[str, Any]:
    texts = [NO_TEXT if answer.rewarded is None else answer.rewarded for answer in answers]
    rows = [
        {
            "tokens": list(answer.tokens),
            "logProbs": list(answer.log_probs),
            "ended": answer.ended,
            "reward": answer.reward,
            "text": text.answer,
            **_packed_chosen(answer.chosen),
        }
        for answer, text in zip(answers, texts, strict=True)
    ]
    shared = _packed_chosen(answers[0].prompt_chosen)
    return {"prompt": texts[0].prompt, "expected": texts[0].expected, **shared, "answers": rows}


def _packed_chosen(chosen: Chosen | None) -> dict[str, Any]:
    if chosen is None:
        return {}
    return {"experts": [str(chosen.dtype), chosen.shape, base64.b64encode(chosen.tobytes()).decode()]}


def _parsed_chosen(of: Mapping[str, Any]) -> Chosen | None:
    if "experts" not in of:
        return None
    dtype, sizes, text = of["experts"]
    return np.frombuffer(base64.b64decode(text), np.dtype(dtype)).reshape(sizes)


def _parsed(content: bytes, key: str) -> Answers:
    try:
        prompts = json.loads(content)["prompts"]
        shared = {name: _parsed_chosen(of) for name, of in prompts.items()}
        return {
            name: [
                Answer(
                    tokens=tuple(map(int, answer["tokens"])),
                    log_probs=tuple(map(float, answer["logProbs"])),
                    ended=bool(answer["ended"]),
                    rewarded=Rewarded(
                        prompt=str(of["prompt"]),
                        answer=str(answer["text"]),
                        expected=str(of["expected"]),
                        reward=float(answer["reward"]),
                    ),
                    chosen=_parsed_chosen(answer),
                    prompt_chosen=shared[name],
                )
                for answer in of["answers"]
            ]
            for name, of in prompts.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidConfigError(
            f"rollouts in {key} can't be read ({type(error).__name__}: {error}); delete the object, and the step's "
            "answers are drawn again",
            field="spec.checkpoint.location",
        ) from error
