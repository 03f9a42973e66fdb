"""``polyreme sim``: what faults cost under one policy or another, on a simulated clock."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from polyreme.commands.job_arguments import OptionalJobFiles, SetOption
from polyreme.commands.runs import find
from polyreme.job_files import read_documents, the_document
from polyreme.job_overrides import read_manifest
from polyreme.report.comparison import with_status
from polyreme.report.wind_tunnel import build_page
from polyreme.run_files.paths import Home
from polyreme.views.output import Format, emit, emit_tables, note
from polyreme.views.spinner import busy
from polyreme_api.errors import InvalidConfigError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.job import TrainingJobSpec, parse_job
from polyreme_api.job.load import parse_new_job
from polyreme_datahub_service.stored_job import read_stored_job
from polyreme_operator.types.reasons import RUNGS, Scope
from polyreme_system.files import write_atomically
from polyreme_wind_tunnel.causes import DEVICE_MTTF_HOURS, LLAMA3
from polyreme_wind_tunnel.closed_forms import best_interval
from polyreme_wind_tunnel.comparison import Axes, Row, compare, formula, frontier
from polyreme_wind_tunnel.rates import Fitted, fitted
from polyreme_wind_tunnel.scenario import ANY_JOB, Faults, Machines, Recovery, Saves, Scenario

FAULTS_MAX = 2_000_000
"""Most faults of one comparison: five minutes."""
_MACHINES, _FAULTS, _SAVES, _RECOVERY = "Machines", "Faults", "Checkpoints", "Recovery"
_COMPARED = "Several values, with commas between, are compared."


NODES = typer.Option(help="Nodes of the job.", show_default="the job's", rich_help_panel=_MACHINES)
DEVICES = typer.Option(help="Devices of each node.", show_default="the job's, else 8", rich_help_panel=_MACHINES)
RACK = typer.Option(help="Nodes that one switch takes down.", rich_help_panel=_MACHINES)
SPARES = typer.Option(help=f"Nodes in reserve. {_COMPARED}", rich_help_panel=_MACHINES)
FIT = typer.Option(
    help="A run here, or a file with a job and its status (kubectl get tj NAME -o json): simulate with its own faults "
    "and times.",
    rich_help_panel=_FAULTS,
)
MTTF = typer.Option(
    help="Hours between two faults of one device.",
    show_default=f"Llama 3's: {DEVICE_MTTF_HOURS:,.0f}",
    rich_help_panel=_FAULTS,
)
REPAIR = typer.Option(help="Mean time of a repair.", show_default="by cause", rich_help_panel=_FAULTS)
RECALL = typer.Option(help=f"Share of nodes' faults that are predicted. {_COMPARED}", rich_help_panel=_FAULTS)
PRECISION = typer.Option(help="Share of predictions that come true.", rich_help_panel=_FAULTS)
INTERVAL = typer.Option(
    help=f"Seconds of training between checkpoints. {_COMPARED}",
    show_default="the best by formula, its half and its double",
    rich_help_panel=_SAVES,
)
STALL = typer.Option(help="Seconds that one holds up the steps.", show_default="1", rich_help_panel=_SAVES)
DURABLE = typer.Option(help="Seconds after which it can be resumed from.", rich_help_panel=_SAVES)
RUNG = typer.Option(help=f"Least that is restarted: {', '.join(RUNGS)}. {_COMPARED}", rich_help_panel=_RECOVERY)
RESTART = typer.Option(
    help="Seconds to the next step for each of these, with commas.",
    show_default="20,120,300",
    rich_help_panel=_RECOVERY,
)
HANG = typer.Option(help="Seconds until a silent fault is seen.", rich_help_panel=_RECOVERY)


def sim(
    context: typer.Context,
    job: OptionalJobFiles = None,
    settings: SetOption = None,
    nodes: Annotated[int | None, NODES] = None,
    devices: Annotated[int | None, DEVICES] = None,
    nodes_per_rack: Annotated[int, RACK] = 8,
    spares: Annotated[str, SPARES] = "0",
    fit: Annotated[str | None, FIT] = None,
    device_mttf_hours: Annotated[float | None, MTTF] = None,
    repair_hours: Annotated[float | None, REPAIR] = None,
    recall: Annotated[str, RECALL] = "0",
    precision: Annotated[float, PRECISION] = 1.0,
    interval: Annotated[str | None, INTERVAL] = None,
    stall: Annotated[float | None, STALL] = None,
    durable: Annotated[float, DURABLE] = 60.0,
    rung: Annotated[str, RUNG] = Scope.PROCESS.value,
    restart_seconds: Annotated[str | None, RESTART] = None,
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

      polyreme sim --fit job.json --spares 0,4
    """
    spec, measured = _job(context.obj, job, settings, fit)
    base = Scenario(
        machines=_machines(spec, nodes, devices, nodes_per_rack),
        saves=_saves(measured, stall, durable),
        faults=_faults(measured, device_mttf_hours, repair_hours, precision),
        recovery=_recovery(measured, restart_seconds, hang_seconds),
        spec=spec,
    )
    _check_numbers(base, days=days, target=target)
    axes = Axes(
        spares=[_whole(value, "--spares") for value in _values(spares, "--spares")],
        intervals_ms=_intervals(base, interval, measured),
        rungs=_rungs(rung),
        recalls=_values(recall, "--recall"),
    )
    rows = _simulated(axes.scenarios(base), horizon_ms=_ms(days * 86_400), runs=runs, seed=seed)
    border = frontier(base, axes.intervals_ms, target=target)
    _show(base, rows, border, measured, output=output)
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


