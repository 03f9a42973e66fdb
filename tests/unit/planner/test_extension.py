"""A run that has trained may get another end, as far as no trained step would have been another one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.model import Training
from polyreme_api.mixture import MixtureRecord
from polyreme_planner.extension import extended
from polyreme_planner.mixture import first_mixture, in_force, next_mixture, training_words
from tests.unit.datahub.jobs import make_spec


def spec(steps: int, *, stages: tuple[dict[str, Any], ...] = (), epochs_max: int | None = None, **rates: Any) -> Any:
    given = make_spec(["sample/digits-1"]).model_dump(mode="json", by_alias=True)
    given["training"] |= {"steps": steps, "stages": list(stages), "optimizer": {"learningRate": "1", **rates}}
    given["data"]["sources"][0]["epochsMax"] = epochs_max
    return TrainingJobSpec.model_validate_json(json.dumps(given))


def refused(known: TrainingJobSpec, asked: TrainingJobSpec, *, after_step: int) -> str:
    with pytest.raises(InvalidConfigError) as error:
        extended(asked, known.training, after_step=after_step)
    assert error.value.field is not None
    assert error.value.field.startswith("spec.training")
    return error.value.message


@pytest.mark.parametrize(
    ("known", "asked", "after_step"),
    [
        (spec(100), spec(200), 100),
        (spec(100), spec(60), 60),
        (spec(100), spec(200, decaySteps=100, finalLearningRate="0.1"), 100),
        (spec(100, decaySteps=20), spec(200, decaySteps=50), 80),
        (spec(100, schedule="Cosine", decaySteps=10), spec(120, schedule="Cosine", decaySteps=10), 90),
        (
            spec(100, stages=({"name": "a", "steps": 60}, {"name": "b", "steps": 40, "learningRate": "0.5"})),
            spec(130, stages=({"name": "a", "steps": 60}, {"name": "b", "steps": 70, "learningRate": "0.5"})),
            100,
        ),
    ],
)
def test_an_end_may_move_where_no_learning_rate_of_a_trained_step_would_change(
    known: TrainingJobSpec, asked: TrainingJobSpec, after_step: int
) -> None:
    assert extended(asked, known.training, after_step=after_step) == asked.training


def test_an_end_that_would_alter_a_trained_step_is_refused_with_the_step() -> None:
    past = refused(spec(100, decaySteps=20), spec(200, decaySteps=20), after_step=90)
    assert "the learning rate of step 82 would change from 0.95 to 1" in past
    assert "choose an end whose decay begins after step 90" in past
    cosine = refused(spec(100, schedule="Cosine"), spec(200, schedule="Cosine"), after_step=90)
    assert "a cosine without decaySteps falls over the whole run" in cosine
    assert "training.steps 60 is below step 61" in refused(spec(100), spec(60), after_step=61)
    assert "source 's0' has epochsMax" in refused(spec(100, epochs_max=3), spec(200, epochs_max=3), after_step=1)


def test_only_the_end_of_the_last_stage_may_change() -> None:
    stages = ({"name": "a", "steps": 60}, {"name": "b", "steps": 40})
    earlier = ({"name": "a", "steps": 70}, {"name": "b", "steps": 40})
    frozen = ({"name": "a", "steps": 60}, {"name": "b", "steps": 40, "trains": ["Decoder"]})
    assert "training.stages[0].steps may not change" in refused(
        spec(100, stages=stages), spec(110, stages=earlier), after_step=1
    )
    assert "training.stages[1].trains" in refused(spec(100, stages=stages), spec(100, stages=frozen), after_step=1)
    assert "training.optimizer.learningRate may not" in refused(spec(9), spec(9, learningRate="2"), after_step=0)


def test_an_attempt_is_held_to_the_end_that_was_fixed_for_it() -> None:
    known = first_mixture(spec(100, decaySteps=20))
    longer = next_mixture(spec(200, decaySteps=20), known, after_step=80)
    assert in_force(spec(100), longer).training.steps == 200
    assert next_mixture(spec(300, decaySteps=20), longer, after_step=190) == longer, "its decay has begun: ignored"
    (words,) = training_words(spec(300, decaySteps=20), longer, after_step=190)
    assert "the changed training is ignored, the run keeps its end at step 200" in words
    (said,) = training_words(spec(200, decaySteps=20), known, after_step=80)
    assert said == "extends the run from step 100 to 200: spec.training.steps: 100 -> 200"
    assert in_force(spec(100), MixtureRecord()).training.steps == 100, "of a release before there were records"


def test_epochs_move_the_end_to_the_steps_that_were_counted_for_them() -> None:
    def by_epochs(epochs: int) -> TrainingJobSpec:
        training = spec(100, decaySteps=20).training.model_copy(update={"steps": None, "epochs": epochs})
        return spec(100).model_copy(update={"training": training})  # type: ignore[no-any-return]

    def count(training: Training) -> Training:
        return training.with_steps(50 * training.epochs) if training.epochs else training

    known, longer = by_epochs(2), by_epochs(3)
    assert extended(longer, known.training, after_step=80, count=count) == longer.training
    (said,) = training_words(longer, first_mixture(known), after_step=80, count=count)
    assert said == "extends the run from 2 to 3 epochs: spec.training.epochs: 2 -> 3"
    for asked, after_step, words in (
        (longer, 90, "the learning rate of step 82 would change"),
        (by_epochs(1), 60, "training.epochs 1 = 50 steps is below step 60"),
    ):
        with pytest.raises(InvalidConfigError, match=words):
            extended(asked, known.training, after_step=after_step, count=count)
    (ignored,) = training_words(longer, first_mixture(known), after_step=80)
    assert "is ignored, the run keeps its end at epoch 2: the number of steps is not known" in ignored


def preferring(steps: int, *schedule: dict[str, Any], scores: str = "Cached") -> TrainingJobSpec:
    objective = {"kind": "Preference", "reference": {"scores": scores}}
    stages = (
        {"name": "a", "steps": 60},
        {"name": "b", "steps": steps - 60, "objective": objective},
    )
    given = spec(steps, stages=stages).model_dump(mode="json", by_alias=True)
    given["data"]["schedule"] = list(schedule)
    return TrainingJobSpec.model_validate_json(json.dumps(given))


def test_the_pairs_of_a_stage_that_has_begun_stay() -> None:
    """They were scored under a model that is gone."""
    known = preferring(100)
    assert extended(preferring(130), known.training, after_step=59).steps == 130, "it has not begun"
    assert "its pairs were scored under the model before step 61" in refused(known, preferring(130), after_step=60)
    skip = {"fromStep": 70, "weights": [{"source": known.data.sources[0].name, "weight": 2}]}
    asked = preferring(100, skip)
    mixture = first_mixture(known)
    assert [change.from_step for change in next_mixture(asked, mixture, after_step=50).changes] == [70]
    assert next_mixture(asked, mixture, after_step=60).changes == ()
    online = preferring(100, scores="Online")
    assert extended(preferring(130, scores="Online"), online.training, after_step=60).steps == 130, "no score is stored"
