"""``polyreme sim``: what faults cost under one policy or another, on a simulated clock."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme.commands.job_arguments import OptionalJobFiles, SetOption
from polyreme.job_overrides import read_manifest
from polyreme.report.wind_tunnel import build_page
from polyreme.views.output import Format, emit, emit_tables, note
from polyreme.views.spinner import busy
from polyreme_api.errors import InvalidConfigError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.job.load import parse_new_job
from polyreme_operator.types.reasons import Scope
from polyreme_system.files import write_atomically
from polyreme_wind_tunnel.causes import DEVICE_MTTF_HOURS
from polyreme_wind_tunnel.closed_forms import best_interval
from polyreme_wind_tunnel.comparison import Axes, Row, compare, formula, frontier
from polyreme_wind_tunnel.scenario import ANY_JOB, RUNGS, Faults, Machines, Recovery, Saves, Scenario

FAULTS_MAX = 2_000_000
"""Most faults of one comparison: five minutes."""
_MACHINES, _FAULTS, _SAVES, _RECOVERY = "Machines", "Faults", "Checkpoints", "Recovery"
_COMPARED = "Several values, with commas between, are compared."


NODES = typer.Option(help="Nodes of the job.", show_default="the job's", rich_help_panel=_MACHINES)
DEVICES = typer.Option(help="Devices of each node.", show_default="the job's, else 8", rich_help_panel=_MACHINES)
RACK = typer.Option(help="Nodes that one switch takes down.", rich_help_panel=_MACHINES)
SPARES = typer.Option(help=f"Nodes in reserve. {_COMPARED}", rich_help_panel=_MACHINES)
MTTF = typer.Option(help="Hours between two faults of one device; Llama 3's.", rich_help_panel=_FAULTS)
REPAIR = typer.Option(help="Mean time of a repair.", show_default="by cause", rich_help_panel=_FAULTS)
RECALL = typer.Option(help=f"Share of nodes' faults that are predicted. {_COMPARED}", rich_help_panel=_FAULTS)
PRECISION = typer.Option(help="Share of predictions that come true.", rich_help_panel=_FAULTS)
INTERVAL = typer.Option(
    help=f"Seconds of training between checkpoints. {_COMPARED}",
    show_default="the best by formula, its half and its double",
    rich_help_panel=_SAVES,
)
STALL = typer.Option(help="Seconds that one holds up the steps.", rich_help_panel=_SAVES)
DURABLE = typer.Option(help="Seconds after which it can be resumed from.", rich_help_panel=_SAVES)
RUNG = typer.Option(help=f"Least that is restarted: {', '.join(RUNGS)}. {_COMPARED}", rich_help_panel=_RECOVERY)
RESTART = typer.Option(help="Seconds to the next step for each of these, with commas.", rich_help_panel=_RECOVERY)
HANG = typer.Option(help="Seconds until a silent fault is seen.", rich_help_panel=_RECOVERY)


def sim(
    job: OptionalJobFiles = None,
    settings: SetOption = None,
    nodes: Annotated[int | None, NODES] = None,
    devices: Annotated[int | None, DEVICES] = None,
    nodes_per_rack: Annotated[int, RACK] = 8,
    spares: Annotated[str, SPARES] = "0",
    device_mttf_hours: Annotated[float, MTTF] = round(DEVICE_MTTF_HOURS),
    repair_hours: Annotated[float | None, REPAIR] = None,
    recall: Annotated[str, RECALL] = "0",
    precision: Annotated[float, PRECISION] = 1.0,
    interval: Annotated[str | None, INTERVAL] = None,
    stall: Annotated[float, STALL] = 1.0,
    durable: Annotated[float, DURABLE] = 60.0,
    rung: Annotated[str, RUNG] = Scope.PROCESS.value,
    restart_seconds: Annotated[str, RESTART] = "20,120,300",
    hang_seconds: Annotated[float, HANG] = 120.0,
    days: Annotated[float, typer.Option(help="Simulated time of a run.")] = 30.0,
    runs: Annotated[int, typer.Option(min=1, max=1000, help="Runs of each policy.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of the first run.")] = 0,
    target: Annotated[float, typer.Option(help="Effective share of time that is asked for.")] = 0.9,
    page: Annotated[Path | None, typer.Option(help="Write pictures to this HTML file.")] = None,
    output: Annotated[Format, typer.Option("-o", "--output", help="Output format.")] = Format.TABLE,
) -> int:
    """Simulate what faults cost a job, and compare spares, checkpoint intervals, rungs of recovery and prediction.

    Faults come as in Llama 3's training (419 in 54 days on 16,384 GPUs), and the job's own failure policy decides
    what follows each. Nothing is started, and no cluster is asked. Exit codes: 0, or 2 if an option is refused.

    Examples:

      polyreme sim --nodes 2048 --spares 0,16,64

      polyreme sim job.yaml --interval 300,600,1200 --durable 120 --page sim.html

      polyreme sim --nodes 128 --recall 0,0.5 --precision 0.8 -o json
    """
    if job is None and settings:
        raise InvalidConfigError("--set changes a job, and none is given", field="JOB or --set")
    spec = ANY_JOB if job is None else parse_new_job(read_manifest(job, settings or ())).spec
    base = Scenario(
        machines=Machines(
            nodes=_nodes(nodes, None if job is None else spec.workers.replicas),
            devices=devices if devices is not None else 8 if job is None else spec.workers.devices,
            nodes_per_rack=nodes_per_rack,
        ),
        saves=Saves(interval_ms=_ms(durable + 1.0), stall_ms=_ms(stall), durable_ms=_ms(durable)),
        faults=Faults(device_mttf_hours=device_mttf_hours, repair_hours=repair_hours, precision=precision),
        recovery=_recovery(restart_seconds, hang_seconds),
        spec=spec,
    )
    _check_numbers(base, days=days, target=target)
    axes = Axes(
        spares=[_whole(value, "--spares") for value in _values(spares, "--spares")],
        intervals_ms=_intervals(base, interval),
        rungs=_rungs(rung),
        recalls=_values(recall, "--recall"),
    )
    rows = _simulated(axes.scenarios(base), horizon_ms=_ms(days * 86_400), runs=runs, seed=seed)
    border = frontier(base, axes.intervals_ms, target=target)
    _show(base, rows, border, output=output)
    for reason in dict.fromkeys(row.reason for row in rows if row.reason):
        note(f"some runs failed: {reason} (spec.failurePolicy)")
    if page is not None:
        write_atomically(page, build_page(rows, border, target=target))
        note(f"pictures: {page}")
    return ExitCode.OK


def _simulated(scenarios: list[Scenario], *, horizon_ms: int, runs: int, seed: int) -> list[Row]:
    """Simulate all policies, with a bar on a terminal.

    Raises:
        InvalidConfigError: If that would take too long.
    """
    expected = len(scenarios) * runs * horizon_ms / scenarios[0].mttf_ms
    if expected > FAULTS_MAX:
        raise InvalidConfigError(
            f"about {expected:,.0f} faults would be simulated, at most {FAULTS_MAX:,} are; lower one of them",
            field="--days or --runs",
        )
    rows: list[Row] = []
    with busy(f"simulating {len(scenarios)} policies") as say:
        for row in compare(scenarios, horizon_ms=horizon_ms, runs=runs, seed=seed):
            rows.append(row)
            say(f"simulated {len(rows)} of {len(scenarios)} policies")
    return rows


def _show(base: Scenario, rows: list[Row], border: list[tuple[int, float | None]], *, output: Format) -> None:
    table = [_row(row) for row in rows]
    allowed = [
        {
            "interval": interval_ms / 1000,
            "longestRecoverySeconds": None if most_ms is None else round(most_ms / 1000, 1),
        }
        for interval_ms, most_ms in border
    ]
    head = {"faultEveryHours": round(base.mttf_ms / 3_600_000, 3), "policies": table, "frontier": allowed}
    if output is Format.JSON:
        emit("WindTunnel", head, output=output)
        return
    emit("WindTunnel", head, output=output, columns=[("a fault every, hours", "faultEveryHours")])
    emit_tables(
        [
            ("policies", table, POLICIES),
            ("longest recovery for the target, by formula", allowed, FRONTIER),
        ]
    )


POLICIES = [
    ("spares", "spares"),
    ("interval s", "intervalSeconds"),
    ("least restart", "rung"),
    ("recall", "recall"),
    ("ETTR", "effectiveShare"),
    ("+-", "error"),
    ("by formula", "formula"),
    ("recomputed", "recomputed"),
    ("starting", "starting"),
    ("detecting", "detecting"),
    ("waiting", "waitingForNodes"),
    ("stalls", "checkpointStall"),
    ("faults a day", "faultsPerDay"),
    ("failed runs", "failedRuns"),
]
FRONTIER = [("interval s", "interval"), ("longest recovery s", "longestRecoverySeconds")]


def _row(row: Row) -> dict[str, Any]:
    scenario = row.scenario
    named = {kind.value[0].lower() + kind.value[1:]: round(share, 4) for kind, share in row.shares.items()}
    return {
        "spares": scenario.machines.spares,
        "intervalSeconds": round(scenario.saves.interval_ms / 1000, 1),
        "rung": scenario.lowest_rung.value,
        "recall": scenario.faults.recall,
        "effectiveShare": round(row.effective_share, 4),
        "error": None if math.isinf(row.error) else round(row.error, 4),
        "formula": round(formula(scenario), 4),
        **named,
        "faultsPerDay": round(row.faults_per_day, 3),
        "movesPerDay": round(row.moves_per_day, 3),
        "failedRuns": round(row.given_up, 3),
    }


def _nodes(given: int | None, of_job: int | None) -> int:
    """Return the nodes of the job.

    Raises:
        InvalidConfigError: If neither the options nor a job say how many.
    """
    nodes = of_job if given is None else given
    if nodes is None:
        raise InvalidConfigError("no machines to simulate: give a job or a number of nodes", field="JOB or --nodes")
    return nodes


def _check_numbers(base: Scenario, *, days: float, target: float) -> None:
    """Refuse numbers that are out of their range.

    Raises:
        InvalidConfigError: Naming the option.
    """
    positive = {
        "--days": days,
        "--device-mttf-hours": base.faults.device_mttf_hours,
        "--repair-hours": 1.0 if base.faults.repair_hours is None else base.faults.repair_hours,
    }
    for option, value in positive.items():
        if not 0.0 < value < math.inf:
            raise InvalidConfigError(f"{option} is {value:g}, expected more than 0", field=option)
    if not 0.0 < target < 1.0:
        raise InvalidConfigError(f"--target is {target:g}, expected between 0 and 1", field="--target")


def _intervals(base: Scenario, given: str | None) -> list[int]:
    if given is not None:
        return [_ms(value) for value in _values(given, "--interval")]
    saves = base.saves
    best = best_interval(
        mttf=base.mttf_ms,
        stall=saves.stall_ms,
        durable=saves.durable_ms,
        restart=base.recovery.start_ms(Scope.PROCESS),
    )
    least_ms = saves.durable_ms - saves.stall_ms + 1
    return sorted({max(least_ms, round(best * factor)) for factor in (0.5, 1.0, 2.0)})


def _recovery(given: str, hang_seconds: float) -> Recovery:
    seconds = _values(given, "--restart-seconds")
    if len(seconds) != len(RUNGS):
        raise InvalidConfigError(
            f"{len(seconds)} values are given, expected {len(RUNGS)}: for {', '.join(RUNGS)}", field="--restart-seconds"
        )
    process, pod, gang = map(_ms, seconds)
    return dataclasses.replace(Recovery(), process_ms=process, pod_ms=pod, gang_ms=gang, hang_seen_ms=_ms(hang_seconds))


def _rungs(given: str) -> list[Scope]:
    found = [name.strip() for name in given.split(",") if name.strip()]
    for name in found:
        if name not in {each.value for each in RUNGS}:
            raise InvalidConfigError(f"unknown rung: {name!r}, known are {', '.join(RUNGS)}", field="--rung")
    return [Scope(name) for name in found]


def _values(given: str, option: str) -> list[float]:
    """Read numbers with commas between.

    Raises:
        InvalidConfigError: If there is none, or one is no number of 0 or more.
    """
    found = [part.strip() for part in given.split(",") if part.strip()]
    try:
        values = [float(part) for part in found]
    except ValueError:
        values = []
    if not values or not all(0.0 <= value < math.inf for value in values):
        raise InvalidConfigError(f"{given!r} is no list of numbers of 0 or more, with commas between", field=option)
    return values


def _whole(value: float, option: str) -> int:
    if value != int(value):
        raise InvalidConfigError(f"{value:g} is no whole number", field=option)
    return int(value)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
