"""Rules across fields, in the Common Expression Language, as the types' validators check them, and lists that are maps.

The words of a rule name the field, the value and the fix. Values stand in braces, as CEL: the API server puts them in.
"""

from __future__ import annotations

from collections.abc import Mapping

from polyreme_api.crd.rollback_rules import ROLLBACK_RULES
from polyreme_api.crd.rule import Rule
from polyreme_api.crd.training_rules import TRAINING_RULES
from polyreme_api.job.data import BUDGET_BYTES_MIN, BUDGET_REQUESTS_MIN
from polyreme_api.job.spec import LAUNCHER_PARTS
from polyreme_api.labels import GROUP
from polyreme_api.metadata import CLUSTER_NAME_CHARACTERS_MAX, DNS_LABEL, JOB_NAME_CHARACTERS_MAX
from polyreme_api.topology import HOST_LABEL, HOST_NAME


def _first_given(names: tuple[str, ...], otherwise: str) -> str:
    """Write the name and value of the first field that is set."""
    for name in reversed(names):
        otherwise = f"has(self.{name}) ? '{name} %s'.format([self.{name}]) : ({otherwise})"
    return otherwise


def _first_missing(names: tuple[str, ...]) -> str:
    """Write the name of the first field that is not set; of the last, when all others are."""
    missing = f"'{names[-1]}'"
    for name in reversed(names[:-1]):
        missing = f"!has(self.{name}) ? '{name}' : {missing}"
    return missing


_KEEPS_BEST = "has(self.checkpoint) && has(self.checkpoint.keepBest) && self.checkpoint.keepBest > 0"
_STOPS_EARLY = (
    "has(self.evaluation) && has(self.evaluation.earlyStop) && has(self.training) && has(self.training.stages)"
)
_ANSWERS_IN_INT4 = "has(self.evaluation) && self.evaluation.weights == 'Int4'"
_DRAWS_IN_INT4 = (
    "has(self.training.stages) && self.training.stages.exists(s, has(s.objective) && has(s.objective.generation) && "
    "s.objective.generation.weights == 'Int4')"
)
_LEARNS_OTHER = "has(s.objective) && s.objective.kind != 'Supervised'"
_DEGREES = ("dp", "ep", "pp", "cp", "tp", "schedule", "microbatches", "stageLayers")
_PIPED = "has(self.pp) && self.pp > 1"
_SCHEDULE = "(has(self.schedule) ? self.schedule : '1F1B')"
_LEAST = "(has(self.schedule) && (self.schedule == 'ZBVZeroBubble' || self.schedule == 'DualPipeV') ? 2 : 1) * self.pp"
_STAGES = "(has(self.schedule) && self.schedule != '1F1B' ? 2 : 1) * self.pp"
_MORE_STAGES = (
    "has(self.schedule) && self.schedule == 'Interleaved1F1B' && size(self.stageLayers) > self.pp && "
    "size(self.stageLayers) % self.pp == 0"
)
_ENDS_WITHOUT = "(self.stageLayers[0] == 0 ? 1 : 0) + (self.stageLayers[size(self.stageLayers) - 1] == 0 ? 1 : 0)"
_ROUNDS = "(self.microbatches / self.pp)"
_IN_ROUNDS = (
    "has(self.microbatches) && has(self.schedule) && self.schedule == 'Interleaved1F1B' && "
    f"{_PIPED} && self.microbatches >= self.pp"
)
_LAUNCHER_GIVEN = " && ".join(f"has(self.{part})" for part in LAUNCHER_PARTS)
_DEGREES_GIVEN = " || ".join(f"has(self.{degree})" for degree in _DEGREES)
_TRAINED_ON = "self.data.sources.exists(s, s.dataset.split('@', 2)[0] == e.dataset.split('@', 2)[0])"
_CONDITIONS_GIVEN = "has(self.onPodConditions) && size(self.onPodConditions) > 0"
_XIDS_GIVEN = "(has(self.onXids) && size(self.onXids) > 0)"
_NODE_CONDITIONS_GIVEN = "(has(self.onNodeConditions) && size(self.onNodeConditions) > 0)"
_PODS = (
    "(has(self.workers.maxReplicas) && self.workers.maxReplicas > self.workers.replicas ? self.workers.maxReplicas : "
    "self.workers.replicas)"
)
_LIMITED = "has(q.borrowingLimit) || has(q.lendingLimit)"


