"""The pages of our kinds' fields, written from their CRDs: what a user looks up."""

from collections.abc import Iterator, Mapping
from typing import Any

from polyreme_api.crd.pod_template import KEEPS_UNKNOWN
from polyreme_api.fields import PATTERN_WORDS

Schema = Mapping[str, Any]

HEAD = """\
# {kind}

`apiVersion: polyreme.dev/v1alpha1`, `kind: {kind}`. {scope}
This page is generated from the types in `api/polyreme_api`; `kubectl explain {singular}.spec` says the same.
"""
SCOPES = {
    "Namespaced": "Belongs to a namespace. The same YAML goes to `kubectl apply` and to `polyreme run`.",
    "Cluster": "Belongs to the cluster, not to a namespace. `polyreme validate` checks the YAML without one.",
}
PREFACES = {
    "TrainingJob": """\
Numbers with a fraction are written as text (`"2e-3"`): Kubernetes APIs carry no floats. While a job exists only
`spec.workers.replicas`, `spec.data.onDamage` and `spec.suspend` may change, `spec.queueName`,
`spec.priorityClassName` and `spec.priority` while the job is not admitted, and `spec.data.schedule` may get more
entries. If `spec.topology`, `spec.checkpoint`, `spec.failurePolicy` or `spec.health` is left out, it is not written
into the object, but the defaults on this page still apply.
""",
    "TrainingQueue": """\
Queues with the same `parent` form a cohort: unused quota of one queue is lent to the others, and reclaimed when the
queue needs it. A job waits in the queue that `spec.queueName` names. While there is no queue `default`, jobs of that
queue are unlimited; a job of any other queue that does not exist waits with reason `QueueMissing`. Every field may
change at any time; jobs of a deleted queue keep waiting.

```yaml
apiVersion: polyreme.dev/v1alpha1
kind: TrainingQueue
metadata: {name: research}
spec:
  parent: company
  quotas:
    - {resource: nvidia.com/gpu, nominal: 512, borrowingLimit: 256}
```
""",
    "ClusterTopology": """\
Names the node labels from the widest domain of the network to the narrowest; the host is always below the last one. The
topology named `default` is used; without it all nodes are equally far apart. Jobs ask for a level by its name:
`spec.topology.required: rack`.

```yaml
apiVersion: polyreme.dev/v1alpha1
kind: ClusterTopology
metadata: {name: default}
spec:
  levels:
    - {name: zone, nodeLabel: topology.kubernetes.io/zone}
    - {name: block, nodeLabel: example.com/block}
    - {name: rack, nodeLabel: example.com/rack}
```

Labels nest if all nodes with the same value at a level are in one domain of the level above. If they do not nest, or if
nodes lack a label, the condition `Ready` names the nodes and the label; running jobs are not affected.
""",
    "NodeFaultPolicy": """\
Which nodes with a fault are taken out of service, and how many at once. Begin with `mode: Observe`, read in the
status what it would do, then enable one fault class after another:

```yaml
apiVersion: polyreme.dev/v1alpha1
kind: NodeFaultPolicy
metadata: {name: gpus}
spec:
  mode: Enforce
  classes: [gpu-lost]
  nodeSelector: {example.com/pool: training}
```

A node that is taken out gets the taint `polyreme.dev/health=<class>:NoSchedule`, the label
`polyreme.dev/health=<state>` and an annotation of that name with owner, reason, evidence and next examination. Removing
the taint by hand is a release: the same evidence does not take the node out again. Two policies that select the same
node are both refused for that node.
""",
    "NodeIncident": """\
Written by the operator, one for each time that a node was out of service: the fault and its evidence, each step with
its reason, the jobs concerned and the device-seconds that they lost. Read them by `kubectl polyreme incidents` and
`kubectl polyreme incident NAME`. At most 50 of a node and 5,000 in all are kept; the oldest ended ones are deleted
first, open ones never. The annotation `polyreme.dev/health` of the node is the truth: deleting an incident changes
nothing about its node, and an open one is written again.
""",
}


