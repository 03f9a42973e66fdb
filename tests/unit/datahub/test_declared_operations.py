"""Declaring operations, finding them by name, their parameters, and values with their blobs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.digests import action_prefix, digest_bytes
from polyreme_datahub.operations.declare import SHIPPED, NoParameters, Operation, find_operation, operation
from polyreme_datahub.operations.values import Blob, Value
from tests.unit.datahub.jobs import picture


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    side: int
    share: float = 0.5
    names: tuple[str, ...] = ()


@operation("cut", 2, inputs=("decode", "record"), blobs=("decode",), parameters=Cut)
def cut(decoded: Value, record: Value, parameters: Cut) -> Value:
    return Value.of({"side": parameters.side, "kind": record.data["kind"], "of": decoded.digest})


def test_a_declared_operation_is_called_like_its_function_and_knows_its_key() -> None:
    decoded, record = Value.of({"a": 1}), Value.of({"kind": "images"})
    parameters = cut.parse_parameters({"side": 3, "names": ["a"]})
    assert parameters == Cut(side=3, names=("a",))
    assert cut(decoded, record, parameters) == cut.call([decoded, record], parameters)
    assert cut.prefix(parameters) == action_prefix("cut", 2, {"side": 3, "share": 0.5, "names": ["a"]})
    assert cut.reads_blobs == (True, False)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"side": 3, "sides": 4}, "steps.cut.sides"),
        ({}, "steps.cut.side"),
        ({"side": "3"}, "steps.cut.side"),
        ({"side": True}, "steps.cut.side"),
        ({"side": 3, "names": ["a", 1]}, "steps.cut.names.1"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_by_field(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidConfigError, match="'cut'") as refused:
        cut.parse_parameters(values, field="steps.cut")
    assert refused.value.field == field


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_operations_are_found_by_their_names(name: str) -> None:
    found = find_operation(name)
    assert found.name == name
    assert find_operation(found.path) is found


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("decoed", "is not known, expected one of .*decode"),
        ("nowhere.at_all:f", "can't be imported: No module named 'nowhere'"),
        ("polyreme_datahub.digests:digest_bytes", "is a function, expected a function with the decorator"),
        ("polyreme_datahub.digests:nothing", "is missing, expected"),
    ],
)
def test_a_name_of_no_operation_is_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        find_operation(name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "Cut"},
        {"version": 0},
        {"inputs": ()},
        {"inputs": ("a", "a")},
        {"blobs": ("b",)},
        {"device": "tpu"},
        {"batch": 0},
        {"parameters": dict},
        {"inputs": ("a", "b")},
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(wrong: dict[str, Any]) -> None:
    given: dict[str, Any] = {"name": "fine", "version": 1, "inputs": ("a",), "parameters": NoParameters} | wrong
    with pytest.raises(InvalidConfigError, match="operation "):
        operation(given.pop("name"), given.pop("version"), **given)(lambda a: a)


def test_a_value_names_what_it_made_and_what_it_passed_on() -> None:
    kept, made = Blob(b"kept"), Blob(b"made")
    value = Value.of({"b": 1, "a": "é"}, made=[made], kept=[kept])
    assert value.digest == digest_bytes('{"a":"é","b":1}'.encode())
    assert dict(value.blobs) == {digest_bytes(b"kept"): kept, digest_bytes(b"made"): made}
    assert value.new == {made.digest}


def test_pixels_are_decoded_once() -> None:
    blob = Blob(picture(40, 30))
    assert blob.pixels() is blob.pixels()
    assert isinstance(find_operation("decode"), Operation)