def _budget_suffices(name: str, least: int) -> Rule:
    """Return the rule that a part of the budget at the bucket suffices for the most pods that the job may have."""
    given, needed = f"self.data.originBudget.{name}", f"{least} * {_PODS} * (1 + self.workers.devices)"
    return Rule(
        rule=f"!has(self.data) || !has(self.data.originBudget) || {given} >= {needed}",
        words=f"data.originBudget.{name} {{{given}}} is too small for {{{_PODS}}} pods with "
        f"{{1 + self.workers.devices}} processes each, which need {least}; give at least {{{needed}}}",
        plain=f"data.originBudget.{name} is too small; give at least {least} for each device and each pod",
        of_optional=True,
    )


_RULES: Mapping[str, tuple[Rule, ...]] = {
    "TrainingJobSpec": (
        Rule(
            rule=f"self.workers.runtime.mode == 'Environment' || ({_LAUNCHER_GIVEN})",
            words=f"{{{_first_missing(LAUNCHER_PARTS)}}} is required with workers.runtime.mode "
            "{self.workers.runtime.mode}; set it, or use mode: Environment for a container that brings its own "
            "training",
            plain=f"{', '.join(LAUNCHER_PARTS[:-1])} and {LAUNCHER_PARTS[-1]} are required unless "
            "workers.runtime.mode is Environment; set them, or use mode: Environment for a container that brings its "
            "own training",
        ),
        Rule(
            rule=f"!has(self.evaluation) || !has(self.data) || self.evaluation.sets.all(e, !({_TRAINED_ON}))",
            words=f"evaluation.sets holds {{self.evaluation.sets.filter(e, {_TRAINED_ON})[0].dataset}}, "
            "which data.sources train on; choose a dataset that is held out",
            plain="a dataset of evaluation.sets is one of data.sources; choose a dataset that is held out",
            of_optional=True,
        ),
        Rule(
            rule="!has(self.training) || self.training.recompute != 'Full' || !has(self.parallelism.schedule) || "
            "!(self.parallelism.schedule in ['ZBVZeroBubble', 'DualPipeV'])",
            words="training.recompute Full cannot be combined with parallelism.schedule {self.parallelism.schedule}; "
            "use recompute: Selective, or schedule 1F1B or Interleaved1F1B",
            plain="training.recompute Full cannot be combined with the schedules ZBVZeroBubble and DualPipeV; "
            "use recompute: Selective, or schedule 1F1B or Interleaved1F1B",
            of_optional=True,
        ),
        Rule(
            rule="!has(self.training) || self.training.parameterSharding == 'None' || !has(self.parallelism.pp) || "
            "self.parallelism.pp == 1",
            words="training.parameterSharding {self.training.parameterSharding} cannot be combined with parallelism.pp "
            "{self.parallelism.pp}: a pipeline keeps gathered parameters until its last microbatch; use pp: 1 and a "
            "higher ep or tp, or parameterSharding: None with optimizer.stateSharding: Sharded",
            plain="training.parameterSharding FSDP2 cannot be combined with parallelism.pp above 1; use pp: 1 and a "
            "higher ep or tp, or parameterSharding: None with optimizer.stateSharding: Sharded",
            of_optional=True,
        ),
        _budget_suffices("requestsPerSecond", BUDGET_REQUESTS_MIN),
        _budget_suffices("bytesPerSecond", BUDGET_BYTES_MIN),
        *ROLLBACK_RULES,
        *(
            Rule(
                rule=f"!has(self.training) || self.training.parameterSharding == 'None' || !({uses})",
                words=f"{field} Int4 cannot be combined with training.parameterSharding "
                "{self.training.parameterSharding}, with which no rank holds whole matrices; use weights: Auto, or "
                "parameterSharding: None",
                plain=f"{field} Int4 cannot be combined with training.parameterSharding; use weights: Auto, or "
                "parameterSharding: None",
                of_optional=True,
            )
            for field, uses in (
                ("evaluation.weights", _ANSWERS_IN_INT4),
                ("objective.generation.weights", _DRAWS_IN_INT4),
            )
        ),
        Rule(
            rule=f"!({_STOPS_EARLY}) || size(self.training.stages) < 2",
            words="evaluation.earlyStop ends the whole run, not one of its {size(self.training.stages)} "
            "training.stages; leave earlyStop out, or train the stages as jobs of their own with startFrom",
            plain="evaluation.earlyStop ends the whole run, not one of its training.stages; leave earlyStop out, or "
            "train the stages as jobs of their own with startFrom",
            of_optional=True,
        ),
        Rule(
            rule=f"!({_STOPS_EARLY}) || self.training.stages.all(s, !({_LEARNS_OTHER}))",
            words="evaluation.earlyStop judges the loss of expected answers, which objective "
            f"{{self.training.stages.filter(s, {_LEARNS_OTHER})[0].objective.kind}} of training.stages does not lower; "
            "leave one of the two out",
            plain="evaluation.earlyStop judges the loss of expected answers, which other objectives than Supervised "
            "do not lower; leave one of the two out",
            of_optional=True,
        ),
        Rule(
            rule=f"!({_KEEPS_BEST}) || (has(self.evaluation) && self.evaluation.everySteps > 0 && "
            "self.checkpoint.everySteps % self.evaluation.everySteps == 0)",
            words="checkpoint.keepBest needs the held-out loss at each checkpoint; make evaluation.everySteps a "
            "divisor of checkpoint.everySteps {self.checkpoint.everySteps}",
            plain="checkpoint.keepBest needs the held-out loss at each checkpoint; make evaluation.everySteps a "
            "divisor of checkpoint.everySteps",
            of_optional=True,
        ),
    ),
    "LossSpike": (
        Rule(
            rule="self.updateNormSteps * 8 <= self.windowSteps",
            words="updateNormSteps {self.updateNormSteps} is above an eighth of windowSteps {self.windowSteps}: too "
            "few updates to compare with; lower updateNormSteps or raise windowSteps",
        ),
    ),
    "Workers": (
        Rule(
            rule="!has(self.minReplicas) || self.minReplicas <= self.replicas",
            words="replicas {self.replicas} is below minReplicas {self.minReplicas}; "
            "raise replicas or lower minReplicas",
            of_optional=True,
        ),
        Rule(
            rule="!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
            words="replicas {self.replicas} is above maxReplicas {self.maxReplicas}; "
            "lower replicas or raise maxReplicas",
            of_optional=True,
        ),
    ),
    "Topology": (
        Rule(
            rule="!has(self.required) || !has(self.preferred)",
            words="required {self.required} and preferred {self.preferred} cannot both be set; drop one",
            of_optional=True,
        ),
        Rule(
            rule="has(self.sliceSize) == has(self.sliceLevel)",
            words=f"{{{_first_given(('sliceSize', 'sliceLevel'), repr(''))}}} is set alone: "
            "sliceSize and sliceLevel must be set together; set both or none",
            plain="sliceSize and sliceLevel must be set together; set both or none",
            of_optional=True,
        ),
    ),
    "Parallelism": (
        Rule(
            rule=f"self.mode != 'Auto' || !({_DEGREES_GIVEN})",
            words=f"mode {{self.mode}} chooses the degrees itself, seen {{{_first_given(_DEGREES, repr(''))}}}; "
            f"use mode: Explicit or drop {', '.join(_DEGREES)}",
            plain=f"mode Auto chooses the degrees itself; use mode: Explicit or drop {', '.join(_DEGREES)}",
            of_optional=True,
        ),
        Rule(
            rule="self.mode != 'Explicit' || has(self.dp)",
            words="mode {self.mode} needs dp; set dp, the other degrees default to 1",
            plain="mode Explicit needs dp; set dp, the other degrees default to 1",
        ),
        Rule(
            rule=f"!has(self.schedule) || ({_PIPED})",
            words="schedule {self.schedule} needs pp of at least 2, seen {has(self.pp) ? self.pp : 1}; "
            "raise pp or drop schedule",
            plain="a schedule needs pp of at least 2; raise pp or drop schedule",
            of_optional=True,
        ),
        Rule(
            rule=f"!has(self.microbatches) || !({_PIPED}) || self.microbatches >= {_LEAST}",
            words=f"schedule {{{_SCHEDULE}}} over pp {{self.pp}} needs at least {{{_LEAST}}} microbatches, "
            f"seen {{self.microbatches}}; raise microbatches to {{{_LEAST}}} or more",
            plain="1F1B and Interleaved1F1B need at least pp microbatches, ZBVZeroBubble and DualPipeV 2 x pp; "
            "raise microbatches",
            of_optional=True,
        ),
        Rule(
            rule=f"!({_IN_ROUNDS}) || self.microbatches % {_ROUNDS} == 0",
            words="schedule Interleaved1F1B over pp {self.pp} runs {self.microbatches} microbatches in "
            f"{{{_ROUNDS}}} equal rounds; set microbatches to {{self.microbatches - self.microbatches % {_ROUNDS}}} or "
            "{self.microbatches - self.microbatches % self.pp + self.pp}",
            plain="Interleaved1F1B runs microbatches in microbatches / pp equal rounds; "
            "set microbatches to a multiple of pp",
            of_optional=True,
        ),
        Rule(
            rule=f"!has(self.stageLayers) || ({_PIPED})",
            words="stageLayers needs pp of at least 2, seen {has(self.pp) ? self.pp : 1}; raise pp or drop stageLayers",
            plain="stageLayers needs pp of at least 2; raise pp or drop stageLayers",
            of_optional=True,
        ),
        Rule(
            rule=f"!has(self.stageLayers) || !({_PIPED}) || size(self.stageLayers) == {_STAGES} || ({_MORE_STAGES})",
            words=f"schedule {{{_SCHEDULE}}} over pp {{self.pp}} has {{{_STAGES}}} stages, stageLayers has "
            "{size(self.stageLayers)} numbers; give one for each stage",
            plain="1F1B has pp stages, the other schedules 2 x pp, Interleaved1F1B any larger multiple too; give "
            "stageLayers one number for each stage",
            of_optional=True,
        ),
        Rule(
            rule=f"!has(self.stageLayers) || size(self.stageLayers.filter(l, l == 0)) <= {_ENDS_WITHOUT}",
            words="stageLayers {self.stageLayers} leaves a stage between the first and the last without a layer; "
            "give each of them at least 1",
            plain="stageLayers leaves a stage between the first and the last without a layer; "
            "give each of them at least 1",
            of_optional=True,
        ),
    ),
    "FailureRule": (
        Rule(
            rule=f"has(self.onExitCodes) != ({_CONDITIONS_GIVEN})",
            words="a rule with action {self.action} has "
            "{has(self.onExitCodes) ? 'both onExitCodes and' : 'neither onExitCodes nor'} onPodConditions; "
            "set exactly one",
            plain="a rule has either onExitCodes or onPodConditions; set exactly one",
        ),
    ),
    "Data": (
        Rule(
            rule="self.sources.all(a, self.sources.exists_one(b, b.name == a.name))",
            words="two sources have the same name, seen {self.sources.map(s, s.name)}; names are unique, rename one",
            plain="two sources have the same name; names are unique, rename one",
        ),
        Rule(
            rule="self.sources.exists(s, s.weight > 0)"
            " || (has(self.schedule) && size(self.schedule) > 0 && self.schedule[0].fromStep == 1)",
            words="weight is 0 of every source of {self.sources.map(s, s.name)}; give one source a weight above 0",
            plain="every weight of sources is 0; give one source a weight above 0",
        ),
        Rule(
            rule="!has(self.schedule) || self.schedule.map(c, c.fromStep).isSorted()",
            words="fromStep of schedule must rise, seen {self.schedule.map(c, c.fromStep)}; order the changes",
            plain="fromStep of schedule must rise; order the changes",
        ),
    ),
    "MixtureChange": (
        Rule(
            rule="self.weights.exists(w, w.weight > 0)",
            words="every weight from step {self.fromStep} on is 0; raise one",
            plain="every weight of a change is 0; raise one",
        ),
        Rule(
            rule="!has(self.skipSteps) || self.skipSteps == 0 || self.fromStep > 1",
            words="skipSteps {self.skipSteps} at fromStep 1 has no weights before it; drop it, or name a later step",
            plain="skipSteps at fromStep 1 has no weights before it; drop it, or name a later step",
        ),
    ),
    "QueueQuota": (
        Rule(
            rule="!has(self.lendingLimit) || self.lendingLimit <= self.nominal",
            words="lendingLimit {self.lendingLimit} is above nominal {self.nominal} of {self.resource}; "
            "lower lendingLimit or raise nominal",
            plain="lendingLimit is above nominal; lower lendingLimit or raise nominal",
        ),
    ),
    "TrainingQueueSpec": (
        Rule(
            rule=f"self.parent != '' || !has(self.quotas) || !self.quotas.exists(q, {_LIMITED})",
            words=f"quota of {{self.quotas.filter(q, {_LIMITED})[0].resource}} has a borrowingLimit or a lendingLimit, "
            "but parent is empty: a root has no cohort to borrow from or lend to; set parent or drop the limit",
            plain="a quota has a borrowingLimit or a lendingLimit, but parent is empty: a root has no cohort to borrow "
            "from or lend to; set parent or drop the limit",
        ),
    ),
    "LabelRequirement": (
        Rule(
            rule="(has(self.values) && size(self.values) > 0) == (self.operator in ['In', 'NotIn'])",
            words="operator {self.operator} of {self.key} with "
            "{has(self.values) ? size(self.values) : 0} values: In and NotIn need values, Exists and DoesNotExist "
            "have none; change operator or values",
            plain="In and NotIn need values, Exists and DoesNotExist have none; change operator or values",
        ),
    ),
    "TopologyLevel": (
        Rule(
            rule=f"self.name != '{HOST_NAME}' && self.nodeLabel != '{HOST_LABEL}'",
            words="level {self.name} with nodeLabel {self.nodeLabel} is the host, "
            "which is always below the last level; drop it",
            plain="the host is always below the last level; drop the level of the host",
        ),
    ),
    "Spares": (
        Rule(
            rule="has(self.nodes) != has(self.percent)",
            words="spares of level {self.level} need nodes or percent, and not both; set one of them",
            plain="spares need nodes or percent, and not both; set one of them",
        ),
    ),
    "ClusterTopologySpec": (
        Rule(
            rule="self.levels.all(a, self.levels.exists_one(b, b.name == a.name))",
            words="two levels have the same name, seen {self.levels.map(l, l.name)}; names are unique, rename one",
            plain="two levels have the same name; names are unique, rename one",
        ),
        Rule(
            rule="self.levels.all(a, self.levels.exists_one(b, b.nodeLabel == a.nodeLabel))",
            words="two levels have the same nodeLabel, seen {self.levels.map(l, l.nodeLabel)}; "
            "labels are unique, change one",
            plain="two levels have the same nodeLabel; labels are unique, change one",
        ),
        Rule(
            rule="self.levels.filter(l, has(l.distance)).map(l, -l.distance).isSorted()",
            words="distance rises towards the hosts, seen "
            "{self.levels.filter(l, has(l.distance)).map(l, l.distance)}; "
            "distances fall from top to bottom, change one",
            plain="distances fall from top to bottom; change the one that rises",
        ),
        Rule(
            rule="!has(self.spares) || self.levels.exists(l, l.name == self.spares.level)",
            words="spares.level {self.spares.level} is no level, the levels are {self.levels.map(l, l.name)}; "
            "name one of them",
            plain="spares.level is none of the levels; name one of them",
        ),
    ),
    "FaultRule": (
        Rule(
            rule=f"{_XIDS_GIVEN} != {_NODE_CONDITIONS_GIVEN}",
            words=f"rule {{self.name}} has {{{_XIDS_GIVEN} ? 'both onXids and' : 'neither onXids nor'}} "
            "onNodeConditions; set exactly one",
            plain="a rule has either onXids or onNodeConditions; set exactly one",
        ),
    ),
    "Repairs": (
        Rule(
            rule="!has(self.hooks) || self.hooks.all(a, self.hooks.exists_one(b, b.action == a.action))",
            words="two hooks have the same action, seen {self.hooks.map(h, h.action)}; keep one",
            plain="two hooks have the same action; keep one",
        ),
    ),
    "NodeFaultPolicySpec": (
        Rule(
            rule="!has(self.rules) || self.rules.all(a, self.rules.exists_one(b, b.name == a.name))",
            words="two rules have the same name, seen {self.rules.map(r, r.name)}; names are unique, rename one",
            plain="two rules have the same name; names are unique, rename one",
        ),
    ),
}
RULES: Mapping[str, tuple[Rule, ...]] = {
    name: (*TRAINING_RULES.get(name, ()), *_RULES.get(name, ())) for name in (*TRAINING_RULES, *_RULES)
}
"""Rules by the pydantic type whose validators say the same. That changes of the mixture and stages weigh known sources
is what no rule says: over 1,024 changes, the server's budget does not allow it, and the operator refuses the job."""


