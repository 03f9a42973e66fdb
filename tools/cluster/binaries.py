"""The programs of a cluster: found in ``KUBEBUILDER_ASSETS``, else built from pinned Go modules, once per user.

Each program has a folder of its own in the cache, named after what it is built from: adding a program rebuilds no
other. It is built to a temporary name and renamed, under a lock, so that a build that was killed continues where it
stopped, and two builds at a time do the work once.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools import build_cache
from tools.build_cache import BuildError, built, say

SOURCES = Path(__file__).parent / "go"
ASSETS = "KUBEBUILDER_ASSETS"
HELM_KUBERNETES_MINOR = 37
"""Of k8s.io/client-go in Helm's go.mod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program, and what to build it from."""

    name: str
    module: str
    """Folder of the Go module that pins it."""
    package: str
    version_of: str
    """Module whose version the program bears."""
    version_flags: tuple[str, ...] = ()
    """Variables that the linker sets; ``{version}`` stands for the version, ``{minor}`` for its second number."""
    tags: str = ""
    """Build tags, with commas between them."""
    usual_s: int
    """Cold build on two cores."""


_COMPONENT = "k8s.io/component-base/version"
# Without these an API server calls itself v0.0.0, and clients misbehave.
_KUBERNETES_FLAGS = (
    f"{_COMPONENT}.gitVersion={{version}}",
    f"{_COMPONENT}.gitMajor=1",
    f"{_COMPONENT}.gitMinor={{minor}}",
    f"{_COMPONENT}.gitTreeState=clean",
    f"{_COMPONENT}.buildDate=1970-01-01T00:00:00Z",
)


def _kubernetes(name: str, usual_s: int) -> Program:
    return Program(
        name=name,
        module="kubernetes",
        package=f"k8s.io/kubernetes/cmd/{name}",
        version_of="k8s.io/kubernetes",
        version_flags=_KUBERNETES_FLAGS,
        usual_s=usual_s,
    )


_CONTAINERD = "github.com/containerd/containerd/v2"


def _containerd(name: str, usual_s: int) -> Program:
    return Program(
        name=name,
        module="containerd",
        package=f"{_CONTAINERD}/cmd/{name}",
        version_of=_CONTAINERD,
        version_flags=(f"{_CONTAINERD}/version.Version={{version}}",),
        usual_s=usual_s,
    )


PROGRAMS = (
    Program(
        name="etcd",
        module="etcd",
        package="go.etcd.io/etcd/server/v3",
        version_of="go.etcd.io/etcd/server/v3",
        usual_s=26,
    ),
    _kubernetes("kube-apiserver", 205),
    _kubernetes("kube-controller-manager", 37),
    _kubernetes("kube-scheduler", 23),
    _kubernetes("kubectl", 18),
    Program(
        name="certificate",
        module="kubernetes",
        package="./certificate",
        version_of="k8s.io/kubernetes",
        usual_s=2,
    ),
    Program(
        name="kwok",
        module="kwok",
        package="sigs.k8s.io/kwok/cmd/kwok",
        version_of="sigs.k8s.io/kwok",
        version_flags=("sigs.k8s.io/kwok/pkg/consts.Version={version}",),
        usual_s=55,
    ),
    Program(name="stages", module="kwok", package="./stages", version_of="sigs.k8s.io/kwok", usual_s=1),
    Program(
        name="helm",
        module="helm",
        package="helm.sh/helm/v3/cmd/helm",
        version_of="helm.sh/helm/v3",
        # Without the last four it takes itself for a client of Kubernetes 1.20.
        version_flags=(
            "helm.sh/helm/v3/internal/version.version={version}",
            *(
                f"helm.sh/helm/v3/pkg/{package}.k8sVersion{part}"
                for package in ("chartutil", "lint/rules")
                for part in ("Major=1", f"Minor={HELM_KUBERNETES_MINOR}")
            ),
        ),
        usual_s=60,
    ),
    Program(
        name="kubeconform",
        module="kubeconform",
        package="github.com/yannh/kubeconform/cmd/kubeconform",
        version_of="github.com/yannh/kubeconform",
        usual_s=3,
    ),
    Program(
        name="promtool",
        module="promtool",
        package="github.com/prometheus/prometheus/cmd/promtool",
        version_of="github.com/prometheus/prometheus",
        # Without its service discovery it needs no client of a dozen clouds.
        tags="remove_all_sd",
        usual_s=85,
    ),
    _kubernetes("kubelet", 14),
    _kubernetes("kube-proxy", 8),
    _containerd("containerd", 43),
    _containerd("containerd-shim-runc-v2", 4),
    _containerd("ctr", 10),
    Program(name="pause", module="containerd", package="./pause", version_of=_CONTAINERD, usual_s=1),
    Program(
        name="coredns",
        module="coredns",
        package=".",
        version_of="github.com/coredns/coredns",
        version_flags=("github.com/coredns/coredns/coremain.GitCommit={version}",),
        usual_s=60,
    ),
)
CONTROL_PLANE = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "certificate",
    "kwok",
    "stages",
)
"""What a cluster of fake nodes needs."""
CLIENTS = ("kubectl", "helm", "kubeconform", "promtool")
"""What tests need beside any cluster, also beside one that KUBECONFIG names."""
NODES = ("kubelet", "kube-proxy", "containerd", "containerd-shim-runc-v2", "ctr", "pause", "coredns")
"""What real nodes need in addition."""
_BY_NAME = {program.name: program for program in PROGRAMS}


