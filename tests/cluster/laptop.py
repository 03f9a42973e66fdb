"""What a person has on a laptop: an operator and some nodes, each a process of its own, beside a real API server."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.cluster.binaries import program_path

END_S = 30.0
LINES_SHOWN = 60


@contextlib.contextmanager
def process(
    name: str, command: list[str], environment: Mapping[str, str], folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run one process for a while; it must not end by itself, and SIGTERM must end it."""
    log = folder / f"{name}.log"
    with log.open("ab") as out:
        running = subprocess.Popen(command, env=dict(environment), stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        yield running
        assert running.poll() is None, f"{name} ended with {running.returncode}: {tail(log)}"
    except AssertionError as error:
        raise AssertionError(f"{error}\n== {log}\n{tail(log)}") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.send_signal(signal.SIGTERM)
        try:
            running.wait(END_S)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
            raise AssertionError(f"{name} did not end within {END_S} s of SIGTERM: {tail(log)}") from None


@contextlib.contextmanager
def laptop(
    kubeconfig: str,
    folder: Path,
    *,
    nodes: tuple[str, ...],
    devices: int,
    namespace: str,
    resource: str,
    operator_options: Sequence[str] | None = None,
) -> Iterator[dict[str, str]]:
    """Run operator and nodes; yield the variables with which kubectl works in ``namespace``.

    The operator has its Lease in that namespace too, unless ``operator_options`` say what it is started with.
    """
    environment = {**os.environ, "KUBECONFIG": str(own_kubeconfig(kubeconfig, folder, namespace))}
    # kubectl finds its plugin beside this interpreter.
    programs = (str(program_path("kubectl", os.environ).parent), str(Path(sys.executable).parent), os.environ["PATH"])
    environment["PATH"] = os.pathsep.join(programs)
    home = folder / "home"
    names = [word for node in nodes for word in ("--name", node)]
    node = [sys.executable, "-m", "polyreme.main", "--home", str(home), "node", *names]
    node += ["--devices", str(devices), "--resource", resource, "--namespace", namespace]
    options = (
        ["--namespace", namespace, "--binding", "NodeAffinity", "--data-gate"]
        if operator_options is None
        else operator_options
    )
    operator = [
        sys.executable,
        "-m",
        "polyreme_operator",
        *options,
        "--checkpoint-root",
        (home / "checkpoints").as_uri(),
    ]
    with process("node", node, environment, folder), process("operator", operator, environment, folder):
        yield environment


def own_kubeconfig(kubeconfig: str, folder: Path, namespace: str) -> Path:
    """Copy a kubeconfig, with another default namespace."""
    path = folder / "kubeconfig"
    path.write_bytes(Path(kubeconfig).read_bytes())
    path.chmod(0o600)
    program = program_path("kubectl", os.environ)
    command = [str(program) if program.exists() else "kubectl", "--kubeconfig", str(path)]
    subprocess.run(
        [*command, "config", "set-context", "--current", f"--namespace={namespace}"], check=True, capture_output=True
    )
    return path


def tail(path: Path) -> str:
    """Return the end of a log."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-LINES_SHOWN:])
