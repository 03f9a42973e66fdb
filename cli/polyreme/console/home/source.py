"""Runs of a home as the console's port: its index, its files, and ``polyreme`` commands that act on them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from polyreme.console import markup
from polyreme.console.commands import Commands, Started, as_typed
from polyreme.console.home.actions import ACTIONS, Action, run_log, submitted_job
from polyreme.console.home.run_index import RunIndex
from polyreme.console.home.run_reader import RunReader
from polyreme.console.job_form import as_yaml, options_of, read_base
from polyreme.console.log_lines import last_lines
from polyreme.console.run_source import LogPart, Offer, RunCurves, RunList, RunName, RunQuery, Verdict
from polyreme.report.run_summary import STOPPED, describe
from polyreme.report.svg import safe
from polyreme.run_files import logs
from polyreme.run_files.logs import is_served
from polyreme.run_files.paths import Home, RunDirectory
from polyreme.views.formatting import moment
from polyreme.views.output import nearest
from polyreme_api.clock import Clock
from polyreme_api.errors import InvalidConfigError, NotFoundError, PolyremeError, RefusedError
from polyreme_api.exit_codes import ExitCode
from polyreme_system.files import write_atomically

T = TypeVar("T")
THREADS = 4
POLL_S = 1.0


class HomeSource:
    """The runs of one home.

    Args:
        home: Where they are.
        clock: Of this machine.
        on_end: Is called when a command has ended.
    """

    poll_s = POLL_S
    namespace = ""
    states = ("Running", "Starting", "Waiting", "Stopped", "Succeeded", "Failed")
    first_step = "polyreme run job.yaml"

    def __init__(self, home: Home, clock: Clock, on_end: Callable[[], object] = lambda: None) -> None:
        self.home = home
        self.index = RunIndex(home)
        self.reader = RunReader(clock)
        self.commands = Commands(home.path, clock, on_end=on_end)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="pages")

    def close(self) -> None:
        """Read no more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def read(self, work: Callable[[], T]) -> T:
        """Do work that reads files in a thread, so that others are answered meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def directory(self, run: RunName) -> RunDirectory:
        """Return the folder of a run; it may not exist."""
        return self.home.run(run.namespace, run.name)

    async def namespaces(self) -> Sequence[str]:
        """Return the namespaces that have runs."""
        return await self.read(self.index.namespaces)

    async def find(self, query: RunQuery) -> RunList:
        """Return a page of runs, from the index."""
        return await self.read(lambda: self.index.find(query))

    async def manifest(self, run: RunName) -> Mapping[str, Any]:
        """Return the job of a run."""

        def work() -> Mapping[str, Any]:
            file = self.directory(run).job_file
            if not file.is_file():
                raise NotFoundError(f"no run {run.whole[:100]!r} with a job to start from")
            return read_base(file.read_text(encoding="utf-8"))

        return await self.read(work)

    async def overview(self, run: RunName) -> str:
        """Return what was started here about a run, and its report as it is now."""
        return await self.read(lambda: self._overview(run))

    def pages(self, run: RunName) -> Sequence[tuple[str, str]]:
        """Return the pages of a run that only a home has."""
        own = markup.run_path(run.namespace, run.name)
        return (("What a step trains on", f"{own}/preview?step=1"), ("Report", f"{own}/report"))

    async def compared(self, run: RunName) -> RunCurves:
        """Return a run's spec, figures and curves."""

        def work() -> RunCurves:
            folder = self.directory(run)
            if not folder.exists:
                raise NotFoundError("it was deleted, or never was")
            try:
                return self.reader.curves(folder)
            except (ValueError, KeyError) as error:
                raise RefusedError(f"its files are damaged: {str(error)[:300]}") from error

        return await self.read(work)

    def compare_command(self, runs: Sequence[RunName]) -> str:
        """Return the command that prints the comparison."""
        return f"polyreme runs compare {' '.join(map(str, runs))}"

    async def logs(self, run: RunName, name: str) -> LogPart:
        """Return the last lines of a file."""
        return await self.read(lambda: self._logs(run, name))

    async def offers(self, run: RunName) -> Sequence[Offer]:
        """Return the commands that fit a run now."""

        def work() -> list[Offer]:
            folder = self.directory(run)
            if not folder.exists:
                return []
            served = is_served(folder)
            return [_offer(each, folder) for each in ACTIONS if each.while_served is served]

        return await self.read(work)

    async def act(self, run: RunName, action: str, number: int | None) -> None:
        """Start the command of an action."""
        del number
        found = next((each for each in ACTIONS if each.name == action), None)
        if found is None:
            raise NotFoundError(f"no action {action[:64]!r}")
        folder = self.directory(run)
        if not folder.exists:
            raise NotFoundError(f"no run {str(run)!r}: it was deleted, or has not begun")
        if is_served(folder) is not found.while_served:
            words = "is not being served" if found.while_served else "is being served: suspend it first"
            raise RefusedError(f"run {str(run)!r} {words}")
        self.commands.start(found.arguments(folder), subject=run.whole, log=found.log(folder))

    async def check(self, manifest: Mapping[str, Any]) -> Verdict:
        """Have ``polyreme validate`` check a job."""
        return await self.commands.verdict(as_yaml(manifest))

    async def submit(self, manifest: Mapping[str, Any]) -> RunName:
        """Start a job as a run of its own."""
        text = as_yaml(manifest)
        verdict = await self.commands.verdict(text)
        if not verdict.good:
            raise InvalidConfigError(verdict.said)
        metadata = read_base(text)["metadata"]
        run = RunName(namespace=str(metadata.get("namespace") or "default"), name=str(metadata["name"]))
        folder = self.directory(run)
        if folder.exists:
            raise RefusedError(f"run {str(run)!r} exists: choose another metadata.name, or resume it on its page")
        file = submitted_job(folder)
        await asyncio.to_thread(_write, file, text)
        self.commands.start(["run", str(file)], subject=run.whole, log=run_log(folder))
        return run

    def submit_command(self, settings: Sequence[str]) -> str:
        """Return the command that trains the job here."""
        return f"polyreme run job.yaml {options_of(settings)}".rstrip()

    def _overview(self, run: RunName) -> str:
        folder = self.directory(run)
        started = "".join(_started(each) for each in self.commands.of(run.whole)[:3])
        if folder.exists:
            return started + self._sections(folder)
        if not started:
            known = [str(_name_of(other)) for other in self.home.runs()][:10_000]
            raise NotFoundError(f"no run {str(run)!r}: {nearest(str(run), known)}")
        return f"<h1>{safe(str(run))}</h1><p class='lead'>The run starts.</p>{started}"

    def _sections(self, folder: RunDirectory) -> str:
        """Return the report's sections; where its files can't be read, what is known without them."""
        row = describe(folder)
        try:
            return self.reader.sections(folder, stopped=row["message"] if row["state"] == STOPPED else None)
        except PolyremeError as error:
            return markup.notice(str(error), "bad")
        except OSError as error:
            return markup.notice(f"files can't be read: {error}", "bad")
        except (ValueError, KeyError, TypeError) as error:
            words = f"files of this run are damaged, so this is all that is known: {str(error)[:300]}"
            return (
                f"{markup.badge(str(row['state']))}<h1>{safe(str(_name_of(folder)))}</h1>"
                f"<p class='lead'>{safe(row['message'])}</p>{markup.notice(words, 'bad')}"
            )

    def _logs(self, run: RunName, name: str) -> LogPart:
        files = log_files(self.directory(run))
        if not files:
            raise RefusedError(f"run {str(run)!r} has no lines yet")
        if name and name not in files:
            raise RefusedError(f"run {str(run)!r} has no lines of {name[:64]!r} any more; choose another file")
        chosen = name or next(iter(files))
        return LogPart(
            names=tuple(files),
            chosen=chosen,
            lines=last_lines(files[chosen]),
            place=str(files[chosen]),
            command=f"polyreme runs logs {run} -f",
        )


