"""Make the checkpoints of other libraries beside this file, with those libraries; committed with what it printed.

Needs an environment with compressed-tensors 0.14.0.1 (the last release that writes these formats), its requirements
and torch; run `python make.py` in this folder. Each checkpoint has an `expected` file: the weights as that library
quantised them, before it packed them.
"""

import json
import warnings
from importlib.metadata import version
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.sparse_quantized_compressors.marlin_24 import Marlin24Compressor
from compressed_tensors.config import BitmaskConfig, Sparse24BitMaskConfig
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from safetensors.torch import save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
PACKAGES = ("compressed-tensors", "torch", "safetensors")


def sparse(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random 2:4 weight; some groups hold a single value, some none."""
    weight = torch.randn(rows, columns)
    kept = weight.view(-1, 4).abs().argsort(-1)[:, 2:]
    keep = torch.zeros(weight.numel() // 4, 4).scatter_(1, kept, 1.0)
    keep[::17] = 0
    keep[5::19, :2] = 0
    return (weight * keep.view_as(weight)).to(dtype)


class Net(nn.Module):
    """Two sparse layers and a dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(36, 64), nn.Linear(64, 48, bias=False), nn.Linear(48, 10)
        self.to(torch.bfloat16).requires_grad_(False)
        self.fc1.weight.copy_(sparse(64, 36))
        self.fc2.weight.copy_(sparse(48, 64))


def write(name: str, state: dict[str, Tensor], expected: dict[str, Tensor], config: dict | None = None) -> None:
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    save_file({key: value.contiguous() for key, value in state.items()}, folder / "model.safetensors", {"format": "pt"})
    save_file({key: value.contiguous() for key, value in expected.items()}, folder / "expected.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


def configured(compressor: ModelCompressor, folder: str) -> None:
    compressor.update_config(str(HERE / folder))


def bitmask(name: str, config: type) -> None:
    model = Net()
    structure = {"targets": ["Linear"], "ignore": ["head"], "sparsity_structure": "2:4"}
    compressor = ModelCompressor(sparsity_config=config(**structure))
    write(name, compressor.compress(model), model.state_dict())
    configured(compressor, name)


def stacked(name: str, kind: str) -> None:
    """Quantised weights under the bitmask, as llm-compressor's 2of4 recipes with W8A8 wrote them."""
    model = Net()
    args = QuantizationArgs(num_bits=8, type=kind, strategy="channel", symmetric=True)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=QuantizationArgs(num_bits=8, type=kind)
    )
    form = {"int": "int-quantized", "float": "float-quantized"}[kind]
    quantization = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["head"], format=form, quantization_status=QuantizationStatus.FROZEN
    )
    apply_quantization_config(model, quantization)
    expected = {}
    # 126, since -128 is lost on the way: the writer looks for the two largest |q| of four, and |-128| is -128 in int8.
    largest = 126 if kind == "int" else 448
    for layer_name, layer in (("fc1", model.fc1), ("fc2", model.fc2)):
        layer.weight_scale.copy_((layer.weight.abs().amax(1, keepdim=True) / largest).clamp(min=1e-4))
        layer.input_scale.fill_(0.5)
        whole = quantize(layer.weight, layer.weight_scale, getattr(layer, "weight_zero_point", None), args)
        expected[f"{layer_name}.weight"] = dequantize(whole, layer.weight_scale)
    expected["head.weight"] = model.head.weight
    compressor = ModelCompressor(
        sparsity_config=Sparse24BitMaskConfig(targets=["Linear"], ignore=["head"]), quantization_config=quantization
    )
    write(name, compressor.compress(model), expected)
    configured(compressor, name)


def marlin() -> None:
    """Every width, grouping and size class of marlin-24: scales are permuted only where 128 < in / 2."""
    shapes = {
        "group": (4, 128, 512),
        "short": (4, 128, 256),
        "channel": (4, None, 96),
        "bytes": (8, None, 64),
        "grouped_bytes": (8, 128, 512),
    }
    state, expected, schemes = {}, {}, {}
    for name, (bits, group, columns) in shapes.items():
        args = QuantizationArgs(
            num_bits=bits, type="int", strategy="group" if group else "channel", group_size=group, symmetric=True
        )
        weight = sparse(64, columns, torch.float16)
        largest = weight.view(64, -1, group or columns).abs().amax(-1)
        scale = (largest / ((1 << bits - 1) - 0.5)).clamp(min=1e-3).to(torch.float16)
        state |= {f"{name}.weight": weight, f"{name}.weight_scale": scale, f"{name}.bias": torch.randn(64).half()}
        expected[f"{name}.whole"] = quantize(weight, scale, None, args).to(torch.int8)
        expected[f"{name}.scale"] = scale
        schemes[name] = QuantizationScheme(targets=["Linear"], weights=args)
    state["norm.weight"] = torch.ones(16, dtype=torch.float16)
    config = {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "marlin-24",
            "version": version("compressed-tensors"),
        }
    }
    write("marlin_24", Marlin24Compressor().compress(state, schemes), expected, config)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(7)
    bitmask("sparse_24_bitmask", Sparse24BitMaskConfig)
    bitmask("sparse_bitmask", BitmaskConfig)
    stacked("bitmask_float8", "float")
    stacked("bitmask_int8", "int")
    marlin()
    (HERE / "versions.json").write_text(json.dumps({name: version(name) for name in PACKAGES}, indent=1) + "\n")
