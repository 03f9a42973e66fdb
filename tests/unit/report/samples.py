"""A made-up run for the report's tests: two kills, a mixture that grows, pages of noise."""

from __future__ import annotations

import math
import random
import struct
import zlib

from polyreme.report.data import (
    AnsweredPage,
    AttemptRow,
    CheckpointRow,
    DeadLetterRow,
    Figures,
    HeldOutSet,
    MixtureWeights,
    ReportData,
    StageRow,
    TimeShare,
)
from polyreme_api.progress import StepRecord
from polyreme_planner.layout import Layout
from polyreme_planner.plan import Plan
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_planner.traffic_volume import group_volumes

START_S = 1_760_000_000.0


def record(attempt: int, step: int, *, at_s: float, loss: float) -> StepRecord:
    return StepRecord(attempt=attempt, step=step, loss=loss, tokens=640, step_s=0.08, ended_at_s=START_S + at_s)


def png(side: int, seed: int) -> bytes:
    """A grey picture of noise, valid and small."""
    pixels = random.Random(seed).randbytes(side * side)
    rows = b"".join(b"\0" + pixels[row * side : (row + 1) * side] for row in range(side))
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )


def loss_of(step: int) -> float:
    bump = sum(0.9 * math.exp(-(step - at) / 30) for at in (200, 300, 400) if step >= at)
    return 4.2 * math.exp(-step / 70) + 0.03 + bump + 0.06 * random.Random(step).random()


def plan() -> Plan:
    layout = Layout(dp=4, ep=2)
    return Plan(
        shape=KIMI_VL_NANO,
        replicas=2,
        devices=2,
        layout=layout,
        packs_per_step=4,
        pack_tokens=160,
        volumes=group_volumes(layout, shape=KIMI_VL_NANO, tokens_per_rank=160),
    )


def two_kills() -> ReportData:
    """800 steps in three attempts: killed at 237 and at 561, resumed from 200 and 550."""
    spans = [(1, 1, 237, 3.0), (2, 201, 561, 25.0), (3, 551, 800, 58.0)]
    records = [
        record(attempt, step, at_s=at_s + (step - first + 1) * 0.08, loss=loss_of(step))
        for attempt, first, last, at_s in spans
        for step in range(first, last + 1)
    ]
    until = {1: 200, 2: 550, 3: 800}
    attempts = [
        AttemptRow(number=1, scope="Start", started_s=START_S, first_step=1, last_step=237,
                   ended_s=START_S + 23, cause="RankKilled", message="rank 2 ended by SIGKILL"),
        AttemptRow(number=2, scope="RestartProcess", started_s=START_S + 23.5, first_step=201,
                   last_step=561, ended_s=START_S + 54.5, cause="PodLost", message="pod of worker 1 is gone"),
        AttemptRow(number=3, scope="RestartPod", started_s=START_S + 55, first_step=551,
                   last_step=800, ended_s=START_S + 86, succeeded=True),
    ]  # fmt: skip
    pages = [
        AnsweredPage(png=png(28 + 14 * (n % 4), n), question="Which digits?", expected=str(n * 37 % 1000),
                     answer=str(n * 37 % 1000 if n % 9 else 7), right=n % 9 != 0, set_name="three-digits")
        for n in range(1, 90)
    ]  # fmt: skip
    return ReportData(
        title="quickstart",
        outcome="Succeeded",
        reason="All 800 steps are trained and 91.3 % of 240 held-out pages are answered exactly, after two kills.",
        written_s=START_S + 90,
        figures=Figures(
            wall_s=86.0, attempts=3, restart_s=3.4, tokens_per_second=7950.0, held_out_ratio=219 / 240, goodput=0.74
        ),
        job_yaml="apiVersion: polyreme.dev/v1alpha1\nkind: TrainingJob\n",
        plan=plan(),
        steps_planned=800,
        steps=sorted((r for r in records if r.step <= until[r.attempt]), key=lambda r: r.step),
        thrown_away=[r for r in records if r.step > until[r.attempt]],
        attempts=attempts,
        time_shares=[
            TimeShare(name="Retained steps", seconds=64.0, counts=True),
            TimeShare(name="First start", seconds=8.1),
            TimeShare(name="Lost steps (RankKilled)", seconds=13.9),
        ],
        mixture=[
            MixtureWeights(step=1, weights={"one": 1, "two": 0}),
            MixtureWeights(step=200, weights={"one": 1, "two": 1}),
            MixtureWeights(step=300, weights={"one": 1, "two": 1, "three": 1}, skip_steps=12),
            MixtureWeights(step=400, weights={"one": 1, "two": 1, "three": 1, "four": 2}),
        ],
        stages=[
            StageRow(dataset="sample/digits-1", stage=stage, processed=1500, reused=reused, dead_letters=dead)
            for stage, reused, dead in (("decode", 0, 2), ("compose", 1498, 0), ("tokenize", 1498, 0))
        ],
        dead_letters=[
            DeadLetterRow(dataset="sample/digits-1", stage="decode", record="page-0017", error="no PNG: truncated")
        ],
        held_out=[
            HeldOutSet(name="one-digit", samples=60, right=60),
            HeldOutSet(name="two-digits", samples=60, right=58),
            HeldOutSet(name="three-digits", samples=60, right=54),
            HeldOutSet(name="four-digits", samples=60, right=47),
        ],
        pages=pages,
        checkpoints=[
            CheckpointRow(name="a000003-s00000800", size_bytes=12_400_000, committed=True),
            CheckpointRow(name="a000002-s00000600", size_bytes=3_100_000, committed=False),
        ],
        environment={"polyreme": "0.1.0", "torch": "2.13.0", "cores": "2"},
    )
