"""The state of a job, in words for a person."""

from __future__ import annotations

import pytest

from polyreme.report.run_report import verdict
from polyreme_api.job import TrainingJob, parse_job


def job(*conditions: tuple[str, str, str, str], suspend: bool = False) -> TrainingJob:
    """A job with conditions: type, status, reason, message."""
    return parse_job(
        {
            "apiVersion": "polyreme.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "a"},
            "spec": {
                "model": {"preset": "kimi-vl-nano"},
                "data": {"sequenceTokens": 160, "sources": [{"name": "one", "dataset": "sample/digits-1"}]},
                "training": {"steps": 2, "packsPerStep": 4},
                "workers": {"replicas": 2, "devices": 2},
                "suspend": suspend,
            },
            "status": {
                "conditions": [
                    {
                        "type": kind,
                        "status": status,
                        "reason": reason,
                        "message": message,
                        "lastTransitionTime": "2026-01-01T00:00:00Z",
                    }
                    for kind, status, reason, message in conditions
                ]
            },
        }
    )


ADMITTED = ("Admitted", "True", "Admitted", "2 workers on 1 node")
READY = ("PodsReady", "True", "Joined", "")
RUNNING = ("Running", "True", "Training", "")
SUSPENDED = ("Suspended", "True", "Suspended", "")


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        ((), ("Starting", "starting up")),
        ((("Queued", "True", "WaitingForCapacity", "4 devices, 2 free"),), ("Waiting", "4 devices, 2 free")),
        ((ADMITTED,), ("Starting", "starting 2 workers on 1 node")),
        ((ADMITTED, READY), ("Starting", "starting the ranks")),
        ((ADMITTED, READY, ("Running", "False", "Starting", "")), ("Starting", "starting the ranks")),
        ((ADMITTED, READY, ("Running", "False", "WaitingForData", "")), ("Starting", "waiting for data")),
        ((ADMITTED, READY, RUNNING), ("Running", "training")),
        ((ADMITTED, RUNNING, ("StragglersFound", "True", "SlowRank", "rank 1")), ("Running", "training; rank 1")),
        ((ADMITTED, RUNNING, ("Restarting", "True", "RankKilled", "rank 1 died")), ("Restarting", "rank 1 died")),
        ((ADMITTED, RUNNING, ("Restarting", "False", "Recovered", "")), ("Running", "training")),
        ((("Succeeded", "True", "Completed", "trained 2 steps"),), ("Succeeded", "trained 2 steps")),
        ((("Failed", "True", "NoProgress", "3 restarts"),), ("Failed", "3 restarts")),
    ],
)
def test_verdict_of_a_job_follows_its_conditions(
    conditions: tuple[tuple[str, str, str, str], ...], said: tuple[str, str]
) -> None:
    assert verdict(job(*conditions)) == said


def test_a_job_that_is_asked_to_stop_says_so_until_it_has() -> None:
    stopping = job(ADMITTED, READY, ("Suspended", "False", "Suspending", ""), suspend=True)
    assert verdict(stopping)[0] == "Stopping"
    word, sentence = verdict(job(SUSPENDED, suspend=True))
    assert word == "Stopped"
    assert sentence == "stopped on request; run polyreme run with the same file to continue"
    assert verdict(job(SUSPENDED, suspend=False)) == ("Starting", "continuing")