def _show(
    base: Scenario, rows: list[Row], border: list[tuple[int, float | None]], measured: Fitted | None, *, output: Format
) -> None:
    table = [_row(row) for row in rows]
    allowed = [
        {
            "interval": interval_ms / 1000,
            "longestRecoverySeconds": None if most_ms is None else round(most_ms / 1000, 1),
        }
        for interval_ms, most_ms in border
    ]
    head: dict[str, Any] = {"faultEveryHours": round(base.mttf_ms / 3_600_000, 3)}
    if measured is not None:
        low, high = measured.mttf_range_hours
        head["fitted"] = {
            "faults": measured.faults,
            "deviceHours": round(measured.device_hours, 3),
            "deviceMttfHours": round(measured.device_mttf_hours, 3),
            "deviceMttfHours95": [round(low, 3), round(high, 3)],
            "intervalSeconds": round(measured.interval_ms / 1000, 1),
            "measuredShare": round(measured.effective_share, 4),
        }
    if output is Format.JSON:
        emit("WindTunnel", head | {"policies": table, "frontier": allowed}, output=output)
        return
    emit("WindTunnel", head, output=output, columns=[("a fault every, hours", "faultEveryHours")])
    if measured is not None:
        emit("Fitted", head["fitted"], output=output, columns=FITTED)
    emit_tables([("policies", table, POLICIES), ("longest recovery for the target, by formula", allowed, FRONTIER)])


FITTED = [
    ("faults that the job met", "faults"),
    ("device hours", "deviceHours"),
    ("device hours a fault", "deviceMttfHours"),
    ("the same, 95 % range", "deviceMttfHours95"),
    ("its interval s", "intervalSeconds"),
    ("its measured share", "measuredShare"),
]
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


def _job(
    home: Home, job: list[Path] | None, settings: list[str] | None, fit: str | None
) -> tuple[TrainingJobSpec, Fitted | None]:
    """Return the job that is simulated, and what its own status says about faults.

    Raises:
        InvalidConfigError: If options exclude each other, or the job is refused.
        NotFoundError: If a file or run is missing.
    """
    if job is not None and fit is not None:
        raise InvalidConfigError("--fit names the job already: give one of both", field="JOB or --fit")
    if job is None and settings:
        raise InvalidConfigError("--set changes a job, and none is given", field="JOB or --set")
    if job is not None:
        return parse_new_job(read_manifest(job, settings or ())).spec, None
    if fit is None:
        return ANY_JOB, None
    path = Path(fit)
    if path.is_file():
        found = parse_job(the_document(read_documents(path), path))
    else:
        run = find(home, fit, field="--fit")
        found = with_status(run, read_stored_job(run.job_file))
    return found.spec, fitted(found.spec, found.status)


def _machines(spec: TrainingJobSpec, nodes: int | None, devices: int | None, nodes_per_rack: int) -> Machines:
    """Return the machines: what the options leave out is the job's.

    Raises:
        InvalidConfigError: If neither says how many nodes there are.
    """
    if spec is ANY_JOB:
        if nodes is None:
            raise InvalidConfigError("no machines to simulate: give a job or a number of nodes", field="JOB or --nodes")
        return Machines(nodes=nodes, devices=8 if devices is None else devices, nodes_per_rack=nodes_per_rack)
    workers = spec.workers
    return Machines(
        nodes=workers.replicas if nodes is None else nodes,
        devices=workers.devices if devices is None else devices,
        nodes_per_rack=nodes_per_rack,
    )


def _saves(measured: Fitted | None, stall: float | None, durable: float) -> Saves:
    stall_ms = _ms(stall) if stall is not None else 1000 if measured is None else measured.stall_ms
    return Saves(interval_ms=_ms(durable + 1.0), stall_ms=stall_ms, durable_ms=_ms(durable))


def _faults(
    measured: Fitted | None, device_mttf_hours: float | None, repair_hours: float | None, precision: float
) -> Faults:
    rate = DEVICE_MTTF_HOURS if measured is None else measured.device_mttf_hours
    return Faults(
        device_mttf_hours=rate if device_mttf_hours is None else device_mttf_hours,
        causes=LLAMA3 if measured is None else measured.causes,
        repair_hours=repair_hours,
        precision=precision,
    )


def _intervals(base: Scenario, given: str | None, measured: Fitted | None) -> list[int]:
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
    own = [] if measured is None else [measured.interval_ms]
    return sorted({max(least_ms, interval_ms) for interval_ms in (*(round(best * f) for f in (0.5, 1.0, 2.0)), *own)})


def _recovery(measured: Fitted | None, given: str | None, hang_seconds: float) -> Recovery:
    if given is None and measured is not None:
        # Nothing in a status tells the rungs apart.
        process = pod = gang = measured.restart_ms
        return Recovery(process_ms=process, pod_ms=pod, gang_ms=gang, hang_seen_ms=_ms(hang_seconds))
    if given is None:
        return Recovery(hang_seen_ms=_ms(hang_seconds))
    seconds = _values(given, "--restart-seconds")
    if len(seconds) != len(RUNGS):
        raise InvalidConfigError(
            f"{len(seconds)} values are given, expected {len(RUNGS)}: for {', '.join(RUNGS)}", field="--restart-seconds"
        )
    process, pod, gang = map(_ms, seconds)
    return Recovery(process_ms=process, pod_ms=pod, gang_ms=gang, hang_seen_ms=_ms(hang_seconds))


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