TEMPLATE_RULES: Mapping[str, tuple[Rule, ...]] = {
    "Toleration": (
        Rule(
            rule=f"has(self.key) && self.key != '' && !self.key.startsWith('{GROUP}/')",
            words=f"a job may not tolerate taints of {GROUP}, this toleration has "
            "{has(self.key) ? 'key %s'.format([self.key]) : 'no key'}; "
            "name the key of another taint, or drop the toleration",
            plain=f"a job may not tolerate taints of {GROUP}, and a toleration without a key tolerates all; "
            "name the key of another taint, or drop the toleration",
        ),
    ),
}
"""Rules by Kubernetes' type in a pod template. They hold for new jobs: the server ignores them for unchanged values."""


def _name_rule(characters_max: int, why: str) -> Rule:
    return Rule(
        rule=f"self.metadata.name.size() <= {characters_max} && self.metadata.name.matches('{DNS_LABEL}')",
        words=f"metadata.name {{self.metadata.name}} must be a DNS label of at most {characters_max} characters, "
        f"{why}; choose another name",
    )


_CLUSTER_NAME = _name_rule(CLUSTER_NAME_CHARACTERS_MAX, "labels hold it")

UNTIL_ADMITTED = ("queueName", "priorityClassName", "priority")
"""Fields of a job's spec that may change until it is admitted, and again once it has given up its place."""
_ADMITTED = (
    "has(oldSelf.status) && has(oldSelf.status.conditions) && "
    "oldSelf.status.conditions.exists(c, c.type == 'Admitted' && c.status == 'True')"
)
_WAITS_DIFFERENTLY = Rule(
    # Equality comes first: the server runs this at every write of a status, too.
    rule=" && ".join(f"self.spec.{name} == oldSelf.spec.{name}" for name in UNTIL_ADMITTED) + f" || !({_ADMITTED})",
    words="spec.queueName {oldSelf.spec.queueName}, spec.priorityClassName {oldSelf.spec.priorityClassName} and "
    "spec.priority {oldSelf.spec.priority} may not change while the job is admitted; set spec.suspend, change them "
    "when it is suspended, and resume it",
    plain="spec.queueName, spec.priorityClassName and spec.priority may not change while the job is admitted; set "
    "spec.suspend, change them when it is suspended, and resume it",
)

