"""Declared operations: a typed function with a name, a version, parameters, inputs and a device.

    @operation("resize", 1, inputs=("decode",), parameters=ResizeParameters)
    def resize(decoded: Value, parameters: ResizeParameters) -> Value: ...

The function takes one ``Value`` for each input, in order, and then its parameters, where it declares any. It returns
a ``Value``, or raises ``BadRecordError`` (the sample breaks a rule) or ``Dropped`` (a filter's decision). With
``batch`` above 1 it takes a list for each input and returns a list with one ``Value``, ``BadRecordError`` or
``Dropped`` for each sample. The same inputs and parameters must give the same value: results are reused by key.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.digests import action_prefix

Device = Literal["cpu", "gpu"]
Form = Literal["", "images", "pages", "tokens"]
RECORD = "record"
"""The input that is no step: the raw record, with its images and masks as blobs."""
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
NAME_CHARACTERS_MAX = 64
BATCH_MAX = 4096
HERE = "polyreme_datahub.operations"
SHIPPED: Mapping[str, str] = {
    "aspect-filter": f"{HERE}.filters:aspect_filter",
    "blur-filter": f"{HERE}.filters:blur_filter",
    "caption": f"{HERE}.describe_images:caption",
    "caption-cpu": f"{HERE}.describe_images:caption_cpu",
    "compose": f"{HERE}.fit_pages:compose",
    "count-pdf-pages": f"{HERE}.pdf_pages:count_pdf_pages",
    "decode": f"{HERE}.decode_images:decode",
    "deduplicate-images": f"{HERE}.deduplicate_images:deduplicate_images",
    "embed": f"{HERE}.describe_images:embed",
    "embed-cpu": f"{HERE}.describe_images:embed_cpu",
    "image-hash": f"{HERE}.image_hash:image_hash",
    "measure": f"{HERE}.measure:measure",
    "pdf-pages": f"{HERE}.pdf_pages:pdf_pages",
    "resize": f"{HERE}.resize_images:resize",
    "size-filter": f"{HERE}.filters:size_filter",
    "tokenize": f"{HERE}.encode_text:tokenize",
}
"""Name -> ``module:function``, so that a process imports only the operations that it runs."""


@dataclasses.dataclass(frozen=True, slots=True)
class NoParameters:
    """Parameters of an operation that has none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Operation:
    """A declared operation; call it like the function that it was made from."""

    name: str
    version: int
    inputs: tuple[str, ...]
    """Names of steps, or ``record``; a recipe may bind others."""
    reads_blobs: tuple[bool, ...]
    """For each input, whether the function reads its blobs; where not, they need not be loaded."""
    device: Device
    batch: int
    """Most samples of one call; above 1, the function takes and returns lists."""
    parameters: type[Any]
    function: Callable[..., Any]
    path: str
    """``module:function``, by which another process finds it."""
    barrier: bool = False
    """Whether it looks at every sample of a version at once, and names those that are dropped."""
    replaces: str = ""
    """The input whose form its value has: steps after it that read that input by default read this step."""
    images_only: bool = False
    """Whether it takes records of images only, so that records of pages must be replaced before it."""
    gives: Form = ""
    """What others look for in its value: facts of images, sizes of pages, or a count of tokens with their checksum."""

    @property
    def needed_parameters(self) -> frozenset[str]:
        """Names of the parameters that have no default."""
        missing = dataclasses.MISSING
        fields = dataclasses.fields(self.parameters)
        return frozenset(one.name for one in fields if one.default is missing and one.default_factory is missing)

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self.function(*args)

    def prefix(self, parameters: Any) -> str:
        """Return what makes an action's key, together with the digests of the inputs."""
        return action_prefix(self.name, self.version, dataclasses.asdict(parameters))

    def parse_parameters(self, values: Mapping[str, Any], *, field: str = "parameters") -> Any:
        """Build the parameters from a recipe's values.

        Raises:
            InvalidConfigError: If one is unknown, missing, of another type, or breaks the parameters' own check.
        """
        known = {item.name for item in dataclasses.fields(self.parameters)}
        if unknown := sorted(set(values) - known):
            raise InvalidConfigError(
                f"operation {self.name!r} has no parameter {unknown[0]!r}, parameters are "
                f"{', '.join(sorted(known)) or 'none'}",
                field=f"{field}.{unknown[0]}",
            )
        # An operation alone needs no pydantic: its functions run where only their own libraries are.
        from pydantic import TypeAdapter, ValidationError

        from polyreme_api.load import rule_words

        try:
            return TypeAdapter(self.parameters).validate_json(json.dumps(dict(values)), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join([field, *(str(part) for part in first["loc"])])
            raise InvalidConfigError(
                f"parameter of operation {self.name!r} is not valid: {first['input']!r}, {rule_words(first)}",
                field=place,
            ) from error

    def call(self, inputs: list[Any], parameters: Any) -> Any:
        """Call the function, with its parameters where it declares any."""
        return self.function(*inputs) if self.parameters is NoParameters else self.function(*inputs, parameters)


def operation(
    name: str,
    version: int,
    *,
    inputs: tuple[str, ...] = (RECORD,),
    blobs: bool | tuple[str, ...] = True,
    device: Device = "cpu",
    batch: int = 1,
    parameters: type[Any] = NoParameters,
    barrier: bool = False,
    replaces: str = "",
    images_only: bool = False,
    gives: Form = "",
) -> Callable[[Callable[..., Any]], Operation]:
    """Declare an operation.

    The arguments are the fields of ``Operation``; raise ``version`` whenever the same inputs would give another value.

    Args:
        name: Lower-case words joined by hyphens.
        version: From 1.
        inputs: The steps whose values it takes.
        blobs: The inputs whose blobs it reads: True for all, False for none (it reads only their JSON), or names.
        device: Which workers run it.
        batch: Most samples of one call.
        parameters: A frozen dataclass of JSON-able fields.
        barrier: Whether the function takes all samples of a version: one iterable of rows (``ordinal``, ``sample_id``,
            ``inputs``: the data of each input), then its parameters. It returns the ordinals that are dropped, each
            with its reason; the smallest ordinal of equal samples must stay.
        replaces: As in ``Operation``.
        images_only: As in ``Operation``.
        gives: As in ``Operation``.

    Raises:
        InvalidConfigError: If the declaration contradicts itself or the function.
    """

    def declare(function: Callable[..., Any]) -> Operation:
        path = f"{function.__module__}:{function.__qualname__}"
        arguments = (1 if barrier else len(inputs)) + (parameters is not NoParameters)
        taken = inspect.signature(function).parameters
        if len(taken) != arguments:
            first = "all rows" if barrier else "one for each input"
            last = "" if parameters is NoParameters else ", and its parameters"
            raise InvalidConfigError(
                f"operation {path} takes {len(taken)} arguments, expected {arguments}: {first}{last}"
            )
        read = inputs if blobs is True else blobs or ()
        declared = Operation(
            name=name,
            version=version,
            inputs=inputs,
            reads_blobs=tuple(source in read for source in inputs),
            device=device,
            batch=batch,
            parameters=parameters,
            function=function,
            path=path,
            barrier=barrier,
            replaces=replaces,
            images_only=images_only,
            gives=gives,
        )
        _check_declaration(declared, read)
        return declared

    return declare


def find_operation(name: str) -> Operation:
    """Find a shipped operation by its name, or any by ``package.module:function``.

    Raises:
        InvalidConfigError: If there is none.
    """
    path = SHIPPED.get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon:
        raise InvalidConfigError(
            f"operation {name!r} is not known, expected one of {', '.join(sorted(SHIPPED))}, or package.module:function"
        )
    try:
        found = getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise InvalidConfigError(f"operation {name!r} can't be imported: {error}") from error
    if not isinstance(found, Operation):
        raise InvalidConfigError(
            f"{path} is {'missing' if found is None else f'a {type(found).__name__}'}, expected a function with the "
            "decorator polyreme_datahub.operations.declare.operation"
        )
    return found


def _check_declaration(declared: Operation, read: tuple[str, ...]) -> None:
    name, version, inputs, parameters = declared.name, declared.version, declared.inputs, declared.parameters

    def check(good: bool, message: str) -> None:
        if not good:
            raise InvalidConfigError(f"operation {declared.path}: {message}")

    good_name = len(name) <= NAME_CHARACTERS_MAX and NAME.fullmatch(name) is not None
    check(good_name, f"name is {name!r}, expected lower-case words joined by hyphens")
    check(version >= 1, f"version is {version}, expected at least 1")
    check(bool(inputs) and len(set(inputs)) == len(inputs), f"inputs are {inputs!r}, expected different names")
    check(set(read) <= set(inputs), f"blobs are {read!r}, expected some of the inputs {inputs!r}")
    check(declared.replaces in {"", *inputs}, f"replaces is {declared.replaces!r}, expected one of {inputs!r}")
    check(declared.device in {"cpu", "gpu"}, f"device is {declared.device!r}, expected cpu or gpu")
    check(1 <= declared.batch <= BATCH_MAX, f"batch is {declared.batch}, expected 1 to {BATCH_MAX}")
    frozen = dataclasses.is_dataclass(parameters) and getattr(parameters, "__dataclass_params__").frozen  # noqa: B009
    check(frozen, f"parameters are {parameters!r}, expected a frozen dataclass")