def reference_page(crd: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    version, names = crd["spec"]["versions"][0], crd["spec"]["names"]
    schema = version["schema"]["openAPIV3Schema"]
    head = HEAD.format(kind=names["kind"], singular=names["singular"], scope=SCOPES[crd["spec"]["scope"]])
    parts = [head, PREFACES[names["kind"]], _columns(names["shortNames"][0], version["additionalPrinterColumns"])]
    if rules := _rules(schema):
        parts.append("\n".join(["## Whole object", "", "Refused:", "", *rules, ""]))
    for top in ("spec", "status"):
        parts += [_section(path, part) for path, part in _objects(top, schema["properties"][top])]
    return "\n".join(parts)


def _objects(path: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, inner in schema["properties"].items():
        for suffix, part in (("", inner), ("[]", inner.get("items", {}))):
            if "properties" in part and KEEPS_UNKNOWN not in part:
                yield from _objects(f"{path}.{name}{suffix}", part)


def _section(path: str, schema: Schema) -> str:
    required = schema.get("required", ())
    rows = [
        f"| `{name}` | {_type(inner)} | {_default(name, inner, required)} | {_cell(inner.get('description', ''))} |"
        for name, inner in schema["properties"].items()
    ]
    rules = _rules(schema)
    table = ["| field | type | default | meaning |", "|---|---|---|---|", *rows]
    words = [f"## {path}", "", schema.get("description", ""), "", *table, ""]
    return "\n".join(words + (["Refused:", "", *rules, ""] if rules else []))


def _rules(schema: Schema) -> list[str]:
    return [
        f"- {rule['message']}." for rule in schema.get("x-kubernetes-validations", ()) if "oldSelf" not in rule["rule"]
    ]


def _columns(short_name: str, columns: list[dict[str, Any]]) -> str:
    rows = [
        f"| {column['name']}{' (wide)' if column.get('priority') else ''} | `{_cell(column['jsonPath'])}` "
        f"| {column.get('description', '')} |"
        for column in columns
    ]
    return "\n".join([f"## kubectl get {short_name}", "", "| column | from | meaning |", "|---|---|---|", *rows, ""])


def _type(schema: Schema) -> str:
    match schema:
        case {"x-kubernetes-preserve-unknown-fields": True, "properties": _}:
            return "object, with Kubernetes' own fields"
        case {"x-kubernetes-preserve-unknown-fields": True}:
            return "object, free form"
        case {"additionalProperties": dict(values)}:
            return f"map of {_type(values)}, {_range(schema, 'Properties', 'entries')}".rstrip(", ")
        case {"x-kubernetes-int-or-string": True}:
            return "integer or decimal in quotes"
        case {"type": "array", "items": items}:
            return f"list of {_type(items)}, {_range(schema, 'Items', 'entries')}".rstrip(", ")
        case {"enum": values}:
            return " or ".join(f"`{value}`" for value in values)
        case {"type": "integer"}:
            return f"integer {_bounds(schema)}".rstrip()
        case {"type": "string"}:
            pattern = schema.get("pattern", "")
            words = f": {_cell(PATTERN_WORDS.get(pattern, f'`{pattern}`').removeprefix('must be '))}" if pattern else ""
            return f"string, {_range(schema, 'Length', 'characters')}".rstrip(", ") + words
        case _:
            return str(schema["type"])


def _bounds(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if high is None:
        return "" if low is None else f"from {low:,}"
    return f"{low:,} to {high:,}" if low is not None else f"up to {high:,}"


def _range(schema: Schema, noun: str, unit: str) -> str:
    low, high = schema.get(f"min{noun}", 0), schema.get(f"max{noun}")
    if high is None:
        return ""
    return f"{low:,} to {high:,} {unit}" if low else f"at most {high:,} {unit}"


def _default(name: str, schema: Schema, required: tuple[str, ...]) -> str:
    if name in required:
        return "**required**"
    default = schema.get("default")
    if default is None or isinstance(default, dict):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`" if default != "" else '`""`'


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
