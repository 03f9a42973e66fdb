"""``why`` says why pods are not ready, and which fields of the template are unknown, beside what names the state."""

import json

from polyreme.plugin import why
from polyreme.plugin.snapshot import snapshot_of
from polyreme_api import labels
from tests.unit.plugin.plugin_scenes import NOW_S, condition, job, runs, waits

REFUSED = "0 of 2 pods run; the API server refuses the job's Service"
UNKNOWN = "spec.workers.template.spec.nodeSelectors is no field of a pod's spec; did you mean nodeSelector?"


def answer(*conditions: dict[str, str], admitted: bool = True) -> why.Answer:
    status = runs("n0", "n1") if admitted else waits("WaitingForNodes", "no room")
    kept = [entry for entry in status["conditions"] if entry["type"] != "Running"]
    found = job("j", status={**status, "conditions": [*kept, *conditions]})
    seen = snapshot_of({labels.KIND_JOB: [found]}, now_s=NOW_S)
    return why.why(seen, seen.jobs[0])


def test_why_says_what_keeps_the_pods_of_an_admitted_job_from_being_ready() -> None:
    not_ready = {**condition("PodsReady", "CreateRefused", REFUSED), "status": "False"}
    assert answer(not_ready).sentence == REFUSED
    waits = answer(not_ready, admitted=False)
    assert REFUSED not in (waits.sentence, *waits.notes)


def test_why_names_unknown_fields_of_the_template() -> None:
    unknown = condition("TemplateFieldsUnknown", "UnknownFields", UNKNOWN)
    for admitted in (True, False):
        said = answer(unknown, admitted=admitted)
        assert said.notes == (UNKNOWN,)
        assert UNKNOWN in json.dumps(said.to_object())


def test_why_names_slow_ranks_and_ranks_that_are_not_seen() -> None:
    slow = condition("StragglersFound", "SlowRank", "rank 1 on worker 1 on node n1 has computed 1.3 times as long")
    unseen = condition("HangDetectionOff", "RanksUnseen", "1 of 2 ranks are seen")
    assert answer(slow, unseen).notes == (slow["message"], unseen["message"])
