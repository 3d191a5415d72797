"""The dense side of the case `linear`: the best that torch and OpenVINO have, per dtype.

int8: activations come in float32 and are quantised inside the timing, per tensor, as both of torch's ways do; the
row "qlinear u8 in" is given activations that somebody else has quantised (static) and is no baseline of a product
that quantises. int4: groups of 128 along the input; torch's own product takes bfloat16 and adds no bias.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from twofour.engines import GROUP, int4_of_torch, quantize_openvino
from twofour.native import pages

Call = Callable[[], Any]
Copies = Callable[[str, Callable[[], Any]], Sequence[Any]]
"""Name of a layout and how it is made -> as many copies as the cell rotates over."""

LINEAR, ONEDNN, MKL = "F.linear", "oneDNN prepacked", "MKL prepacked"
FBGEMM, TORCH = "quantized.linear_dynamic", "torch int4"
QLINEAR, STATIC, STATIC_U8 = "oneDNN qlinear", "oneDNN qlinear u8 in", "oneDNN qlinear u8 in and out"
OPENVINO, OPENVINO_DYNAMIC = "OpenVINO int4", "OpenVINO int4, int8 activations"
BASELINES = {
    "float32": (LINEAR, ONEDNN, MKL),
    "bfloat16": (LINEAR, ONEDNN),
    "int8": (QLINEAR, FBGEMM),
    "int4": (TORCH, OPENVINO, OPENVINO_DYNAMIC),
}
MKL_BYTES = 1 << 30
"""Bytes of cold copies of MKL's packed weight at most: each takes 8 MB more than the plain one. Fewer flatter it."""

OPENVINO_COPIES = 8
"""Cold copies of an OpenVINO model at most: each is a compiled model. Fewer copies flatter it."""


def candidates(dtype: str, weight: Tensor, bias: Tensor, x: Tensor, copies: Copies) -> dict[str, list[Call]]:
    """Return the dense candidates of a dtype: name to one callable per copy of the weight.

    Args:
        dtype: Computing type.
        weight: float32 (out, in).
        bias: float32 (out,).
        x: float32 (tokens, in).
        copies: Gives the copies of a layout.
    """
    made = {"float32": _floating, "bfloat16": _floating, "int8": _int8, "int4": _int4}[dtype]
    element = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    return made(weight.to(element), bias.to(element), x.to(element), copies)


def _floating(weight: Tensor, bias: Tensor, x: Tensor, copies: Copies) -> dict[str, list[Call]]:
    # oneDNN keeps the plain order for a single token and one blocked order for all other counts.
    order = 1 if len(x) == 1 else 128

    def blocked() -> Tensor:
        return pages.collapse(torch.ops.mkldnn._reorder_linear_weight(weight, order))

    linear = torch.ops.mkldnn._linear_pointwise
    found = {
        LINEAR: [partial(nn.functional.linear, x, w, bias) for w in copies("dense", partial(pages.copy, weight))],
        ONEDNN: [partial(linear, x, w, bias, "none", [], "") for w in copies(f"onednn{order}", blocked)],
    }
    if weight.dtype == torch.float32 and torch.backends.mkl.is_available():
        # Packed for this token count; the plain weight is only looked at for its shape then.
        packed = partial(torch.ops.mkl._mkl_reorder_linear_weight, weight, len(x))
        mkl = torch.ops.mkl._mkl_linear
        found[MKL] = [partial(mkl, x, w, weight, bias, len(x)) for w in copies(f"{MKL}{len(x)}", packed)]
    return found


