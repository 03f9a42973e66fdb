"""A job's data are what a recipe makes of them: an operation of any package takes a shipped one's place by a recipe."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub import hub
from polyreme_datahub.loader import job_packs
from polyreme_datahub.recipes.files import job_operations, job_recipe
from polyreme_datahub.registry import progress
from polyreme_datahub.registry.opening import opened_database
from tests.unit.datahub.jobs import Home, make_spec, picture, record, write_jsonl

PACKAGE = Path(hub.__file__).parent
OUTSIDE = '''
"""A decoder that no package of polyreme knows: it refuses images that are wide."""

import dataclasses

from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.declare import operation
from polyreme_datahub.operations.values import Value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    side_px_max: int = 100


@operation("small-images", 1, inputs=("record",), parameters=Limits, gives="images")
def small_images(record: Value, parameters: Limits) -> Value:
    """Give the sizes of images that are small enough."""
    images = []
    for digest in record.data["images"]:
        image = record.blobs[digest].pixels()
        if max(image.size) > parameters.side_px_max:
            raise BadRecordError(f"image is {image.width} pixels wide", rule="small-images")
        images.append({"digest": digest, "width": image.width, "height": image.height, "mask": None})
    return Value.of({"kind": "images", "images": images, "boxes": []}, kept=record.blobs.values())
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a package outside of the tree, and return the name of its operation."""
    package = tmp_path / "packages" / "their_operations"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "small.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(str(package.parent))
    return "their_operations.small:small_images"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path / "home")
    folder = tmp_path / "set"
    folder.mkdir()
    for name, side in (("a", 40), ("b", 60), ("wide", 200)):
        (folder / f"{name}.png").write_bytes(picture(side, 40))
    made.register("mine", write_jsonl(folder, [record(name, [f"{name}.png"]) for name in ("a", "b", "wide")]))
    return made


def process(home: Home, recipe: dict[str, Any] | None = None) -> Any:
    return hub.process(make_spec(["mine"]), registry_url=home.registry, objects_url=home.objects, recipe=recipe)


@pytest.mark.slow
def test_an_operation_of_another_package_takes_the_place_of_decode(home: Home, outside: str) -> None:
    usual = process(home)
    decode, *others = job_operations()
    report = process(home, {"version": 1, "operations": [{"step": decode, "operation": outside}, *others]})
    [part] = report.datasets
    assert (usual.datasets[0].samples, part.samples) == (3, 2)
    [letter] = part.dead_letters
    assert (letter.operation, letter.sample_id, letter.rule) == (decode, "wide", "small-images")
    assert {count.operation: (count.misses, count.dead) for count in report.operations} == {
        "ingest": (0, 0),
        decode: (2, 1),
        **dict.fromkeys(others, (0, 0)),
        "index": (2, 0),
    }
    source = job_packs.open_source(home.objects, make_spec(["mine"]), wait_s=0.0)
    assert set(source.packs(1, first=0, count=4).sample_ids) == {"a", "b"}


@pytest.mark.slow
def test_the_index_of_another_recipe_is_another_index(home: Home, outside: str) -> None:
    """Both of one version and tokenizer: neither takes the place of the other, and each is reused."""
    decode, *others = job_operations()
    recipe = {"version": 1, "operations": [{"step": decode, "operation": outside}, *others]}
    manifests = [process(home, one).datasets[0].manifest for one in (None, recipe, None, recipe, job_recipe())]
    assert manifests[0] == manifests[2] == manifests[4]
    assert manifests[1] == manifests[3] != manifests[0]
    with opened_database(home.registry) as database:
        assert {index.manifest for index in progress.indexes_of(database, 1)} == set(manifests)


def test_a_recipe_that_gives_no_pages_is_refused(home: Home) -> None:
    decode, *_ = job_operations()
    with pytest.raises(InvalidConfigError, match="no step that gives pages"):
        process(home, {"version": 1, "operations": [decode]})


def test_no_module_knows_an_operation_of_jobs_by_name() -> None:
    """Recipes and declarations name them; all else finds them by the recipe, and by what they give."""
    own = set(job_operations())
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in {"loader", "operations"}:
            continue  # Threads of the loader are called by what they do.
        nodes = ast.walk(ast.parse(path.read_text()))
        named = own & {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        assert not named, f"{path.relative_to(PACKAGE)} names {sorted(named)}"
