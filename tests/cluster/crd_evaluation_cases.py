"""Jobs that a schema refuses for what they ask of their held-out losses, with what must stand in the sentence."""

from typing import Any

Case = tuple[str, dict[str, Any], tuple[str, ...]]

BEST: list[Case] = [
    (
        "TrainingJob",
        {"spec.checkpoint": {"keepBest": 1}},
        ("checkpoint.keepBest needs the held-out loss at each checkpoint",),
    ),
    (
        "TrainingJob",
        {
            "spec.checkpoint": {"keepBest": 1, "everySteps": 50},
            "spec.evaluation": {"everySteps": 20, "sets": [{"name": "a", "dataset": "x/held-out"}]},
        },
        ("make evaluation.everySteps a divisor of",),
    ),
]
MEASURED = {"sets": [{"name": "a", "dataset": "x/held-out"}], "everySteps": 20}
STAGE = {"name": "one", "steps": 50}
EARLY: list[Case] = [
    (
        "TrainingJob",
        {"spec.evaluation": {**MEASURED, "everySteps": 0, "earlyStop": {}}},
        ("earlyStop needs the held-out loss during training, everySteps is 0; give the steps",),
    ),
    (
        "TrainingJob",
        {
            "spec.evaluation": {**MEASURED, "earlyStop": {}},
            "spec.training.steps": 100,
            "spec.training.stages": [STAGE, {**STAGE, "name": "two"}],
        },
        ("evaluation.earlyStop ends the whole run, not one of its 2 training.stages; leave earlyStop out",),
    ),
    (
        "TrainingJob",
        {
            "spec.evaluation": {**MEASURED, "earlyStop": {}},
            "spec.training.steps": 50,
            "spec.training.stages": [{**STAGE, "objective": {"kind": "Preference"}}],
        },
        ("judges the loss of expected answers, which objective Preference of training.stages does not lower",),
    ),
]
DRAWN = {"kind": "GroupRelative", "reward": "a:b", "generation": {"weights": "Int4"}}
INT4: list[Case] = [
    (
        "TrainingJob",
        {"spec.evaluation": {**MEASURED, "weights": "Int4"}, "spec.training.parameterSharding": "FSDP2"},
        ("evaluation.weights Int4 cannot be combined with training.parameterSharding FSDP2",),
    ),
    (
        "TrainingJob",
        {
            "spec.training.steps": 50,
            "spec.training.stages": [{**STAGE, "objective": DRAWN}],
            "spec.training.parameterSharding": "FSDP2",
        },
        ("objective.generation.weights Int4 cannot be combined with training.parameterSharding FSDP2",),
    ),
]
