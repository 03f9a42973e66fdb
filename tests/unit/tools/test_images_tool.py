"""The images' tool: names, archives, what a build may read of this machine, and how archives reach a cluster."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tools.build_cache import BuildError
from tools.images import archive, load, pip_settings
from tools.images.__main__ import main
from tools.images.build import IMAGES, PYTHON_IMAGES, BuildRequest, build
from tools.images.engine import Build, full_name

ROOT = Path(__file__).parents[3]
CONTAINERFILE = (ROOT / "images/Containerfile").read_text()


class Recorder:
    """An engine that builds nothing, and keeps what it was asked for."""

    name = "recorder"

    def __init__(self) -> None:
        self.built: list[Build] = []
        self.seen: list[dict[str, str]] = []
        self.missing: frozenset[str] = frozenset()

    def build(self, build: Build) -> None:
        self.built.append(build)
        self.seen.append({name: path.read_text() for name, path in build.secrets.items()})

    def save(self, name: str, path: Path, *, called: str) -> None:
        path.write_text(called)

    def has(self, name: str) -> bool:
        return name not in self.missing

    def pull(self, name: str) -> None:
        raise BuildError("recorder pull exited with 125; it said why above")


def stages(text: str) -> dict[str, str]:
    """The text of each stage by its name."""
    parts = re.split(r"^FROM .* AS (\S+)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("image", PYTHON_IMAGES)
def test_an_image_installs_the_lock_of_its_role_and_runs_its_entry_point(image: str) -> None:
    found = stages(CONTAINERFILE)
    assert f"install-lock {image}.lock /opt/packages" in found[f"{image}-packages"]
    assert f"COPY --from={image}-packages /opt/packages /opt/packages" in found[image]
    (entry_point,) = re.findall(r"^ENTRYPOINT (.+)$", found[image], re.MULTILINE)
    assert (
        entry_point
        == {
            "operator": '["python", "-m", "polyreme_operator"]',
            "datahub": '["python", "-m", "polyreme_datahub_service.main"]',
            "trainer": '["python", "-m", "polyreme_launcher"]',
            "cli": '["polyreme"]',
        }[image]
    )


def test_locks_are_installed_by_hash_alone() -> None:
    script = (ROOT / "images/install.sh").read_text()
    (installed,) = re.findall(r".* -r .*", script)
    assert {"--require-hashes", "--no-deps", "--only-binary"} <= set(installed.split())


def test_images_are_named_by_prefix_role_and_tag(tmp_path: Path) -> None:
    engine = Recorder()
    request = BuildRequest(images=("operator", "s3"), thin=("trainer",), prefix="registry.example/team", tag="1.2.3")
    archives = build(request, engine, {}, folder=tmp_path)
    assert {name: path.read_text() for name, path in archives.items()} == {
        "operator": "registry.example/team/operator:1.2.3",
        "s3": "registry.example/team/s3:1.2.3",
        # Its own name in the store, beside the whole image; the same name for pods.
        "trainer-thin": "registry.example/team/trainer:1.2.3",
    }
    assert [one.name.rpartition("/")[2] for one in engine.built] == ["operator:1.2.3", "s3:1.2.3", "trainer:1.2.3-thin"]
    assert [one.arguments.get("PACKAGES") for one in engine.built] == [None, None, "none"]


def test_an_image_that_does_not_exist_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    engine = Recorder()
    with pytest.raises(BuildError, match=f"no image is called worker: there are {', '.join(IMAGES)}"):
        build(BuildRequest(images=("operator", "worker")), engine, {}, folder=tmp_path)
    assert engine.built == []


def test_a_build_reads_this_machines_mirror_and_certificates_as_secrets(tmp_path: Path) -> None:
    certificates = tmp_path / "own.pem"
    certificates.write_text("certificate of a mirror")
    environment = {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "https://mirror.example/simple",
        "PIP_CERT": str(certificates),
        "PIP_FIND_LINKS": str(tmp_path),
    }
    engine = Recorder()
    build(BuildRequest(images=("operator",)), engine, environment, folder=tmp_path)
    (secrets,), (one,) = engine.seen, engine.built
    assert secrets["certificates"] == "certificate of a mirror"
    assert "index-url = https://mirror.example/simple" in secrets["pip"]
    assert f"cert = {pip_settings.MOUNTED_CERTIFICATES}" in secrets["pip"]
    assert str(tmp_path) not in secrets["pip"]
    assert "mirror" not in " ".join(one.arguments.values())
    assert not [path for path in one.secrets.values() if path.exists()], "deleted after the build"


def test_variables_of_pip_go_before_its_files() -> None:
    listed = "global.timeout='15'\n:env:.timeout='180'\n:env:.index-url='https://mirror.example/simple?a=b'"
    assert pip_settings.parse(listed) == {"timeout": "180", "index-url": "https://mirror.example/simple?a=b"}


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("polyreme/operator:0.1.0", "docker.io/polyreme/operator:0.1.0"),
        ("operator:0.1.0", "docker.io/library/operator:0.1.0"),
        ("registry.example/team/operator:0.1.0", "registry.example/team/operator:0.1.0"),
        ("registry:5000/operator:0.1.0", "registry:5000/operator:0.1.0"),
        ("localhost/operator:0.1.0", "localhost/operator:0.1.0"),
    ],
)
def test_an_archive_names_its_image_as_a_kubelet_looks_it_up(name: str, full: str) -> None:
    assert full_name(name) == full


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("kind", "kind load image-archive a.tar --name kind"),
        ("kind-other", "kind load image-archive a.tar --name other"),
        ("k3s", "k3s ctr images import a.tar"),
        ("local", "-m tools.cluster load a.tar"),
    ],
)
def test_an_archive_is_loaded_by_the_clusters_own_program(cluster: str, words: str) -> None:
    assert " ".join(load.command(cluster, Path("a.tar"))).endswith(words)


@pytest.mark.parametrize(
    ("images", "missing"),
    [(("operator",), "python:3.11-slim-bookworm"), (("s3",), "golang:1.26-bookworm")],
)
def test_a_base_that_can_not_be_pulled_ends_with_the_option_that_needs_none(
    images: tuple[str, ...], missing: str, tmp_path: Path
) -> None:
    engine = Recorder()
    engine.missing = frozenset({missing})
    with pytest.raises(BuildError, match=rf"{missing} can't be pulled \(.*\): say BASE=local, by which"):
        build(BuildRequest(images=images), engine, {}, folder=tmp_path)
    assert engine.built == []


def test_the_list_of_images_has_those_of_the_charts_annotation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    chart = yaml.safe_load((ROOT / "charts/polyreme/Chart.yaml").read_text(encoding="utf-8"))
    annotated = yaml.safe_load(chart["annotations"]["artifacthub.io/images"])
    assert capsys.readouterr().out.split() == [entry["image"] for entry in annotated]
    assert [entry["name"] for entry in annotated] == list(IMAGES)
    assert main(["list", "--prefix", "registry.example/polyreme", "--tag", "x"]) == 0
    assert "registry.example/polyreme/trainer:x\n" in capsys.readouterr().out


def test_another_cluster_is_sent_to_a_registry() -> None:
    with pytest.raises(BuildError, match="CLUSTER=gke: write kind, kind-NAME, k3s or local"):
        load.load("gke", [Path("a.tar")])


def test_thin_archives_are_loaded_only_when_they_are_named(tmp_path: Path) -> None:
    for name in ("trainer.tar", "trainer-thin.tar", "s3.tar"):
        (tmp_path / name).touch()
    assert [path.name for path in load.whole(tmp_path)] == ["s3.tar", "trainer.tar"]


def test_loading_without_archives_says_what_to_run() -> None:
    with pytest.raises(BuildError, match="run make images first"):
        load.load("kind", [])


def write_archive(path: Path, files: Mapping[str, object]) -> None:
    with tarfile.open(path, "w") as packed:
        for name, content in files.items():
            data = json.dumps(content).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize(
    ("annotations", "name"),
    [
        ({"org.opencontainers.image.ref.name": "docker.io/polyreme/s3:1"}, "docker.io/polyreme/s3:1"),
        (
            {"org.opencontainers.image.ref.name": "1", "io.containerd.image.name": "docker.io/polyreme/s3:1"},
            "docker.io/polyreme/s3:1",
        ),
    ],
    ids=["buildah", "docker"],
)
def test_an_archive_is_read_as_either_engine_writes_it(
    tmp_path: Path, annotations: Mapping[str, str], name: str
) -> None:
    config = {"User": "65532:65532"}
    layers = [{"digest": "sha256:c", "size": 7}]
    files = {
        "index.json": {"manifests": [{"digest": "sha256:a", "annotations": annotations}]},
        "blobs/sha256/a": {"config": {"digest": "sha256:b"}, "layers": layers},
        "blobs/sha256/b": {"config": config},
    }
    write_archive(tmp_path / "a.tar", files)
    image = archive.read(tmp_path / "a.tar")
    assert (image.name, image.digest, image.config) == (name, "sha256:a", config)
    assert [layer.bytes for layer in image.layers] == [7]


def test_an_archive_of_another_format_is_refused_with_its_name(tmp_path: Path) -> None:
    write_archive(tmp_path / "old.tar", {"manifest.json": []})
    with pytest.raises(ValueError, match=r"old\.tar is no OCI archive of one image: .*index\.json"):
        archive.read(tmp_path / "old.tar")


def arguments(text: str) -> Mapping[str, str]:
    return dict(re.findall(r"^ARG (\w+)(?:=(\S+))?$", text, re.MULTILINE))


def test_the_same_program_is_built_for_the_s3_image_as_for_tests() -> None:
    """Flags of the Containerfile and of tools/s3: one program, whichever way it was built."""
    containerfile, tool = (ROOT / "images/s3.Containerfile").read_text(), (ROOT / "tools/s3/server.py").read_text()
    for flag in (
        "-trimpath",
        "-buildvcs=false",
        "-mod=readonly",
        "-s -w",
        "github.com/versity/versitygw/cmd/versitygw",
    ):
        assert flag in containerfile
        assert flag in tool
    assert arguments(containerfile)["VERSITYGW"] == "build"
