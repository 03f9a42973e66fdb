"""The public functions of a dataset's lifecycle, on a processed dataset of an embedded home."""

from __future__ import annotations

from pathlib import Path

import pytest

from polyreme_datahub import hub, lifecycle
from polyreme_datahub.errors import PredicateInvalidError, SourceInvalidError
from tests.unit.datahub.jobs import Home, digits, make_spec


def test_a_processed_dataset_is_tagged_split_collected_and_trained_on_by_its_tag(tmp_path: Path) -> None:
    home = Home(tmp_path)
    urls = (home.registry, home.objects)
    home.register("two", digits(2, pages=60))
    hub.process(make_spec(["two"]), registry_url=home.registry, objects_url=home.objects)
    lifecycle.tag(home.registry, "two@1", "good")
    assert lifecycle.list_tags(home.registry, "two") == {"good": 1}
    report = hub.process(make_spec(["two@good"]), registry_url=home.registry, objects_url=home.objects)
    assert {count.misses for count in report.stages} == {0}
    made = lifecycle.subset(*urls, "two@good", "two/first", "ordinal < 20")
    assert made.records == 20
    with pytest.raises(PredicateInvalidError, match="price"):
        lifecycle.subset(*urls, "two", "two/none", "price > 1")
    with pytest.raises(SourceInvalidError, match="not valid"):
        lifecycle.subset(*urls, "two", ".draft/none", "ordinal > 1")
    parts = lifecycle.split(*urls, "two", {"train": 3, "test": 1}, "sample_id")
    assert sum(part.records for part in parts) == 60
    found = lifecycle.diff(home.registry, "two@1", "two/first@1")
    assert (found.same, found.removed, found.added) == (20, 40, 0)
    before = lifecycle.collect_garbage(*urls, grace_s=0.0, dry_run=True)
    assert before.condemned == before.deleted == (0, 0)
    lifecycle.collect_garbage(*urls, grace_s=0.0)
    again = hub.process(make_spec(["two@good"]), registry_url=home.registry, objects_url=home.objects)
    assert {count.misses for count in again.stages} == {0}
    assert lifecycle.untag(home.registry, "two", "good")
    kept = lifecycle.subset(*urls, "two", "two/last", "ordinal >= 20")
    hub.remove_dataset(*urls, "two/first")
    lost = (f"sqlite:///{tmp_path}/lost.sqlite", home.objects)
    rebuilt = lifecycle.rebuild_registry(*lost)
    assert rebuilt.versions == 4, "what was removed stays so"
    assert "two/first" not in [each.name for each in hub.list_datasets(lost[0])]
    assert (rebuilt.samples, kept.records) == (60 + 40, 40), "samples that only the registry had"
    anew = lifecycle.subset(*urls, "two", "two/first", "ordinal < 20")
    assert (anew.reference, lifecycle.rebuild_registry(*lost).versions) == ("two/first@1", 5)
