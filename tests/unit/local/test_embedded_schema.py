"""The embedded cluster refuses of our kinds what the API server refuses by CRD: field, value and rule."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.kinds import KINDS
from polyreme_api.labels import KIND_JOB
from polyreme_cluster.port import InvalidObjectError, ObjectRef
from polyreme_local.api_server.journal import open_store
from polyreme_local.api_server.store import Store
from tests.cluster.crd_cases import BOUNDED, RULED, case_id, thing
from tests.cluster.crd_evaluation_cases import Case
from tests.contract.adapters import ManualClock, uids


def placed(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the object of a case as the store is given it: a job has its namespace."""
    manifest = thing(kind, changes)
    if kind == KIND_JOB:
        manifest["metadata"]["namespace"] = "default"
    return manifest


def tell(folder: Path, story: Callable[[Store], None]) -> None:
    """Tell a story to the store of a run."""

    async def told() -> None:
        opened = open_store(folder / "cluster.journal", clock=ManualClock(), run_token="t", new_uid=uids())
        async with opened as (store, _):
            story(store)

    asyncio.run(told())


def refusal(folder: Path, manifest: dict[str, Any]) -> InvalidObjectError:
    caught: list[InvalidObjectError] = []

    def story(store: Store) -> None:
        with pytest.raises(InvalidObjectError) as refused:
            store.create(manifest)
        assert not store.list(manifest["kind"], namespace=None, limit=1, continue_=None).items
        caught.append(refused.value)

    tell(folder, story)
    assert str(caught[0]).startswith(f"{ObjectRef.of(manifest)} is invalid: "), str(caught[0])
    return caught[0]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_cases_change_is_accepted_as_it_is(tmp_path: Path, kind: str) -> None:
    def story(store: Store) -> None:
        assert store.create(placed(kind, {}))["metadata"]["uid"]

    tell(tmp_path, story)


@pytest.mark.parametrize("case", RULED, ids=map(case_id, RULED))
def test_a_rule_across_fields_refuses(tmp_path: Path, case: Case) -> None:
    kind, changes, _ = case
    error = refusal(tmp_path, placed(kind, changes))
    assert error.field, str(error)
    assert str(error).endswith(f"; change {error.field}")


@pytest.mark.parametrize("case", BOUNDED, ids=map(case_id, BOUNDED))
def test_a_bound_refuses_and_names_the_field_that_the_api_server_names(tmp_path: Path, case: Case) -> None:
    kind, changes, words = case
    error = refusal(tmp_path, placed(kind, changes))
    named = words[0].removeprefix("unknown field ").strip('"').replace("[", ".").replace("]", "")
    assert (error.field or "").endswith(named), (error.field, named)


@pytest.mark.parametrize(
    ("kind", "patch", "words"),
    [
        ("TrainingQueue", {"weight": 0}, "spec.weight is refused: 0, must be 1 or more"),
        ("ClusterTopology", {"levels": []}, "spec.levels is refused: []"),
        ("NodeFaultPolicy", {"mode": "On"}, "spec.mode is refused: 'On', must be 'Observe' or 'Enforce'"),
    ],
)
def test_a_change_is_checked_too(tmp_path: Path, kind: str, patch: dict[str, Any], words: str) -> None:
    def story(store: Store) -> None:
        ref = ObjectRef.of(store.create(placed(kind, {})))
        with pytest.raises(InvalidObjectError) as refused:
            store.patch(ref, {"spec": patch})
        assert words in str(refused.value)

    tell(tmp_path, story)
