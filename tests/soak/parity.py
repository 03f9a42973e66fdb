"""``make soak-parity``: the whole model against NeMo AutoModel's Kimi-VL, from the files that we export, in float32.

Not part of ``make test``: the package pins libraries of its own, and announces the end of this class. It goes into a
folder of its own, without what it depends on, and ``AUTOMODEL`` names the folder:

    python -m pip install --no-deps --target build/automodel nemo-automodel==0.7.0
    make soak-parity AUTOMODEL=build/automodel

Figures: ``max_difference`` of image features, scores, loss and gradients, over packed documents with none, one and two
images, for drawn weights and for loud ones, with which attention is sharp and a wrong convention shows.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from safetensors.torch import load_file

from polyreme_api.batch import TokenIds
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.loss import token_loss
from polyreme_trainer.model.vlm import KimiVL
from tests.exports import export_model
from tests.unit.trainer.model.conftest import MEDIA, Batch, loud_model, make_batch

TOLERANCE = 1e-5
IMAGES = [slice(0, 1), slice(1, 1), slice(1, 3), slice(3, 4)]
"""Images of each document of the batch."""


def main() -> int:
    """Compare; 0 when nothing differs by more than the tolerance."""
    package = os.environ.get("AUTOMODEL")
    if not package:
        sys.stderr.write(
            "no package: AUTOMODEL is empty, expected a folder with nemo-automodel; tests/soak/parity.py says how\n"
        )
        return 2
    sys.path.append(package)
    warnings.simplefilter("ignore")
    batch = make_batch([14, 9, 21, 6], [[(2, 4)], [], [(4, 4), (2, 6)], [(2, 2)]])
    figures: dict[str, dict[str, float]] = {}
    for kind, model in {"drawn": build_model(KIMI_VL_NANO, seed=3, media_token=MEDIA), "loud": loud_model()}.items():
        with tempfile.TemporaryDirectory() as directory:
            folder = Path(directory) / "e"
            export_model(model.state_dict(), model.shape, folder, tokens=TokenIds(media=MEDIA, end=2, pad=0))
            figures[kind] = _differences(model, _reference(folder), batch)
    sys.stdout.write(json.dumps({"max_difference": figures}, indent=1) + "\n")
    return int(max(value for kind in figures.values() for value in kind.values()) > TOLERANCE)


def _reference(folder: Path) -> Any:
    """Build its model by our configuration, and load our files by its own reading of Kimi-VL's names."""
    package = "nemo_automodel.components.models"
    common = importlib.import_module(f"{package}.common")
    theirs = importlib.import_module(f"{package}.kimivl.model")
    config = json.loads((folder / "config.json").read_text())
    reference = theirs.KimiVLForConditionalGeneration.from_config(
        theirs.KimiVLConfig(
            vision_config=config["vision_config"],
            text_config=config["text_config"],
            media_placeholder_token_id=config["media_placeholder_token_id"],
            pad_token_id=config["pad_token_id"],
        ),
        backend=common.BackendConfig(
            **dict.fromkeys(("linear", "rms_norm", "experts", "dispatcher"), "torch"), attn="sdpa"
        ),
    ).float()
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    renamed = {
        # Its reader puts the head where its module does not have it.
        name.replace("lm_head", "model.language_model.lm_head") if name.startswith("lm_head") else name: tensor.float()
        for name, tensor in reference.state_dict_adapter.from_hf(tensors).items()
    }
    reference.load_state_dict(renamed, strict=True)
    return reference


def _differences(model: KimiVL, reference: Any, batch: Batch) -> dict[str, float]:
    """Run both over the same documents, ours packed, its one by one."""
    grids = torch.tensor(batch.grids)
    features = model.image_features(batch.patches_PC, batch.grids)
    theirs = reference.model._extract_image_features(batch.patches_PC.view(-1, 3, 14, 14), grids)
    output = model(batch.tokens_T, batch.positions_T, batch.offsets, batch.patches_PC, batch.grids)
    total, count = token_loss(output.hidden_TD, model.language_model.lm_head.weight, batch.targets_T)
    (total / count).backward()
    scores = torch.cat([_scores(reference, batch.document(index, images)) for index, images in enumerate(IMAGES)])
    loss = torch.nn.functional.cross_entropy(scores, batch.targets_T)
    loss.backward()
    expected = _gradients(reference)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert gradients.keys() == expected.keys(), gradients.keys() ^ expected.keys()
    return {
        "image features": _largest(features, theirs),
        "scores": _largest(model.logits(output.hidden_TD), scores),
        "loss": _largest(total / count, loss),
        f"{len(gradients)} gradients": max(_largest(gradients[name], value) for name, value in expected.items()),
    }


def _gradients(reference: Any) -> dict[str, Any]:
    """Its gradients by our names; its stacked experts are ours turned."""
    found: dict[str, Any] = {}
    for name, parameter in reference.named_parameters():
        ours = name.removeprefix("model.")
        if ours.endswith("gate_and_up_projs"):
            found[ours.replace("gate_and_up_projs", "gate_up_proj")] = parameter.grad.transpose(1, 2)
        elif ours.endswith("down_projs"):
            found[ours.replace("down_projs", "down_proj")] = parameter.grad.transpose(1, 2)
        else:
            found[ours] = parameter.grad
    return found


def _scores(reference: Any, document: Batch) -> torch.Tensor:
    images: dict[str, torch.Tensor] = {}
    if document.grids:
        images["pixel_values"] = document.patches_PC.view(-1, 3, 14, 14)
        images["image_grid_hws"] = torch.tensor(document.grids)
    scores: torch.Tensor = reference(
        input_ids=document.tokens_T.unsqueeze(0), position_ids=document.positions_T.unsqueeze(0), **images
    )[0]
    return scores


def _largest(ours: Any, theirs: Any) -> float:
    """Largest difference; of values beyond 1, as a part of the largest: float32 has seven digits, wherever they are."""
    return float((ours - theirs).detach().abs().max() / theirs.detach().abs().max().clamp(min=1))


if __name__ == "__main__":
    sys.exit(main())
