"""Rewards of answers by a user's function, which runs in a sandbox with limits: it is code of strangers to a rank."""

from __future__ import annotations

from collections.abc import Sequence

from polyreme_api.errors import InvalidConfigError, StepFailedError
from polyreme_api.job.objective import Objective
from polyreme_api.rewards import Answered, Rewarded
from polyreme_datahub.operations.declare import RECORD
from polyreme_datahub.operations.values import Value
from polyreme_datahub.rewards.operation import reward
from polyreme_datahub.sandbox.sandbox import Sandbox
from polyreme_datahub.sandbox.tasks import Limits, SampleTask, SandboxStep, StepMade, StepVerdict
from polyreme_datahub.tokenizer_file import TokenText

LIMITS = Limits(memory_bytes=2**30, wall_s=20.0, cpu_s=10, output_bytes=2**16)
"""What one answer's reward may use."""
TEXT_CHARACTERS_MAX = 200
FIELD = "spec.training.stages[].objective.reward"


class SandboxedRewards:
    """Calls a reward function: implements ``Rewards``. Use it from one thread, as its sandbox.

    Args:
        tokenizer: ``tokenizer.json`` of the job.
        limits: What one answer's reward may use.
    """

    def __init__(self, tokenizer: bytes, *, limits: Limits = LIMITS) -> None:
        self._text, self._limits = TokenText(tokenizer), limits
        self._sandbox: tuple[SandboxStep, Sandbox] | None = None

    def of(self, answers: Sequence[Answered], objective: Objective) -> list[Rewarded]:
        """Return the reward of each answer; errors as ``Rewards``."""
        texts = [
            {
                "prompt": self._text.decode(one.prompt),
                "answer": self._text.decode(one.answer),
                "expected": self._text.decode(one.expected),
            }
            for one in answers
        ]
        tasks = [SampleTask(key=str(number), values={RECORD: Value.of(text)}) for number, text in enumerate(texts)]
        found: dict[str, float] = {}
        for outcome in self._sandbox_of(objective).run(tasks):
            (end,) = outcome.steps
            if not isinstance(end, StepMade):
                why = end.message if isinstance(end, StepVerdict) else "it was dropped"
                raise StepFailedError(
                    f"reward of the answer {_short(texts[int(outcome.key)]['answer'])} failed: {why}",
                    field=FIELD,
                )
            found[outcome.key] = float(end.value.data["reward"])
        return [Rewarded(**text, reward=found[task.key]) for text, task in zip(texts, tasks, strict=True)]

    def check(self, objective: Objective) -> None:
        """Find a stage's function.

        Raises:
            InvalidConfigError: If it is not there.
        """
        task = SampleTask(key="check", values={RECORD: Value.of({})})
        (outcome,) = self._sandbox_of(objective).run([task])
        (end,) = outcome.steps
        if isinstance(end, StepVerdict):
            raise InvalidConfigError(f"there is no reward: {end.message}", field=FIELD)

    def close(self) -> None:
        """End the sandbox's child."""
        if self._sandbox is not None:
            self._sandbox[1].close()
            self._sandbox = None

    def _sandbox_of(self, objective: Objective) -> Sandbox:
        parameters = {"function": objective.reward, "arguments": dict(objective.reward_arguments)}
        step = SandboxStep(name="reward", operation=reward.path, inputs=(RECORD,), parameters=parameters)
        if self._sandbox is None or self._sandbox[0] != step:
            self.close()
            self._sandbox = (step, Sandbox([step], self._limits))
        return self._sandbox[1]


def _short(text: str) -> str:
    return repr(text if len(text) <= TEXT_CHARACTERS_MAX else f"{text[:TEXT_CHARACTERS_MAX]}…")
