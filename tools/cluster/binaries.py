"""The programs of a control plane: found in ``KUBEBUILDER_ASSETS``, else built from pinned Go modules, once a user.

Each program is built to a temporary name and renamed, under a lock, so that a build that was killed goes on where it
was, and two builds at a time do the work once.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools import build_cache
from tools.build_cache import BuildError, locked, say

SOURCES = Path(__file__).parent / "go"
ASSETS = "KUBEBUILDER_ASSETS"


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
)


def programs(environment: Mapping[str, str]) -> dict[str, Path]:
    """Return the path of every program, and build those that are nowhere yet.

    Raises:
        BuildError: If Go is missing, or a build fails.
    """
    places = _places(environment)
    if missing_programs(environment):
        cache = cache_folder(environment)
        with locked(cache, busy=f"another build is under way in {cache}: waiting for it"):
            _build([program for program in PROGRAMS if not places[program.name].exists()], cache, environment)
    return places


def missing_programs(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the programs that ``programs`` would build."""
    return [name for name, path in _places(environment).items() if not path.exists()]


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of the built programs: another one for other sources."""
    return build_cache.cache_folder(environment, "kubernetes", _sources())


def _sources() -> Iterator[bytes]:
    yield repr(PROGRAMS).encode()
    for path in sorted(path for path in SOURCES.rglob("*") if path.is_file()):
        yield f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes()


def _places(environment: Mapping[str, str]) -> dict[str, Path]:
    """Where each program is or will be."""
    assets, cache = environment.get(ASSETS), cache_folder(environment)
    if assets and not Path(assets).is_dir():
        raise BuildError(f"{ASSETS} is no folder: {assets}")
    given = {} if not assets else {p.name: Path(assets, p.name) for p in PROGRAMS if Path(assets, p.name).is_file()}
    return {program.name: cache / program.name for program in PROGRAMS} | given


def _build(missing: list[Program], cache: Path, environment: Mapping[str, str]) -> None:
    if missing and shutil.which("go", path=environment.get("PATH", "")) is None:
        go = re.search(r"^go (\S+)", (SOURCES / "kubernetes/go.mod").read_text(), re.MULTILINE)
        raise BuildError(
            f"no Go on PATH to build {', '.join(program.name for program in missing)}: install Go "
            f"{go[1] if go else ''} or newer, or name a cluster by KUBECONFIG, or a folder of programs by {ASSETS}"
        )
    total_s = sum(program.usual_s for program in missing)
    if missing:
        say(f"building {len(missing)} programs into {cache}, once: about {total_s} s on two free cores")
    for number, program in enumerate(missing, start=1):
        say(f"[{number}/{len(missing)}] building {program.name}, usually {program.usual_s} s")
        started_s = time.monotonic()
        _build_one(program, cache, environment)
        say(f"[{number}/{len(missing)}] built {program.name} in {time.monotonic() - started_s:.0f} s")


def _build_one(program: Program, cache: Path, environment: Mapping[str, str]) -> None:
    version = _pinned_version(program)
    minor = version.split(".")[1]
    settings = [f"-X {flag.format(version=version, minor=minor)}" for flag in program.version_flags]
    temporary = cache / f".{program.name}.partial"
    command = ["go", "build", "-trimpath", "-buildvcs=false", "-mod=readonly"]
    command += ["-ldflags", " ".join(["-s", "-w", *settings]), "-o", str(temporary), program.package]
    variables = {**environment, "CGO_ENABLED": "0", "GOWORK": "off"}
    done = subprocess.run(command, cwd=SOURCES / program.module, env=variables, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise BuildError(f"go build of {program.name} {version} exited with {done.returncode}; it said why above")
    temporary.replace(cache / program.name)


def _pinned_version(program: Program) -> str:
    text = (SOURCES / program.module / "go.mod").read_text()
    found = re.search(rf"^(?:require)?\s*{re.escape(program.version_of)} (v\S+)", text, re.MULTILINE)
    if found is None:
        raise BuildError(f"{program.module}/go.mod pins no version of {program.version_of}")
    return found[1]
