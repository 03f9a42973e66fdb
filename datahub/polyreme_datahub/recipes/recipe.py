"""A recipe: operations as a declared graph, and the chains that run without leaving memory. Pure.

A step names the steps that it reads; a step may read earlier ones only, so the order of the file is an order of work.
Consecutive steps on one kind of device are one chain: a sample goes through all of it in one child process. A step
that needs every sample (a barrier) ends the chain before it.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.digests import digest_value
from polyreme_datahub.operations.declare import RECORD, Device, Form, Operation, find_operation

FORMAT = 1
INGEST = "ingest"
"""Reading a record from its source: what comes before the first step."""
STEPS_MAX = 64
STEP_NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
_FIELDS = frozenset({"version", "description", "operations"})
_STEP_FIELDS = frozenset({"step", "operation", "parameters", "inputs"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An operation with its parameters and inputs."""

    name: str
    operation: Operation
    parameters: Any
    inputs: tuple[str, ...]
    prefix: str = dataclasses.field(init=False)
    """Operation, version and parameters, for the keys of actions."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prefix", self.operation.prefix(self.parameters))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Steps that a sample goes through in one child process, or one barrier; without steps the source is only read."""

    steps: tuple[Step, ...]
    before: tuple[Step, ...] = ()
    """Steps of earlier chains, whose outputs this one may read."""
    reads_source: bool = False

    @property
    def name(self) -> str:
        """Name of its work items and of their topic: that of its last operation."""
        return self.operations[-1]

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of all that it does with a record."""
        return (*([INGEST] if self.reads_source else ()), *(step.name for step in self.steps))

    @property
    def is_barrier(self) -> bool:
        """Whether it is one barrier."""
        return any(step.operation.barrier for step in self.steps)

    @property
    def device(self) -> Device:
        """Which workers run it."""
        return self.steps[0].operation.device if self.steps else "cpu"

    @property
    def upto(self) -> tuple[Step, ...]:
        """Every step up to its end."""
        return (*self.before, *self.steps)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Steps in an order of work."""

    steps: tuple[Step, ...]
    constants: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Inputs that are the same for every sample: name -> digest of their stored value."""

    @property
    def digest(self) -> str:
        """Digest of everything that decides what the steps make."""
        steps = [[step.name, step.prefix, list(step.inputs)] for step in self.steps]
        return digest_value([steps, dict(self.constants)])

    def chains(self) -> tuple[Chain, ...]:
        """Cut the steps into chains; the first one reads the source, and a barrier is no first one."""
        cuts: list[list[Step]] = []
        for step in self.steps:
            last = cuts[-1][-1].operation if cuts else None
            if last is None or last.barrier or step.operation.barrier or last.device != step.operation.device:
                cuts.append([step])
            else:
                cuts[-1].append(step)
        if not cuts or cuts[0][0].operation.barrier:
            cuts.insert(0, [])
        chains: list[Chain] = []
        for steps in cuts:
            before = chains[-1].upto if chains else ()
            chains.append(Chain(steps=tuple(steps), before=before, reads_source=not chains))
        return tuple(chains)

    def without(self, constant: str) -> Recipe:
        """Return the steps before the first one that reads a constant, which is not known yet."""
        reads = [constant in step.inputs for step in self.steps]
        steps = self.steps[: reads.index(True)] if any(reads) else self.steps
        return Recipe(steps=steps, constants={name: of for name, of in self.constants.items() if name != constant})

    def giving(self, form: Form) -> str:
        """Return the last step whose values have a form.

        Raises:
            InvalidConfigError: If there is none.
        """
        for step in reversed(self.steps):
            if step.operation.gives == form:
                return step.name
        raise InvalidConfigError(f"recipe has no step that gives {form}", field="operations")


def build_recipe(steps: Sequence[Step], *, constants: Mapping[str, str] | None = None) -> Recipe:
    """Build a recipe of steps; their inputs are checked.

    Raises:
        InvalidConfigError: If a name is used twice, or an input is no earlier step.
    """
    known = [RECORD, *(constants or {})]
    for at, step in enumerate(steps):
        field = f"operations[{at}]"
        if step.name in known:
            raise InvalidConfigError(
                f"recipe: step {step.name!r} is named twice; give one of them another name", field=f"{field}.step"
            )
        for name in step.inputs:
            if name not in known:
                raise InvalidConfigError(
                    f"recipe: step {step.name!r} reads {name!r}, which is no earlier step; {_there_are(name, known)}",
                    field=f"{field}.inputs",
                )
        if not step.operation.barrier:
            known.append(step.name)
    return Recipe(steps=tuple(steps), constants=dict(constants or {}))


def parse_recipe(
    content: Any,
    *,
    given: Mapping[str, Any] | None = None,
    constants: Mapping[str, str] | None = None,
    is_stored: bool = False,
) -> Recipe:
    """Read a recipe from the content of its YAML file.

    Args:
        content: The content.
        given: Values, by name, of parameters that a step needs and the recipe leaves out.
        constants: As ``Recipe.constants``.
        is_stored: Whether a version was made by it, whatever it made of records that it does not take.

    Raises:
        InvalidConfigError: Naming the first field that breaks a rule.
    """
    if not isinstance(content, Mapping):
        raise InvalidConfigError(f"recipe is a {type(content).__name__}, expected version and operations")
    _refuse_unknown(content, _FIELDS, "recipe")
    if content.get("version") != FORMAT:
        raise InvalidConfigError(f"recipe version is {content.get('version')!r}, expected {FORMAT}", field="version")
    entries = content.get("operations")
    if not isinstance(entries, list) or not 1 <= len(entries) <= STEPS_MAX:
        raise InvalidConfigError(f"recipe needs a list of 1 to {STEPS_MAX} operations", field="operations")
    steps: list[Step] = []
    replaced: dict[str, str] = {}
    for at, entry in enumerate(entries):
        step = _parse_step(entry, f"operations[{at}]", replaced, given or {})
        steps.append(step)
        if step.operation.replaces:
            replaced[step.operation.replaces] = step.name
    if not is_stored:
        _refuse_unreplaced(steps, replaced)
    return build_recipe(steps, constants=constants)


def recipe_content(recipe: Recipe) -> dict[str, Any]:
    """Return the content from which ``parse_recipe`` reads the same recipe, with everything written out."""
    return {
        "version": FORMAT,
        "operations": [
            {
                "step": step.name,
                "operation": step.operation.path,
                "parameters": json.loads(json.dumps(dataclasses.asdict(step.parameters))),
                "inputs": list(step.inputs),
            }
            for step in recipe.steps
        ],
    }


def _refuse_unreplaced(steps: Sequence[Step], replaced: Mapping[str, str]) -> None:
    """Refuse a step that takes records of images, and would get those of pages that another step renders."""
    for at, step in enumerate(steps):
        name = next((name for name in step.inputs if name in replaced), "")
        if step.operation.images_only and name:
            raise InvalidConfigError(
                f"recipe: step {step.name!r} reads {name!r}, whose pages it does not take; put {replaced[name]!r} "
                "before it, and leave its inputs out",
                field=f"operations[{at}].inputs",
            )


def _parse_step(entry: Any, field: str, replaced: Mapping[str, str], given: Mapping[str, Any]) -> Step:
    if isinstance(entry, str):
        entry = {"operation": entry}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("operation"), str):
        raise InvalidConfigError("a step needs the name of its operation", field=f"{field}.operation")
    _refuse_unknown(entry, _STEP_FIELDS, field)
    operation = find_operation(entry["operation"])
    name = entry.get("step", operation.name)
    if not isinstance(name, str) or not STEP_NAME.fullmatch(name):
        raise InvalidConfigError(
            f"step name is {name!r}, expected 1 to 63 lower-case letters, digits and '-'", field=f"{field}.step"
        )
    inputs = entry.get("inputs", [replaced.get(name, name) for name in operation.inputs])
    if not isinstance(inputs, list) or len(inputs) != len(operation.inputs):
        raise InvalidConfigError(
            f"operation {operation.name} reads {len(operation.inputs)} inputs ({', '.join(operation.inputs)}), "
            f"got {inputs!r}",
            field=f"{field}.inputs",
        )
    values = entry.get("parameters", {})
    if not isinstance(values, Mapping):
        raise InvalidConfigError(
            f"parameters are a {type(values).__name__}, expected names and values", field=f"{field}.parameters"
        )
    asked = {name: given[name] for name in operation.needed_parameters & given.keys()}
    parameters = operation.parse_parameters({**asked, **values}, field=f"{field}.parameters")
    return Step(name=name, operation=operation, parameters=parameters, inputs=tuple(map(str, inputs)))


def _refuse_unknown(content: Mapping[str, Any], fields: frozenset[str], where: str) -> None:
    for name in content:
        if name not in fields:
            raise InvalidConfigError(f"unknown field: {name!r}, {_there_are(str(name), sorted(fields))}", field=where)


def _there_are(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known) or 'none'}"
