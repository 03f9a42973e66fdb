"""Summary of a run, from its folder alone: one row of a list."""

from __future__ import annotations

from typing import Any

from polyreme.report.write import REPORT_NAME
from polyreme.run_files.identity import read_identity
from polyreme.run_files.paths import RunDirectory
from polyreme.run_files.processes import is_same_process
from polyreme_system.files import read_json

STOPPED = "Stopped"
"""State of a run that has not finished, and that no process serves."""
CONTINUES = "polyreme run with the same file continues it"


def describe(run: RunDirectory) -> dict[str, Any]:
    """Collect what is known of a run, from its folder alone."""
    identity = read_identity(run) or {}
    state = read_json(run.state_file) or {}
    host = identity.get("host", {})
    served = is_same_process(host.get("pid"), host.get("processStartedAt"))
    label = state.get("state", "Unknown")
    if not served and not state.get("finished", False):
        label = STOPPED
    report = run.report / REPORT_NAME
    return {
        "name": run.name,
        "namespace": run.namespace,
        "uid": identity.get("uid") or None,
        "state": label,
        "message": state.get("message", "") if served or state.get("finished") else CONTINUES,
        "attempt": state.get("attempt"),
        "step": state.get("step"),
        "steps": state.get("steps"),
        "loss": state.get("loss"),
        "pid": host.get("pid") if served else None,
        "folder": str(run.path),
        "report": str(report) if report.exists() else None,
    }
