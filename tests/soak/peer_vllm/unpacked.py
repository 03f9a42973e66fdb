"""Unpacks an export in 4 bits by compressed-tensors: unpacked.py MODEL FILE writes its weights to FILE, in float32.

The scheme is that of the export's ``config.json``. Run it in the environment of vLLM, which brings compressed-tensors.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file


def main() -> int:
    """Write every packed weight under its name."""
    model, file = Path(sys.argv[1]), sys.argv[2]
    config = QuantizationConfig.model_validate(json.loads((model / "config.json").read_text())["quantization_config"])
    (scheme,) = config.config_groups.values()
    packer = BaseCompressor.get_value_from_registry(config.format)
    stored = {name: tensor for part in model.glob("*.safetensors") for name, tensor in load_file(part).items()}
    weights = {}
    for name in (name.removesuffix("_packed") for name in stored if name.endswith("_packed")):
        parts = {f"weight_{part}": stored[f"{name}_{part}"] for part in ("packed", "shape")}
        # It forms products in the type of the scales.
        parts["weight_scale"] = stored[f"{name}_scale"].float()
        weights[name] = packer.decompress(parts, scheme)["weight"]
    save_file(weights, file)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
