"""Objects that a schema refuses, with what must stand in the sentence; the embedded cluster is given the same."""

from typing import Any

from polyreme_api.labels import API_VERSION
from tests.cluster.crd_evaluation_cases import BEST, EARLY, INT4, Case
from tests.unit.api.jobs import DROP, job_with

GPU = "nvidia.com/gpu"
RACK = {"name": "rack", "nodeLabel": "example.com/rack"}
ZONE = {"name": "zone", "nodeLabel": "topology.kubernetes.io/zone"}
XID = {"name": "lost", "action": "Evict", "onXids": [79]}
REBOOT = {"action": "Reboot", "template": "reboot"}
ONE = {"name": "one", "dataset": "sample/one"}
WEIGHTS = [{"source": "one", "weight": 1}]

ROLLBACK = {"spec.health": {"loss": {"action": "Rollback", "windowSteps": 128}}, "spec.training.steps": 1000}
ROLLBACKS: list[Case] = [
    (
        "TrainingJob",
        {**ROLLBACK, "spec.workers": {"runtime": {"mode": "Environment"}}},
        ("health.loss.action Rollback needs checkpoints of the ranks, and workers.runtime.mode Environment has none",),
    ),
    (
        "TrainingJob",
        {**ROLLBACK, "spec.training.steps": 100, "spec.checkpoint": {"everySteps": 100}},
        ("Rollback needs checkpoints, and the first is saved at step 100 of 100; lower checkpoint.everySteps",),
    ),
    (
        "TrainingJob",
        {**ROLLBACK, "spec.checkpoint": {"everySteps": 200}},
        ("health.loss.windowSteps 128 is below checkpoint.everySteps 200", "raise windowSteps or lower everySteps"),
    ),
    (
        "TrainingJob",
        {**ROLLBACK, "spec.checkpoint": {"everySteps": 50, "keep": 2}},
        (
            "health.loss.windowSteps 128 is above the 100 steps that checkpoint.keep 2 x everySteps 50 covers",
            "raise keep or lower windowSteps",
        ),
    ),
    (
        "TrainingJob",
        {**ROLLBACK, "spec.checkpoint": {"maxAgeSeconds": 60}},
        ("could delete the checkpoint that health.loss.action Rollback needs; drop maxAgeSeconds",),
    ),
]
RULED: list[Case] = [
    (
        "TrainingJob",
        {"spec.health": {"loss": {"windowSteps": 64, "updateNormSteps": 9}}},
        ("updateNormSteps 9 is above an eighth of windowSteps 64",),
    ),
    *BEST,
    *EARLY,
    *INT4,
    *ROLLBACKS,
    (
        "TrainingJob",
        {"spec.workers": {"template": {"spec": {"tolerations": [{"key": "polyreme.dev/health"}]}}}},
        ("a job may not tolerate taints of polyreme.dev, this toleration has key polyreme.dev/health; name the key",),
    ),
    (
        "TrainingJob",
        {"spec.workers": {"template": {"spec": {"tolerations": [{"key": "team"}, {"operator": "Exists"}]}}}},
        (
            "spec.workers.template.spec.tolerations",
            "this toleration has no key; name the key of another taint",
        ),
    ),
    ("TrainingJob", {"metadata.name": "a" * 41}, ("metadata.name " + "a" * 41, "DNS label of at most 40 characters")),
    ("TrainingJob", {"metadata.name": "a.b"}, ("metadata.name a.b must be a DNS label", "choose another name")),
    ("TrainingJob", {"spec.model": DROP}, ("spec:", "model is required with workers.runtime.mode Launcher; set it")),
    ("TrainingJob", {"spec.data": DROP}, ("spec:", "data is required with workers.runtime.mode Launcher; set it")),
    ("TrainingJob", {"spec.training": DROP}, ("training is required with workers.runtime.mode Launcher; set it",)),
    ("TrainingJob", {"spec.training.epochs": 2}, ("exactly one of steps and epochs is given, seen both; set steps",)),
    ("TrainingJob", {"spec.training.steps": DROP}, ("exactly one of steps and epochs is given, seen neither; set",)),
    (
        "TrainingJob",
        {"spec.training": {"epochs": 2, "packsPerStep": 1, "stages": [{"name": "one", "steps": 4}]}},
        ("spec.training", "epochs 2 cannot be combined with stages, which begin at fixed steps; give steps instead"),
    ),
    (
        "TrainingJob",
        {"spec.evaluation": {"sets": [{"name": "a", "dataset": "sample/one@3"}]}},
        ("evaluation.sets holds sample/one@3, which data.sources train on", "choose a dataset that is held out"),
    ),
    (
        "TrainingJob",
        {"spec.workers": {"replicas": 2, "minReplicas": 3}},
        ("spec.workers:", "replicas 2 is below minReplicas 3; raise replicas or lower minReplicas"),
    ),
    (
        "TrainingJob",
        {"spec.workers": {"replicas": 3, "maxReplicas": 2}},
        ("spec.workers:", "replicas 3 is above maxReplicas 2; lower replicas or raise maxReplicas"),
    ),
    (
        "TrainingJob",
        {"spec.data.originBudget": {"requestsPerSecond": 79, "bytesPerSecond": 1 << 30}, "spec.workers.replicas": 4},
        (
            "spec:",
            "data.originBudget.requestsPerSecond 79 is too small for 4 pods with 2 processes each, which need 10; give",
            "at least 80",
        ),
    ),
    (
        "TrainingJob",
        {"spec.data.originBudget": {"requestsPerSecond": 80, "bytesPerSecond": 1 << 20}, "spec.workers.maxReplicas": 4},
        ("data.originBudget.bytesPerSecond 1048576 is too small for 4 pods", "give at least 8388608"),
    ),
    (
        "TrainingJob",
        {"spec.topology": {"required": "rack", "preferred": "zone"}},
        ("spec.topology:", "required rack and preferred zone cannot both be set; drop one"),
    ),
    ("TrainingJob", {"spec.topology": {"sliceSize": 2}}, ("spec.topology:", "sliceSize 2 is set alone", "set both or")),
    ("TrainingJob", {"spec.topology": {"sliceLevel": "rack"}}, ("sliceLevel rack is set alone", "set both or none")),
    ("TrainingJob", {"spec.parallelism": {"dp": 2}}, ("spec.parallelism:", "mode Auto chooses", "seen dp 2; use mode")),
    ("TrainingJob", {"spec.parallelism": {"mode": "Explicit", "ep": 2}}, ("mode Explicit needs dp; set dp",)),
    (
        "TrainingJob",
        {"spec.parallelism": {"mode": "Explicit", "dp": 1, "schedule": "DualPipeV"}},
        ("spec.parallelism:", "schedule DualPipeV needs pp of at least 2, seen 1; raise pp or drop schedule"),
    ),
    (
        "TrainingJob",
        {"spec.parallelism": {"mode": "Explicit", "dp": 1, "pp": 4, "schedule": "ZBVZeroBubble", "microbatches": 7}},
        ("schedule ZBVZeroBubble over pp 4 needs at least 8 microbatches, seen 7; raise microbatches to 8 or more",),
    ),
    (
        "TrainingJob",
        {"spec.parallelism": {"mode": "Explicit", "dp": 1, "pp": 2, "schedule": "Interleaved1F1B", "microbatches": 7}},
        ("runs 7 microbatches in 3 equal rounds; set microbatches to 6 or 8",),
    ),
    (
        "TrainingJob",
        {"spec.parallelism": {"mode": "Explicit", "dp": 1, "stageLayers": [1, 2]}},
        ("spec.parallelism:", "stageLayers needs pp of at least 2, seen 1; raise pp or drop stageLayers"),
    ),
    (
        "TrainingJob",
        {"spec.parallelism": {"mode": "Explicit", "dp": 1, "pp": 2, "schedule": "DualPipeV", "stageLayers": [1, 2]}},
        ("schedule DualPipeV over pp 2 has 4 stages, stageLayers has 2 numbers; give one for each stage",),
    ),
    (
        "TrainingJob",
        {"spec.parallelism": {"mode": "Explicit", "dp": 1, "pp": 3, "stageLayers": [2, 0, 1]}},
        ("stageLayers [2, 0, 1] leaves a stage between the first and the last without a layer; give each of them",),
    ),
    (
        "TrainingJob",
        {
            "spec.training.recompute": "Full",
            "spec.parallelism": {"mode": "Explicit", "dp": 1, "pp": 2, "schedule": "DualPipeV"},
        },
        ("training.recompute Full cannot be combined with parallelism.schedule DualPipeV; use recompute: Selective",),
    ),
    (
        "TrainingJob",
        {"spec.training.parameterSharding": "FSDP2", "spec.training.optimizer": {"name": "Muon"}},
        ("spec.training:", "parameterSharding FSDP2 cannot be combined with optimizer.name Muon"),
    ),
    (
        "TrainingJob",
        {"spec.training.parameterSharding": "FSDP2", "spec.training.optimizer": {"stateSharding": "Whole"}},
        ("spec.training:", "optimizer.stateSharding is Whole; leave stateSharding out"),
    ),
    (
        "TrainingJob",
        {
            "spec.training.parameterSharding": "FSDP2",
            "spec.parallelism": {"mode": "Explicit", "dp": 1, "pp": 2},
        },
        ("training.parameterSharding FSDP2 cannot be combined with parallelism.pp 2",),
    ),
    (
        "TrainingJob",
        {"spec.training.capacityFactor": "0.0"},
        ("spec.training:", "capacityFactor 0.0 is outside its range"),
    ),
    *(
        (
            "TrainingJob",
            {"spec.training.steps": 4, "spec.training.stages": [{"name": "a", "steps": 4, "objective": objective}]},
            ("spec.training.stages[0].objective:", said),
        )
        for objective, said in (
            ({"beta": "0.2"}, "only kind Preference has them: use kind: Preference, or leave them out"),
            ({"samples": 4}, "only kind GroupRelative has them: use kind: GroupRelative, or leave them out"),
            ({"kind": "GroupRelative"}, "reward is missing for kind GroupRelative; name a function"),
            (
                {"kind": "GroupRelative", "reward": "a:b", "temperature": "0"},
                "temperature 0 is outside its range: above 0, at most 10",
            ),
            (
                {"kind": "GroupRelative", "reward": "a:b", "correctionLimit": "0.5"},
                "correctionLimit 0.5 is outside its range: at least 1",
            ),
            ({"kind": "Preference", "beta": "0"}, "beta 0 is outside its range: above 0, at most 1000"),
            ({"kind": "Preference", "labelSmoothing": "0.5"}, "labelSmoothing 0.5 is outside its range"),
            (
                {"kind": "Preference", "labelSmoothing": "0.1", "loss": "IPO"},
                "labelSmoothing 0.1 cannot be combined with loss IPO, which has no sigmoid to smooth",
            ),
            (
                {"kind": "Preference", "reference": {"scores": "Online", "name": "mine"}},
                "reference.name mine cannot be combined with scores Online",
            ),
            ({"reference": {"scores": "Online"}}, "only kind Preference has them"),
        )
    ),
    (
        "TrainingJob",
        {
            "spec.training.steps": 4,
            "spec.training.capacityFactor": "1.25",
            "spec.training.stages": [{"name": "a", "steps": 4, "objective": {"kind": "Preference"}}],
        },
        ("spec.training:", "capacityFactor 1.25 cannot be combined with an objective that is not Supervised"),
    ),
    (
        "TrainingJob",
        {
            "spec.evaluation": {
                "sets": [{"name": "a", "dataset": "held/a"}],
                "answerTokensMax": 8,
                "thinkingTokensMax": 8,
            }
        },
        ("spec.evaluation:", "thinkingTokensMax 8 leaves no token of answerTokensMax 8 for the answer"),
    ),
    (
        "TrainingJob",
        {"spec.training.steps": 9, "spec.training.stages": [{"name": "a", "steps": 4}, {"name": "b", "steps": 4}]},
        ("spec.training:", "steps of stages add up to 8, steps is 9; change steps to 8, or those of a stage"),
    ),
    (
        "TrainingJob",
        {"spec.training.steps": 8, "spec.training.stages": [{"name": "a", "steps": 4}] * 2},
        ("spec.training.stages[1]:", "Duplicate value", '"name":"a"'),
    ),
    (
        "TrainingJob",
        {
            "spec.training.steps": 4,
            "spec.training.stages": [{"name": "a", "steps": 4, "weights": [{"source": "one", "weight": 0}]}],
        },
        ("spec.training.stages[0]:", "every weight of stage a is 0; raise one, or leave weights out"),
    ),
    (
        "TrainingJob",
        {"spec.failurePolicy": {"rules": [{"action": "Fail"}]}},
        ("spec.failurePolicy.rules[0]:", "action Fail has neither onExitCodes nor onPodConditions; set exactly one"),
    ),
    (
        "TrainingJob",
        {
            "spec.failurePolicy": {
                "rules": [
                    {
                        "action": "Fail",
                        "onExitCodes": {"operator": "In", "values": [1]},
                        "onPodConditions": [{"type": "A"}],
                    }
                ]
            }
        },
        ("action Fail has both onExitCodes and onPodConditions; set exactly one",),
    ),
    (
        "TrainingJob",
        {"spec.data.sources": [ONE, ONE]},
        ("spec.data:", 'two sources have the same name, seen ["one", "one"]', "rename one"),
    ),
    ("TrainingJob", {"spec.data.sources.0.weight": 0}, ('weight is 0 of every source of ["one"]', "above 0")),
    (
        "TrainingJob",
        {"spec.data.schedule": [{"fromStep": step, "weights": WEIGHTS} for step in (5, 3)]},
        ("spec.data:", "fromStep of schedule must rise, seen [5, 3]; order the changes"),
    ),
    (
        "TrainingJob",
        {"spec.data.schedule": [{"fromStep": 5, "weights": WEIGHTS}] * 2},
        ("spec.data.schedule[1]:", "Duplicate value", '"fromStep":5'),
    ),
    (
        "TrainingJob",
        {"spec.data.schedule": [{"fromStep": 5, "weights": [{"source": "one", "weight": 0}]}]},
        ("spec.data.schedule[0]:", "every weight from step 5 on is 0; raise one"),
    ),
    (
        "TrainingJob",
        {"spec.data.schedule": [{"fromStep": 1, "weights": WEIGHTS, "skipSteps": 3}]},
        ("spec.data.schedule[0]:", "skipSteps 3 at fromStep 1 has no weights before it; drop it, or name a later step"),
    ),
    (
        "TrainingJob",
        {"spec.data.schedule": [{"fromStep": 5, "weights": WEIGHTS, "skipSteps": 10_001}]},
        ("spec.data.schedule[0].skipSteps:", "10000"),
    ),
    (
        "TrainingQueue",
        {"spec.namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "In"}]}},
        ("operator In of team with 0 values: In and NotIn need values", "change operator or values"),
    ),
    ("TrainingQueue", {"metadata.name": "a" * 64}, ("metadata.name " + "a" * 64, "at most 63 characters")),
    ("TrainingQueue", {"spec.parent": "one"}, ("spec.parent one is the queue itself; name another queue",)),
    (
        "TrainingQueue",
        {"spec.parent": "all", "spec.quotas": [{"resource": GPU, "nominal": 1, "lendingLimit": 2}]},
        ("spec.quotas[0]:", f"lendingLimit 2 is above nominal 1 of {GPU}; lower lendingLimit or raise nominal"),
    ),
    (
        "TrainingQueue",
        {"spec.quotas": [{"resource": "cpu", "nominal": 1}, {"resource": GPU, "nominal": 1, "borrowingLimit": 2}]},
        ("spec:", f"quota of {GPU} has a borrowingLimit or a lendingLimit, but parent is empty", "set parent or drop"),
    ),
    (
        "TrainingQueue",
        {"spec.quotas": [{"resource": GPU, "nominal": 1}] * 2},
        ("spec.quotas[1]:", "Duplicate value", GPU),
    ),
    ("ClusterTopology", {"metadata.name": "a.b"}, ("metadata.name a.b must be a DNS label",)),
    (
        "ClusterTopology",
        {"spec.levels": [RACK, {**ZONE, "name": "rack"}]},
        ("spec:", 'two levels have the same name, seen ["rack", "rack"]; names are unique, rename one'),
    ),
    (
        "ClusterTopology",
        {"spec.levels": [{"name": "row", "nodeLabel": "a"}, {"name": "rack", "nodeLabel": "a"}]},
        ("spec:", 'two levels have the same nodeLabel, seen ["a", "a"]; labels are unique, change one'),
    ),
    (
        "ClusterTopology",
        {"spec.levels": [ZONE | {"distance": 1}, RACK | {"distance": 2}]},
        ("spec:", "distance rises towards the hosts, seen [1, 2]; distances fall from top to bottom, change one"),
    ),
    (
        "ClusterTopology",
        {"spec.levels": [ZONE, {**RACK, "name": "host"}]},
        ("spec.levels[1]:", "level host with nodeLabel example.com/rack is the host", "drop it"),
    ),
    (
        "ClusterTopology",
        {"spec.spares": {"level": "rack"}},
        ("spec.spares:", "spares of level rack need nodes or percent", "set one of them"),
    ),
    (
        "ClusterTopology",
        {"spec.spares": {"level": "rack", "nodes": 1, "percent": 10}},
        ("spec.spares:", "spares of level rack need nodes or percent", "set one of them"),
    ),
    (
        "ClusterTopology",
        {"spec.spares": {"level": "block", "nodes": 1}},
        ("spec:", "spares.level block is no level, the levels are", "name one of them"),
    ),
    (
        "ClusterTopology",
        {"spec.levels": [{**RACK, "nodeLabel": "kubernetes.io/hostname"}]},
        ("level rack with nodeLabel kubernetes.io/hostname is the host",),
    ),
    ("NodeFaultPolicy", {"metadata.name": "a.b"}, ("metadata.name a.b must be a DNS label",)),
    (
        "NodeFaultPolicy",
        {"spec.rules": [{**XID, "onXids": []}]},
        ("spec.rules[0]:", "rule lost has neither onXids nor onNodeConditions; set exactly one"),
    ),
    (
        "NodeFaultPolicy",
        {"spec.rules": [{**XID, "onNodeConditions": [{"type": "A"}]}]},
        ("rule lost has both onXids and onNodeConditions; set exactly one",),
    ),
    (
        "NodeFaultPolicy",
        {"spec.rules": [XID, XID]},
        ("spec:", 'two rules have the same name, seen ["lost", "lost"]; names are unique, rename one'),
    ),
    (
        "NodeFaultPolicy",
        {"spec.repairs": {"hooks": [REBOOT, REBOOT]}},
        ("spec.repairs:", 'two hooks have the same action, seen ["Reboot", "Reboot"]; keep one'),
    ),
]

AFFINITY = "requiredDuringSchedulingIgnoredDuringExecution"
TEMPLATES: list[tuple[object, str]] = [
    ("oops", "spec.workers.template"),
    ({"spec": "oops"}, "spec.workers.template.spec"),
    ({"metadata": {"labels": {"a": 1}}}, "spec.workers.template.metadata.labels.a"),
    ({"spec": {"affinity": "spread"}}, "spec.workers.template.spec.affinity"),
    ({"spec": {"tolerations": {"key": "team"}}}, "spec.workers.template.spec.tolerations"),
    ({"spec": {"tolerations": ["team"]}}, "spec.workers.template.spec.tolerations[0]"),
    ({"spec": {"nodeSelector": []}}, "spec.workers.template.spec.nodeSelector"),
    ({"spec": {"initContainers": ["x"]}}, "spec.workers.template.spec.initContainers[0]"),
    ({"spec": {"overhead": "x"}}, "spec.workers.template.spec.overhead"),
    ({"spec": {"containers": [{"resources": {"requests": {"cpu": "1e999999"}}}]}}, "resources.requests.cpu"),
    ({"spec": {"containers": [{"resources": {"requests": {"cpu": 0.5}}}]}}, "resources.requests.cpu"),
    ({"spec": {"containers": [{"ports": [{"containerPort": "http"}]}]}}, "containerPort"),
    ({"spec": {"hostNetwork": "yes"}}, "spec.workers.template.spec.hostNetwork"),
    ({"spec": {"affinity": {"nodeAffinity": {AFFINITY: {"nodeSelectorTerms": "x"}}}}}, "nodeSelectorTerms"),
    ({"spec": {"affinity": {"nodeAffinity": {AFFINITY: {"nodeSelectorTerms": ["x"]}}}}}, "nodeSelectorTerms[0]"),
]
"""Malformed pod templates, and the field that a refusal names."""

BOUNDED: list[Case] = [
    *(("TrainingJob", {"spec.workers": {"template": template}}, (field,)) for template, field in TEMPLATES),
    (
        "TrainingJob",
        {"spec.workers": {"replicas": 15_001}},
        ("spec.workers.replicas", "15001", "less than or equal to"),
    ),
    ("TrainingJob", {"spec.workers": {"replicas": 0}}, ("spec.workers.replicas", "0", "greater than or equal to 1")),
    ("TrainingJob", {"spec.workers": {"devices": 65}}, ("spec.workers.devices", "65", "less than or equal to 64")),
    ("TrainingJob", {"spec.workers": {"runtime": {"mode": "Torchrun"}}}, ("spec.workers.runtime.mode", '"Torchrun"')),
    ("TrainingJob", {"spec.queueName": "A.b"}, ("spec.queueName", '"A.b"', "should match")),
    ("TrainingJob", {"spec.training": {"steps": 4}}, ("spec.training.packsPerStep", "Required value")),
    ("TrainingJob", {"spec.data.sources": []}, ("spec.data.sources", "should have at least 1 items")),
    ("TrainingJob", {"spec.training.optimizer": {"learningRate": "fast"}}, ("learningRate", '"fast"', "should match")),
    ("TrainingJob", {"spec.data.augment": {"rotate": {}}}, ('unknown field "spec.data.augment.rotate"',)),
    (
        "TrainingJob",
        {"spec.data.augment": {"crop": {"minAreaPercent": 101}}},
        ("spec.data.augment.crop.minAreaPercent", "101", "less than or equal to 100"),
    ),
    ("TrainingJob", {"spec.training.optimizer": {"learningRate": 0.1}}, ("learningRate", "must be of type string")),
    ("TrainingJob", {"spec.model.overrides": {"decoder": {"norm_eps": "tiny"}}}, ("norm_eps", "should match")),
    ("TrainingJob", {"spec.model.overrides": {"decoder": {"layers": -1}}}, ("layers", "greater than or equal to 0")),
    (
        "TrainingJob",
        {"spec.model.overrides": {"decoder": {"norm_eps": 0.5}}},
        ("norm_eps", "must be of type integer,string"),
    ),
    ("TrainingJob", {"spec.trainng": {}}, ('unknown field "spec.trainng"',)),
    ("TrainingQueue", {"spec.weight": 0}, ("spec.weight", "0", "greater than or equal to 1")),
    ("TrainingQueue", {"spec.parent": "A"}, ("spec.parent", '"A"', "should match")),
    ("TrainingQueue", {"spec.stopPolicy": "Stop"}, ("spec.stopPolicy", '"Stop"', "HoldAndDrain")),
    ("TrainingQueue", {"spec.quotas": [{"resource": GPU}]}, ("spec.quotas[0].nominal", "Required value")),
    ("TrainingQueue", {"spec.quotas": [{"resource": "a b", "nominal": 1}]}, ("spec.quotas[0].resource", '"a b"')),
    ("TrainingQueue", {"spec.quotas": [{"resource": GPU, "nominal": -1}]}, ("spec.quotas[0].nominal", "-1")),
    (
        "TrainingQueue",
        {"spec.quotas": [{"resource": f"r{at}", "nominal": 1} for at in range(33)]},
        ("spec.quotas", "33", "at most 32 items"),
    ),
    ("TrainingQueue", {"spec.preemption": {"maxPerJob": 1001}}, ("spec.preemption.maxPerJob", "1001")),
    ("TrainingQueue", {"spec.backfill": {"mode": "On"}}, ("spec.backfill.mode", '"On"', "Conservative")),
    ("TrainingQueue", {"spec.quota": {GPU: 1}}, ('unknown field "spec.quota"',)),
    ("ClusterTopology", {"spec.levels": []}, ("spec.levels", "should have at least 1 items")),
    (
        "ClusterTopology",
        {"spec.levels": [{"name": f"l{at}", "nodeLabel": f"l{at}"} for at in range(9)]},
        ("spec.levels", "9", "at most 8 items"),
    ),
    ("ClusterTopology", {"spec.levels": [{"name": "rack"}]}, ("spec.levels[0].nodeLabel", "Required value")),
    ("ClusterTopology", {"spec.levels": [{**RACK, "nodeLabel": "a b"}]}, ("spec.levels[0].nodeLabel", '"a b"')),
    ("ClusterTopology", {"spec.levels": [{**RACK, "distance": 0}]}, ("spec.levels[0].distance", "0")),
    ("NodeFaultPolicy", {"spec.mode": "On"}, ("spec.mode", '"On"', "Enforce")),
    ("NodeFaultPolicy", {"spec.rules": [{**XID, "action": "Reboot"}]}, ("spec.rules[0].action", '"Reboot"')),
    ("NodeFaultPolicy", {"spec.breaker": {"nodesPercent": 101}}, ("spec.breaker.nodesPercent", "101")),
    ("NodeIncident", {"spec.node": ""}, ("spec.node", "should be at least 1 chars long")),
]

BASES: dict[str, dict[str, Any]] = {
    "ClusterTopology": {"levels": [ZONE, RACK]},
    "TrainingQueue": {},
    "NodeFaultPolicy": {},
    "NodeIncident": {"node": "n1", "since": "2026-01-31T12:00:00Z"},
}


def thing(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the smallest object of a kind, with changes by path."""
    if kind == "TrainingJob":
        return job_with(changes)
    base: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": {"name": "one"},
        "spec": dict(BASES[kind]),
    }
    for path, value in changes.items():
        part, _, field = path.partition(".")
        base[part][field] = value
    return base


def case_id(case: Case) -> str:
    return f"{case[0]}: {case[2][-1][:60]}"
