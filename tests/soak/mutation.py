"""``make soak-mutation``: one-line bugs in the operator's core, the launchers' protocol and the rule of history.

A fixed list (``mutation_list.json``) of some 400 mutants, spread over the files, against the tests that come to their
lines and some seeds of the simulator; a mutant that changes nothing visible carries the argument why. 100 others are
drawn with a seed of the day (``UNSEEN_SEED=``) and reported separately: no test was written with them in view.
``SAMPLE=60`` runs a part of either, ``ONLY=queueing`` the listed ones of some files or functions; ``UPDATE=1`` renews
the list, and keeps the entries whose code still exists.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import pytest
from hypothesis import HealthCheck, Phase, settings

from polyreme_simulator.run import simulate
from tools.mutation.mutants import Mutant, mutants_of, planted
from tools.mutation.runner import MutationPlugin, Outcome, Verdict

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutation_list.json")
MUTATED = (
    *(f"operator/polyreme_operator/{name}" for name in ("cache", "placement", "queueing", "reconcile", "scheduler")),
    "operator/polyreme_operator/publishing/queue_status.py",
    "operator/polyreme_operator/types/intents.py",
    "trainer/polyreme_launcher/protocol",
    "api/polyreme_api/history.py",
)
TESTS = ("unit/operator", "unit/launcher", "unit/api", "property/operator", "property/launcher", "property/api")
LISTED, UNSEEN = 400, 100
LEAST = 2
"""Mutants of the smallest file."""
SIMULATED = (0, 1, 3, 4, 5, 6, 8)
"""Seeds of the simulator, of different profiles."""
BAR = 0.85
DAY_S = 86_400
TEST_TIMEOUT_S = 300
"""A test that waits for what never comes fails."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One entry of the list."""

    mutant: Mutant
    equivalent: str = ""
    """Why no test can tell it from the original."""


