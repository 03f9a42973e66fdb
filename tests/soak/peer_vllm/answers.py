"""Answers pages by vLLM on a processor, in an environment of its own: answers.py MODEL PAGES TYPE > JSON.

PAGES is a folder of pictures and ``questions.json``, a prompt with one image for each of them by its name, and prompts
of text alone by names that are no picture's. The last line written is a list of the answers' tokens and their
log-probabilities, in the order of ``questions.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}

from PIL import Image
from vllm import LLM, SamplingParams

ANSWER_TOKENS = 8


def main() -> int:
    """Answer all pages at once."""
    model, pages, dtype = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    questions = json.loads((pages / "questions.json").read_text())
    # The compiled rotary kernel of 0.32 rotates queries wrongly on a processor.
    engine = LLM(
        model,
        dtype=dtype,
        enforce_eager=True,
        compilation_config={"custom_ops": ["none"]},
        max_model_len=256,
        max_num_seqs=32,
        enable_prefix_caching=False,
    )
    prompts = []
    for name, prompt in questions.items():
        page = pages / name
        shown = {"multi_modal_data": {"image": Image.open(page).convert("RGB")}} if page.exists() else {}
        prompts.append({"prompt": prompt, **shown})
    made = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, logprobs=1))
    answers = []
    for one in made:
        answer = one.outputs[0]
        scores = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        answers.append({"prompt": list(one.prompt_token_ids), "tokens": list(answer.token_ids), "scores": scores})
    sys.stdout.write("\n" + json.dumps(answers) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
