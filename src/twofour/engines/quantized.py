"""How each runtime's own tools make a model of int8 or int4: the settings its documentation gives for transformers."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

GROUP = 128


@contextlib.contextmanager
def _errors_alone(name: str | None) -> Iterator[None]:
    """Let a logger, None for the root, say errors alone inside."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def quantize_openvino(model: Any, samples: Sequence[tuple[Tensor, ...]], dtype: str, weights: bool = False) -> Any:
    """Return the OpenVINO model in int8 or with int4 weights, through nncf.

    int8 is of weights and activations, calibrated on the samples, or of `weights` alone, as its decoders are made: then
    it rounds activations while it runs.
    """
    if dtype not in ("int8", "int4"):
        return model
    try:
        import nncf  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"{dtype} of OpenVINO is made by the package nncf: {error}") from error
    with contextlib.redirect_stdout(io.StringIO()), _errors_alone("nncf"):  # without its progress bars
        return _with_nncf(nncf, model, samples, dtype, weights)


def _with_nncf(nncf: Any, model: Any, samples: Sequence[tuple[Tensor, ...]], dtype: str, weights: bool) -> Any:
    if dtype == "int4":
        mode = nncf.CompressWeightsMode.INT4_ASYM
        return nncf.compress_weights(model, mode=mode, group_size=GROUP, ratio=1.0, all_layers=True)
    if weights:
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
    arrays = [[tensor.contiguous().numpy() for tensor in inputs] for inputs in samples]
    kind = None if samples[0][0].ndim == 4 else nncf.ModelType.TRANSFORMER
    return nncf.quantize(model, nncf.Dataset(arrays), model_type=kind, subset_size=len(arrays))


def quantize_onnx(path: Path, dtype: str) -> Path:
    """Return the file of the ONNX model in int8 (dynamic activations) or with int4 weights in blocks."""
    if dtype not in ("int8", "int4"):
        return path
    target = path.with_stem("quantized")
    if dtype == "int8":
        from onnxruntime.quantization import QuantType, quantize_dynamic

        with _errors_alone(None):
            quantize_dynamic(path, target, per_channel=True, weight_type=QuantType.QInt8)
        return target
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    # accuracy_level 4: activations are quantised to int8 inside the product, its fastest way on a CPU.
    quantizer: Any = MatMulNBitsQuantizer(onnx.load(path), block_size=GROUP, is_symmetric=True, accuracy_level=4)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target), use_external_data_format=False)
    return target


def quantize_torch(model: nn.Module, dtype: str) -> nn.Module:
    """Return a copy whose Linear layers are torch's dynamic int8, or its int4 weights in groups."""
    if dtype == "int8":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.ao.quantization import quantize_dynamic

            return quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    made = copy.deepcopy(model)
    for name, module in list(made.named_modules()):
        if isinstance(module, nn.Linear) and module.in_features % GROUP == 0 and module.out_features % 16 == 0:
            parent, _, leaf = name.rpartition(".")
            setattr(made.get_submodule(parent), leaf, Int4Linear(module))
    return made


class Int4Linear(nn.Module):
    """torch's int4 weight-only Linear: groups of 128 along the input, bfloat16 scales and zeros."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.scales = int4_of_torch(layer.weight.detach(), GROUP)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        flat = x.reshape(-1, x.shape[-1]).bfloat16()
        y = torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.weight, GROUP, self.scales)
        y = y.to(x.dtype).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def int4_of_torch(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return a float weight (out, in) as torch packs int4: the packed bytes, and scales and zeros (groups, out, 2)."""
    rows, columns = weight.shape
    grouped = weight.float().view(rows, columns // group, group)
    scale = (grouped.abs().amax(-1) / 7).clamp(min=1e-9)
    levels = (grouped / scale[..., None]).round().clamp(-8, 7).add(8).to(torch.int32).view(rows, columns)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels, 1)
    pairs = torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1)  # level 8 stands for the zero given
    return packed, pairs.to(torch.bfloat16).contiguous()