def main() -> int:
    """Run list and unseen mutants; 0 when enough of the list was killed."""
    if os.environ.get("UPDATE"):
        write_list(renewed(read_list()))
        return 0
    began_s = time.perf_counter()
    known = all_mutants()
    listed = read_list()
    found = located(listed, known)
    seed = int(os.environ.get("UNSEEN_SEED") or time.time() // DAY_S)
    sample = int(os.environ.get("SAMPLE") or 0)
    only = os.environ.get("ONLY") or ""
    tried = [entry.mutant for entry in listed if entry.mutant in found and not entry.equivalent]
    tried = _part([mutant for mutant in tried if only in f"{mutant.file} {mutant.function}"], sample)
    unseen = [] if only else _part(draw_unseen(known, set(found.values()), seed), sample)
    outcomes = run({mutant: known[mutant] for mutant in (*(found[each] for each in tried), *unseen)})
    figures: dict[str, Any] = {"mutants": len(listed), **_figures([outcomes[found[each]] for each in tried])}
    figures |= {"equivalent": sum(bool(entry.equivalent) for entry in listed), "gone": len(listed) - len(found)}
    figures |= {f"unseen_{name}": value for name, value in _figures([outcomes[each] for each in unseen]).items()}
    figures |= {"unseen_seed": seed, "wall_s": round(time.perf_counter() - began_s, 1)}
    ok = figures["killed_ratio"] >= BAR
    sys.stdout.write(
        json.dumps({"name": "mutation", "figures": figures, "bar": {"killed_ratio": BAR}, "ok": ok}) + "\n"
    )
    return 0 if ok else 1


def run(mutants: dict[Mutant, range]) -> dict[Mutant, Outcome]:
    """Run the tests against mutants; tell of each that survives."""
    settings.register_profile(
        "mutation",
        deadline=None,
        database=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    outcomes: dict[Mutant, Outcome] = {}
    began_s = time.perf_counter()

    def on_done(outcome: Outcome) -> None:
        outcomes[outcome.mutant] = outcome
        at = f"{len(outcomes)} of {len(mutants)}, {time.perf_counter() - began_s:.0f} s"
        mutant = outcome.mutant
        what = f"{mutant.operator}: {mutant.expression!r}, occurrence {mutant.occurrence}"
        where = f"{mutant.file}:{mutants[mutant].start} {mutant.function}"
        sys.stderr.write(f"[{at}] {outcome.verdict} by {outcome.test or outcome.tests}: {where}: {what}\n")

    plugin = MutationPlugin(
        ROOT,
        mutants,
        extra={f"seed {seed}": lambda seed=seed: not simulate(seed).violations for seed in SIMULATED},  # type: ignore[misc]
        processes=os.cpu_count() or 1,
        on_done=on_done,
    )
    arguments = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--hypothesis-profile=mutation",
        "--hypothesis-seed=0",
    ]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is imported for its profile
    arguments += [f"--timeout={TEST_TIMEOUT_S}", "-m", "not (cluster or device or services or parallel)"]
    os.chdir(ROOT)
    pytest.main([*arguments, *(f"tests/{folder}" for folder in TESTS)], plugins=[plugin])
    return outcomes


# ------------------------------------------------------------------------------------------------------------- the list


def read_list() -> list[Listed]:
    """Return the list."""
    return [
        Listed(
            mutant=Mutant(**{key: value for key, value in entry.items() if key != "equivalent"}),
            equivalent=entry.get("equivalent", ""),
        )
        for entry in json.loads(LIST.read_text("utf-8"))
    ]


def write_list(entries: Iterable[Listed]) -> None:
    """Write the list, an entry a line."""
    lines = []
    for entry in sorted(entries, key=lambda entry: entry.mutant):
        fields = dataclasses.asdict(entry.mutant) | ({"equivalent": entry.equivalent} if entry.equivalent else {})
        lines.append(json.dumps(fields, ensure_ascii=False))
    LIST.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")


def all_mutants() -> dict[Mutant, range]:
    """Return every mutant of the mutated files, and its lines."""
    found: dict[Mutant, range] = {}
    for path in MUTATED:
        files = [ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("*.py"))
        for file in files:
            found |= mutants_of(ROOT, str(file.relative_to(ROOT)))
    return found


def located(entries: Iterable[Listed], known: Iterable[Mutant]) -> dict[Mutant, Mutant]:
    """Return where each listed mutant is now: in its file, or in the one file to which its function has moved."""
    elsewhere: dict[tuple[str, str, str, int], list[Mutant]] = defaultdict(list)
    there = set(known)
    for mutant in there:
        elsewhere[mutant.where].append(mutant)
    found = {}
    for entry in entries:
        moved = elsewhere[entry.mutant.where]
        if entry.mutant in there:
            found[entry.mutant] = entry.mutant
        elif len(moved) == 1:
            found[entry.mutant] = moved[0]
    return found


def renewed(entries: Iterable[Listed]) -> list[Listed]:
    """Return the list for the sources as they are: what still has its place stays, others fill it up file by file."""
    known = all_mutants()
    found = located(entries, known)
    known_before = {found[entry.mutant]: entry.equivalent for entry in entries if entry.mutant in found}
    kept: dict[Mutant, str] = {}
    by_file: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in sorted(known, key=_chance):
        by_file[mutant.file].append(mutant)
    for file, quota in _quotas({file: len(mutants) for file, mutants in by_file.items()}).items():
        before = [mutant for mutant in by_file[file] if mutant in known_before]
        kept |= {mutant: known_before[mutant] for mutant in before}
        for mutant in by_file[file]:
            if sum(each.file == file for each in kept) >= quota:
                break
            if mutant not in kept and planted(ROOT / file, (ROOT / file).read_text("utf-8"), mutant) is not None:
                kept[mutant] = ""
    return [Listed(mutant=mutant, equivalent=why) for mutant, why in kept.items()]


def draw_unseen(known: Iterable[Mutant], listed: set[Mutant], seed: int) -> list[Mutant]:
    """Draw mutants that are not on the list."""
    return random.Random(seed).sample(sorted(set(known) - listed), UNSEEN)


def _quotas(sizes: dict[str, int]) -> dict[str, int]:
    """Share the list among files by their size, largest remainder first."""
    whole = sum(sizes.values())
    shares = {file: max(float(min(LEAST, size)), LISTED * size / whole) for file, size in sizes.items()}
    quotas = {file: int(share) for file, share in shares.items()}
    behind = sorted(shares, key=lambda file: (quotas[file] - shares[file], file))
    for file in behind[: max(0, LISTED - sum(quotas.values()))]:
        quotas[file] += 1
    return quotas


def _chance(mutant: Mutant) -> str:
    return hashlib.sha256(repr(mutant).encode()).hexdigest()


def _part(mutants: list[Mutant], count: int) -> list[Mutant]:
    return sorted(mutants, key=_chance)[: count or None]


def _figures(outcomes: list[Outcome]) -> dict[str, Any]:
    counts = Counter(outcome.verdict for outcome in outcomes)
    tried = len(outcomes) - counts[Verdict.UNPLANTED]
    detected = counts[Verdict.KILLED] + counts[Verdict.TIMEOUT]
    return {
        "tried": tried,
        "killed": counts[Verdict.KILLED],
        "survived": counts[Verdict.SURVIVED],
        "timeout": counts[Verdict.TIMEOUT],
        "unplanted": counts[Verdict.UNPLANTED],
        "killed_ratio": round(detected / tried, 3) if tried else 0.0,
    }


if __name__ == "__main__":
    raise SystemExit(main())