_FINISHED = Rule(
    rule="!has(self.spec.training) || !has(self.spec.training.steps) || self.spec.training.steps == "
    "oldSelf.spec.training.steps || !has(oldSelf.status) || !has(oldSelf.status.completedAt)",
    words="spec.training.steps may not change from {oldSelf.spec.training.steps} in a job that has finished; create a "
    "job with spec.startFrom",
    plain="spec.training.steps may not change in a job that has finished; create a job with spec.startFrom",
)

OBJECT_RULES: Mapping[str, tuple[Rule, ...]] = {
    "TrainingJob": (_name_rule(JOB_NAME_CHARACTERS_MAX, "pods are named after it"), _WAITS_DIFFERENTLY, _FINISHED),
    "TrainingQueue": (
        _CLUSTER_NAME,
        Rule(
            rule="self.spec.parent != self.metadata.name",
            words="spec.parent {self.spec.parent} is the queue itself; name another queue or leave it empty",
        ),
    ),
    "ClusterTopology": (_CLUSTER_NAME,),
    "NodeFaultPolicy": (_CLUSTER_NAME,),
    "NodeIncident": (_CLUSTER_NAME,),
}
"""Rules of whole objects, by kind: only they see the name."""

LIST_KEYS: Mapping[tuple[str, str], str] = {
    ("Data", "schedule"): "fromStep",
    ("MixtureChange", "weights"): "source",
    ("Training", "stages"): "name",
    ("Stage", "weights"): "source",
    ("Evaluation", "sets"): "name",
    ("TrainingQueueSpec", "quotas"): "resource",
    ("TrainingJobStatus", "conditions"): "type",
    ("TrainingQueueStatus", "conditions"): "type",
    ("ClusterTopologyStatus", "conditions"): "type",
    ("NodeFaultPolicyStatus", "conditions"): "type",
    ("NodeFaultPolicyStatus", "faults"): "faultClass",
    ("NodeIncidentStatus", "jobs"): "uid",
    ("TrainingQueueStatus", "usage"): "resource",
    ("TrainingQueueStatus", "decayed"): "resource",
    ("ClusterTopologyStatus", "domains"): "level",
}
"""Lists that are maps, by the field that is their key: no two entries share it, and appliers merge them."""

ATOMIC = frozenset(
    {"TrainingJobStatus", "TrainingQueueStatus", "ClusterTopologyStatus", "NodeFaultPolicyStatus", "NodeIncidentStatus"}
)
"""Types that one writer writes: the API server keeps their owner once, not by field. Half of a job was such entries."""

UNFILLED = frozenset({"topology", "checkpoint", "failurePolicy", "health"})
"""Parts of a job's spec that the API server does not fill with defaults unless the user begins them: who reads a job
fills them, and every write of a status would carry them along, with an entry of ownership for each field."""