def programs(environment: Mapping[str, str], names: Iterable[str] = CONTROL_PLANE) -> dict[str, Path]:
    """Return the path of each of these programs, and build those that are nowhere yet.

    Raises:
        BuildError: If Go is missing, or a build fails.
    """
    wanted = list(names)
    _build([_BY_NAME[name] for name in missing_programs(environment, wanted)], environment)
    return {name: program_path(name, environment) for name in wanted}


def missing_programs(environment: Mapping[str, str], names: Iterable[str] = CONTROL_PLANE) -> list[str]:
    """Return the names of the programs that ``programs`` would build."""
    return [name for name in names if not program_path(name, environment).exists()]


def program_path(name: str, environment: Mapping[str, str]) -> Path:
    """Return where a program is, or will be once it is built.

    Raises:
        BuildError: If ``KUBEBUILDER_ASSETS`` names no folder.
    """
    assets = environment.get(ASSETS)
    if assets and not Path(assets).is_dir():
        raise BuildError(f"{ASSETS} is no folder: {assets}")
    if assets and Path(assets, name).is_file():
        return Path(assets, name)
    return build_cache.cache_folder(environment, name, _sources(_BY_NAME[name])) / name


def client_path(name: str, environment: Mapping[str, str]) -> Path:
    """Return a program that was built, else the one of that name on PATH.

    Raises:
        BuildError: If there is neither.
    """
    path = program_path(name, environment)
    if path.exists():
        return path
    found = shutil.which(name, path=environment.get("PATH", ""))
    if found is None:
        raise BuildError(f"no {name}: `make servers` builds one, or install it on PATH")
    return Path(found)


def _sources(program: Program) -> Iterator[bytes]:
    """Yield what decides a program's content: go.sum only verifies what go.mod pins."""
    yield repr((program.package, program.version_flags, *program.tags.split())).encode()
    module = SOURCES / program.module
    yield (module / "go.mod").read_bytes()
    if program.package.startswith("."):
        for path in sorted(path for path in (module / program.package).rglob("*") if path.is_file()):
            yield f"{path.relative_to(module)}\0".encode() + path.read_bytes()


def _build(missing: list[Program], environment: Mapping[str, str]) -> None:
    if missing and shutil.which("go", path=environment.get("PATH", "")) is None:
        go = re.search(r"^go (\S+)", (SOURCES / "kubernetes/go.mod").read_text(), re.MULTILINE)
        raise BuildError(
            f"no Go on PATH to build {', '.join(program.name for program in missing)}: install Go "
            f"{go[1] if go else ''} or newer, or name a cluster by KUBECONFIG, or a folder of programs by {ASSETS}"
        )
    if missing:
        total_s = sum(program.usual_s for program in missing)
        parent = program_path(missing[0].name, environment).parent.parent
        say(f"building {len(missing)} programs into {parent}, once: about {total_s} s on two free cores")
    for number, program in enumerate(missing, start=1):
        say(f"[{number}/{len(missing)}] building {program.name}, usually {program.usual_s} s")
        started_s = time.monotonic()
        path = program_path(program.name, environment)
        built(path, partial(_build_one, program, path, environment))
        say(f"[{number}/{len(missing)}] built {program.name} in {time.monotonic() - started_s:.0f} s")


def _build_one(program: Program, path: Path, environment: Mapping[str, str]) -> None:
    version = _pinned_version(program)
    minor = version.split(".")[1]
    settings = [f"-X {flag.format(version=version, minor=minor)}" for flag in program.version_flags]
    temporary = path.with_name(f".{program.name}.partial")
    command = ["go", "build", "-trimpath", "-buildvcs=false", "-mod=readonly", f"-tags={program.tags}"]
    command += ["-ldflags", " ".join(["-s", "-w", *settings]), "-o", str(temporary), program.package]
    variables = {**environment, "CGO_ENABLED": "0", "GOWORK": "off"}
    done = subprocess.run(command, cwd=SOURCES / program.module, env=variables, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise BuildError(f"go build of {program.name} {version} exited with {done.returncode}; it said why above")
    temporary.replace(path)


def _pinned_version(program: Program) -> str:
    text = (SOURCES / program.module / "go.mod").read_text()
    found = re.search(rf"^(?:require)?\s*{re.escape(program.version_of)} (v\S+)", text, re.MULTILINE)
    if found is None:
        raise BuildError(f"{program.module}/go.mod pins no version of {program.version_of}")
    return found[1]
