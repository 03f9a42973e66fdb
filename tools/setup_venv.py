"""Make the virtual environment hold exactly what a lock names, by hash, and the project itself, editable.

Runs on the system's Python with the standard library only. pip installs uv from its own lock, uv installs the rest
(16 s instead of minutes for the 4.6 GB that torch brings). The stamp is written last, so a setup that was killed
half-way runs again.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

DURATION = re.compile(r"(?:(?P<minutes>\d+)m )?(?P<value>[\d.]+)(?P<unit>ms|s)")
UNIT_S = {"ms": 1e-3, "s": 1.0}
PROGRESS_EVERY_S = 10.0
"""Time between two lines about a long download."""
TIMES_NAME = ".setup-times.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Set up, then write the times and the stamp; the exit status is that of the first step that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--uv-lock", type=Path, default=Path("requirements/uv.lock.txt"))
    parser.add_argument("--lock", type=Path, required=True)
    parser.add_argument("--stamp", type=Path, required=True)
    options = parser.parse_args(argv)
    started_s = time.monotonic()
    try:
        create(options.venv)
        bootstrap(options.venv, options.uv_lock)
        report = install(options.venv, options.lock)
    except subprocess.CalledProcessError as error:
        print(f"set-up failed: {' '.join(map(str, error.cmd))} exited with {error.returncode}", file=sys.stderr)
        return 1
    times = {
        "download_s": phase_s(report, "Prepared"),
        "install_s": phase_s(report, "Installed"),
        "setup_s": round(time.monotonic() - started_s, 2),
    }
    write(options.venv / TIMES_NAME, json.dumps(times) + "\n")
    write(options.stamp, "")
    print(f"set up {options.venv} from {options.lock}: {json.dumps(times)}", file=sys.stderr)
    return 0


def create(venv: Path) -> None:
    """Create the environment unless a whole one is there."""
    if (venv / "bin/python").exists() and (venv / "pyvenv.cfg").exists():
        return
    try:
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    except subprocess.CalledProcessError:
        print("python -m venv failed: on Debian and Ubuntu, install the package python3-venv", file=sys.stderr)
        raise


def bootstrap(venv: Path, uv_lock: Path) -> None:
    """Install the pinned uv, by hash, unless it is there."""
    pinned = re.search(r"^uv==(\S+)", uv_lock.read_text(), re.MULTILINE)
    if pinned is None:
        message = f"no version of uv in {uv_lock}; run make lock"
        raise SystemExit(message)
    uv = venv / "bin/uv"
    if uv.exists():
        seen = subprocess.run([uv, "--version"], check=False, capture_output=True, text=True).stdout.split()
        if pinned[1] in seen:
            return
    pip: list[str | Path] = [venv / "bin/python", "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--require-hashes", "--no-deps", "-r", uv_lock], check=True)


def install(venv: Path, lock: Path) -> str:
    """Install the lock, then the project; return what uv said of the lock."""
    environment = {**os.environ, "VIRTUAL_ENV": str(venv.resolve())}
    uv_install: list[str | Path] = [venv / "bin/uv", "pip", "install", "--no-deps"]
    command = [*uv_install, "--require-hashes", "-r", lock]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        said, ended = [], threading.Event()
        showing = threading.Thread(target=show_progress, args=(Path(f"/proc/{process.pid}/io"), ended), daemon=True)
        showing.start()
        for line in process.stderr or ():
            said.append(line)
            if not line.startswith(" + "):
                print(line, end="", file=sys.stderr)
        ended.set()
        showing.join()
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    editable = [*uv_install, "--quiet", "--no-build-isolation", "--editable", "."]
    subprocess.run(editable, check=True, env=environment)
    return "".join(said)


def show_progress(written: Path, ended: threading.Event) -> None:
    """Say from time to time how far a long installation has come; uv's own bars need the terminal for themselves."""
    before = 0
    while not ended.wait(PROGRESS_EVERY_S):
        now = written_mib(written)
        if now > before:
            print(f"{now:,} MiB downloaded and unpacked so far", file=sys.stderr, flush=True)
            before = now


def written_mib(path: Path) -> int:
    """MiB that a process has written, from its ``/proc/PID/io``; 0 where the system does not tell."""
    try:
        found = re.search(r"^wchar: (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) >> 20 if found else 0


def phase_s(report: str, verb: str) -> float:
    """Seconds that uv says a phase took (``Prepared 90 packages in 1m 02s``); 0 for a phase that had nothing to do."""
    line = re.search(rf"^{verb} \d+ packages? in (.+)$", report, re.MULTILINE)
    duration = DURATION.fullmatch(line[1].strip()) if line else None
    if duration is None:
        return 0.0
    return round(60 * int(duration["minutes"] or 0) + float(duration["value"]) * UNIT_S[duration["unit"]], 3)


def write(path: Path, text: str) -> None:
    """Write a small file that is either whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
