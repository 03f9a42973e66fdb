"""Another account that may patch the Leases of jobs: it forges, replays, and removes what makes a Lease the job's."""

from __future__ import annotations

import base64
import random
from collections import defaultdict, deque
from typing import Any

from polyreme_api import labels
from polyreme_api.exit_codes import ExitCode
from polyreme_api.job.status import replacements_by_index
from polyreme_api.progress import CheckpointRef, Outcome, ProgressRecord, RankExit, RankPhase
from polyreme_api.signed_progress import ProgressSigner
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_simulator.forgery_facts import FORGED_STEP, FORGED_WORDS
from polyreme_simulator.ownership import is_set_apart
from polyreme_simulator.world import World

WRITES = (1, 2, 6)
"""How often one record is written."""
AGAIN_S = 0.7
LISTEN_S = 0.4
HEARD_MAX = 512
"""Records of one job that the forger remembers."""
SEQUENCE_MORE = 1_000


class Forger:
    """Writes on the Leases of jobs what their leaders did not say, or said before.

    Args:
        world: The cluster.
        rng: Every draw.
    """

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world, self._rng = world, rng
        self._heard: dict[str, deque[dict[str, str]]] = defaultdict(lambda: deque(maxlen=HEARD_MAX))
        """Annotations of records that leaders wrote, by UID of the job."""

    def listen(self) -> None:
        """Remember what leaders write, from now on."""
        for lease, job in self._leases():
            said, heard = _said(lease), self._heard[job["metadata"]["uid"]]
            if said and said not in heard and not self._world.facts.rules.forgeries.is_forged(said):
                heard.append(said)
        self._world.after(LISTEN_S, self.listen)

    def forge(self) -> bool:
        """Write on the Lease of a job; False if none has a record yet."""
        leases = [(lease, job) for lease, job in self._leases() if self._heard[job["metadata"]["uid"]]]
        if not leases:
            return False
        lease, job = self._rng.choice(leases)
        how = self._rng.choice((self._unsigned, self._old_signature, self._key_of_another, self._replay, self._replay))
        metadata: dict[str, Any] = {"annotations": how(job)}
        if self._rng.random() < 0.3:
            metadata |= {"ownerReferences": None, "labels": None}
        for number in range(self._rng.choice(WRITES)):
            self._world.after(number * AGAIN_S, lambda: self._write(ObjectRef.of(lease), metadata))
        return True

    def _write(self, ref: ObjectRef, metadata: dict[str, Any]) -> None:
        for lease, job in self._leases():
            if ObjectRef.of(lease) == ref:
                self._world.store.change(ref, {"metadata": metadata})
                self._world.facts.rules.gangs.overwritten(job["metadata"]["uid"])

    def _leases(self) -> list[tuple[Manifest, Manifest]]:
        """Return the Leases of jobs that run, and these jobs."""
        jobs = [record.manifest for record in self._world.store.records(labels.KIND_JOB)]
        found = {}
        for job in jobs:
            metadata = job["metadata"]
            if not is_set_apart(job) and (job.get("status") or {}).get("attempt"):
                name = labels.job_object_name(metadata["name"], metadata["uid"])
                found[metadata["namespace"], name] = job
        leases = [record.manifest for record in self._world.store.records("Lease")]
        keys = [(lease["metadata"]["namespace"], lease["metadata"]["name"]) for lease in leases]
        return [(lease, found[key]) for lease, key in zip(leases, keys, strict=True) if key in found]

    # --------------------------------------------------------------------------------------------------------- records

    def _unsigned(self, job: Manifest) -> dict[str, str | None]:
        text = self._record(job).model_dump_json(by_alias=True)
        return self._noted({labels.ANNOTATION_PROGRESS: text, labels.ANNOTATION_SIGNATURE: ""})

    def _old_signature(self, job: Manifest) -> dict[str, str | None]:
        """Under the signature of something else that the leader said."""
        said = self._rng.choice(self._heard[job["metadata"]["uid"]])
        return self._noted({**said, labels.ANNOTATION_PROGRESS: self._record(job).model_dump_json(by_alias=True)})

    def _key_of_another(self, job: Manifest) -> dict[str, str | None]:
        """With the key that the pods of another job have."""
        uid = job["metadata"]["uid"]
        secrets = [record.manifest for record in self._world.store.records("Secret")]
        keys = [
            base64.b64decode(secret["data"][labels.SECRET_KEY])
            for secret in secrets
            if (secret["metadata"].get("labels") or {}).get(labels.LABEL_JOB_UID) not in {None, uid}
        ]
        key = self._rng.choice(keys) if keys else self._rng.randbytes(32)
        return self._noted(ProgressSigner(key, uid).annotations(self._record(job), at_s=self._world.clock.now_s()))

    def _replay(self, job: Manifest) -> dict[str, str | None]:
        """One that the leader wrote before: the first of the attempt, one of an earlier attempt, or the newest."""
        heard, attempt = self._heard[job["metadata"]["uid"]], job["status"]["attempt"]["number"]
        own = [said for said in heard if said[labels.ANNOTATION_PROGRESS].startswith(f'{{"attempt":{attempt},')]
        return {**self._rng.choice((self._rng.choice(heard), heard[-1], *own[:2]))}

    def _noted(self, annotations: dict[str, str]) -> dict[str, str | None]:
        self._world.facts.rules.forgeries.forged(annotations)
        return {**annotations}

    def _record(self, job: Manifest) -> ProgressRecord:
        """A record of the job's attempt that would end it, if anybody believed it."""
        attempt = job["status"]["attempt"]
        more = self._rng.choice(
            (
                {"phase": RankPhase.DONE, "outcome": Outcome.SUCCEEDED},
                {"outcome": Outcome.FAILED, "message": FORGED_WORDS},
                {"exits": (RankExit(rank=0, code=ExitCode.INTERNAL),), "message": FORGED_WORDS},
                {"leaving": (0,), "outcome": Outcome.STOPPED, "message": FORGED_WORDS},
                {"checkpoint": CheckpointRef(attempt=attempt["number"], step=FORGED_STEP)},
            )
        )
        return ProgressRecord.model_validate(
            {
                "attempt": attempt["number"],
                "replacement": replacements_by_index(attempt["replacements"]).get(0, 0),
                "released": True,
                "joined": attempt["replicas"],
                "step": FORGED_STEP,
                "sequence": self._rng.choice((0, SEQUENCE_MORE)),
                **more,
            }
        )


def _said(lease: Manifest) -> dict[str, str]:
    """Return the annotations of a signed record; empty without one."""
    annotations = lease["metadata"].get("annotations") or {}
    names = (labels.ANNOTATION_PROGRESS, labels.ANNOTATION_SIGNATURE)
    return {name: annotations[name] for name in names} if all(annotations.get(name) for name in names) else {}
