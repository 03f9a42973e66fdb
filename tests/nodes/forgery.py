"""A trainer's container that forges: with its real token it writes on Leases what no leader said, or said before."""

import json
from dataclasses import dataclass

from polyreme_api.labels import ANNOTATION_PROGRESS, ANNOTATION_SIGNATURE
from tests.nodes.cluster import Cluster
from tests.nodes.release import JOBS, SYSTEM, Job, inside

FORGE = """
import json, ssl, time, urllib.error, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
context = ssl.create_default_context(cafile=folder + "/ca.crt")
def ask(path, metadata=None):
    request = urllib.request.Request("https://kubernetes.default.svc/apis/coordination.k8s.io/v1/namespaces" + path)
    request.add_header("Authorization", "Bearer " + open(folder + "/token").read())
    if metadata is not None:
        request.method, request.data = "PATCH", json.dumps({{"metadata": metadata}}).encode()
        request.add_header("Content-Type", "application/merge-patch+json")
    try:
        answer = urllib.request.urlopen(request, context=context)
        return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, {{}}
def said():
    return {{name: ask({own!r})[1]["metadata"]["annotations"][name] for name in {names!r}}}
progress, signature = {names!r}
old = said()
while said()[signature] == old[signature]:
    time.sleep(0.5)
own = []
for fields in {records!r}:
    text = json.dumps({{**json.loads(old[progress]), **fields, "sequence": 10**6}})
    own.append(ask({own!r}, {{"annotations": {{progress: text}}}})[0])
    own.append(ask({own!r}, {{"annotations": {{progress: text, signature: None}}}})[0])
own.append(ask({own!r}, {{"annotations": old}})[0])
own.append(ask({own!r}, {{"ownerReferences": None, "labels": None}})[0])
print(json.dumps([own, [ask(path, {{"annotations": old}})[0] for path in {others!r}]]))
"""
RECORDS = [
    {"phase": "Done", "outcome": "Succeeded", "step": 10**6},
    {"exits": [{"rank": 0, "signal": 9}], "step": 10**6},
    {"outcome": "Failed", "leaving": [0], "message": "forged"},
]
OPERATORS = f"/{SYSTEM}/leases/polyreme-operator"


@dataclass(frozen=True, slots=True)
class Answers:
    """What the API server answered to the forger."""

    own: list[int]
    """On the Lease of its own job."""
    others: list[int]
    """On Leases of others."""


def forge(cluster: Cluster, training: Job) -> Answers:
    """Have the leader's container of a job forge on its Lease, and try others'."""
    leader = training.pods[0]
    others = [OPERATORS, f"/{JOBS}/leases/another"]
    program = FORGE.format(
        own=f"/{JOBS}/leases/{leader['spec']['subdomain']}",
        names=(ANNOTATION_PROGRESS, ANNOTATION_SIGNATURE),
        records=RECORDS,
        others=others,
    )
    return Answers(*json.loads(inside(cluster, leader, program)))