def log_files(run: RunDirectory) -> dict[str, Path]:
    """Return the files with lines of a run, by what they are called; the newest attempt first."""
    ranks = sorted(logs.rank_files(run), key=lambda found: (-found[0].attempt, found[0].rank))
    files = {f"rank {log.rank}, attempt {log.attempt}": path for log, path in ranks}
    others = {"operator": run.host_log, "data": run.data_log, "command": run_log(run)}
    return files | {name: path for name, path in others.items() if path.exists()}


def _name_of(run: RunDirectory) -> RunName:
    return RunName(namespace=run.namespace, name=run.name)


def _offer(action: Action, run: RunDirectory) -> Offer:
    command = as_typed(action.arguments(run))
    return Offer(name=action.name, title=action.title, says=action.says, command=command, harmful=action.harmful)


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text)


def _started(started: Started) -> str:
    if started.code is None:
        head, kind = "is running", ""
    else:
        head, kind = ("is done", "good") if started.code == ExitCode.OK else (f"ended with code {started.code}", "bad")
    output = f"<pre tabindex='0'>{safe(started.output)}</pre>" if started.code else ""
    return (
        f'<div class="notice {kind}" role="status"><p><code>{safe(started.words)}</code> {head}, '
        f"started {moment(started.started_s)}</p>{output}</div>"
    )
