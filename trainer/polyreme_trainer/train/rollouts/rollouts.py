"""Rollouts of a step: its packs in, the same packs with answers that the model has drawn out.

The record of all answers is committed before the step's update. A resumed run, in any layout, takes it from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from polyreme_api.batch import BatchSource
from polyreme_api.checkpoint_inventory import survey
from polyreme_api.errors import InvalidConfigError, PolyremeError, StepFailedError
from polyreme_api.job.objective import Objective
from polyreme_api.rewards import Answered, Rewards
from polyreme_trainer.checkpoint.save import CheckpointWriter
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.rank_page import advance
from polyreme_trainer.train.microbatches import PackReader, ReadPacks
from polyreme_trainer.train.rollouts.generation import Drawing, generate, in_own_layout, in_training_layout
from polyreme_trainer.train.rollouts.generation_model import GenerationModel
from polyreme_trainer.train.rollouts.record import Answer, Answers, RolloutLog, measures_of, record_key
from polyreme_trainer.train.rollouts.streams import DocumentPrompt, prompts_of, shares_of, with_answers
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState, settle


@dataclasses.dataclass(frozen=True, slots=True)
class RolledOut:
    """A step's packs, and what its answers measure."""

    packs: Sequence[ReadPacks]
    measures: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """Everything that a rank needs to roll a step out."""

    settings: TrainSettings
    state: TrainState
    source: BatchSource
    reader: PackReader
    meshes: Meshes
    writer: CheckpointWriter
    rewards: Rewards | None
    generation: GenerationModel | None = None
    """Draws answers in another layout than training's, for the stages that ask for it."""

    def of(self, packs: Sequence[ReadPacks], objective: Objective) -> RolledOut:
        """Roll out the next step; every rank calls it with its packs.

        Raises:
            InvalidConfigError: If samples have images in their answers, or the answers do not fit their packs.
            StepFailedError: On all ranks, if a reward fails, or all answers were cut.
        """
        self.writer.wait()  # the saving thread uses the same group
        step, ids = self.state.step + 1, self.source.token_ids
        prompts = [
            prompts_of(read.batch, media=ids.media, end=ids.end, merge=self.settings.shape.vision.merge)
            for read in packs
        ]
        answers = self._answers(step, [prompt for of in prompts for prompt in of], objective)
        shares = shares_of(answers, objective, step=step)
        rolled = []
        for read, of in zip(packs, prompts, strict=True):
            batch, drawn = with_answers(
                read.batch,
                of,
                answers,
                shares,
                objective=objective,
                pack_tokens=self.source.pack_tokens_in(step),
                pad=ids.pad,
            )
            rolled.append(dataclasses.replace(read, batch=batch, drawn=drawn if drawn.share_B.size else None))
        return RolledOut(rolled, measures_of(answers.values()))

    def forget(self) -> None:
        """Delete, on the first rank, the records of steps that no checkpoint would train again."""
        if self.meshes.rank == 0 and (kept := survey(self.settings.checkpoint.store).committed):
            self._log.forget(min(each.step for each in kept) + 1)

    @property
    def _log(self) -> RolloutLog:
        return RolloutLog(self.settings.checkpoint.store, self.settings.rank.attempt)

    def _answers(self, step: int, prompts: Sequence[DocumentPrompt], objective: Objective) -> Answers:
        """Return the answers to all prompts of the step, of all ranks: those of its record, if it has one."""
        first, group = self.meshes.rank == 0, self.meshes.control_group
        data = self.reader.state(step).get("data") if first else None
        key = record_key(step, data=data, objective=objective, seed=self.settings.seed)
        known = collectives.from_first(self._log.read(key) if first else None, group)
        if known is not None:
            return known
        found = collectives.gather_to_first(self._drawn(prompts, objective), group)
        result: Answers | str = ""
        if found is not None:
            failed = next((of for of in found if isinstance(of, str)), None)
            every = {name: answers for of in found if not isinstance(of, str) for name, answers in of.items()}
            result = failed or self._log.commit(key, step, every)
        result = collectives.from_first(result if first else None, group)
        if isinstance(result, str):
            raise StepFailedError(
                f"answers of step {step} have no reward: {result}", field="spec.training.stages[].objective.reward"
            )
        return result

    def _drawn(self, prompts: Sequence[DocumentPrompt], objective: Objective) -> dict[str, list[Answer]] | str:
        """Draw and reward answers to this rank's share of the prompts, each once; a sentence if rewards fail."""
        drawing = self._drawing(objective)
        different = list({prompt.key: prompt for prompt in prompts}.values())
        first, ranks = drawing.share
        mine = different[first::ranks]
        made = generate(
            drawing,
            mine,
            objective,
            cache=self.settings.evaluation.cache,
            stop_token=self.source.token_ids.end,
            seed=self.settings.seed,
            step=self.state.step + 1,
        )
        if not drawing.speaks:
            return {}
        try:
            return {
                prompt.key: self._rewarded(prompt, answers, objective)
                for prompt, answers in zip(mine, made, strict=True)
            }
        except PolyremeError as error:
            return error.message

    def _drawing(self, objective: Objective) -> Drawing:
        """Return the model that draws, with the weights of now."""
        settle(self.state)
        own = objective.generation
        if self.generation is None or own is None or own.parallelism is None:
            return in_training_layout(self.state, self.meshes)
        self.generation.refresh()
        return in_own_layout(self.generation, self.meshes)

    def _rewarded(self, prompt: DocumentPrompt, answers: Sequence[Answer], objective: Objective) -> list[Answer]:
        if self.rewards is None:
            raise InvalidConfigError("the run was started without a reward function")
        advance()
        asked = [
            Answered(
                prompt=prompt.prompt_tokens,
                answer=answer.tokens[:-1] if answer.ended else answer.tokens,
                expected=prompt.expected,
            )
            for answer in answers
        ]
        both = zip(answers, self.rewards.of(asked, objective), strict=True)
        return [dataclasses.replace(answer, rewarded=rewarded) for answer, rewarded in both]