def _int8(weight: Tensor, bias: Tensor, x: Tensor, copies: Copies) -> dict[str, list[Call]]:
    scales = weight.abs().amax(1).clamp(min=1e-9) / 127
    zeros = torch.zeros(len(weight), dtype=torch.int32)
    levels = (weight / scales[:, None]).round().to(torch.int8)
    shape = [len(x), weight.shape[1]]
    qlinear = torch.ops.onednn.qlinear_pointwise

    def dynamic(packed: Tensor) -> Tensor:
        q = torch.quantize_per_tensor_dynamic(x, torch.quint8, False)
        scale, zero = q.q_scale(), q.q_zero_point()
        return qlinear(q.int_repr(), scale, zero, packed, scales, zeros, bias, 1.0, 0, torch.float32, "none", [], "")

    def static(packed: Tensor, kind: torch.dtype, scale: float, zero: int) -> Tensor:
        return qlinear(qx, x_scale, x_zero, packed, scales, zeros, bias, scale, zero, kind, "none", [], "")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's eager quantisation is deprecated, and still its fastest
        q = torch.quantize_per_tensor_dynamic(x, torch.quint8, False)
        qx, x_scale, x_zero = q.int_repr(), q.q_scale(), q.q_zero_point()
        fbgemm = [
            partial(torch.ops.quantized.linear_dynamic, x, w, False)
            for w in copies("fbgemm", _fbgemm(levels, scales, bias))
        ]
    prepack = torch.ops.onednn.qlinear_prepack
    packed = copies(f"qlinear{len(x)}", lambda: pages.collapse(prepack(levels, shape)))
    return {
        QLINEAR: [partial(dynamic, w) for w in packed],
        FBGEMM: fbgemm,
        STATIC: [partial(static, w, torch.float32, 1.0, 0) for w in packed],
        STATIC_U8: [partial(static, w, torch.uint8, 0.05, 128) for w in packed],
    }


def _fbgemm(levels: Tensor, scales: Tensor, bias: Tensor) -> Callable[[], Any]:
    zeros = torch.zeros(len(levels), dtype=torch.long)
    quantised = torch._make_per_channel_quantized_tensor(levels, scales.double(), zeros, 0)
    return partial(torch.ops.quantized.linear_prepack, quantised, bias)


def _int4(weight: Tensor, bias: Tensor, x: Tensor, copies: Copies) -> dict[str, list[Call]]:
    found: dict[str, list[Call]] = {}
    if weight.shape[1] % GROUP == 0 and weight.shape[0] % 16 == 0:
        packed, scales = int4_of_torch(weight, GROUP)
        half, product = x.bfloat16(), torch.ops.aten._weight_int4pack_mm_for_cpu
        found[TORCH] = [
            partial(product, half, w, GROUP, scales) for w in copies("torch int4", partial(pages.copy, packed))
        ]
    model = functools.cache(partial(_openvino_model, weight, bias, x))  # quantised once, compiled for every copy
    for name, group in ((OPENVINO, 0), (OPENVINO_DYNAMIC, GROUP)):
        # A compiled model has one number of tokens; it starts with its name, which the number of copies goes by.
        requests = copies(f"{name}, {len(x)} tokens", lambda group=group: _openvino(model(), group))
        found[name] = [partial(_infer, request, x.numpy()) for request in requests]
    return found


def _openvino_model(weight: Tensor, bias: Tensor, x: Tensor) -> Any:
    """Return one Linear with int4 weights as an OpenVINO model."""
    import openvino as ov

    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = nn.Parameter(weight, requires_grad=False), nn.Parameter(bias, requires_grad=False)
    model = ov.convert_model(layer, example_input=x)
    model.reshape({0: list(x.shape)})
    return quantize_openvino(model, [(x,)], "int4")


def _openvino(model: Any, dynamic_group: int) -> Any:
    """Compile the model; `dynamic_group` quantises activations in groups of it, 0 leaves them."""
    import openvino as ov

    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "NUM_STREAMS": 1,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": dynamic_group,
    }
    return ov.Core().compile_model(model, "CPU", settings).create_infer_request()


def _infer(request: Any, x: Any) -> Any:
    return request.infer([x], share_inputs=True, share_outputs=True)[0]
