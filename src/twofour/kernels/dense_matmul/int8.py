"""The dense int8 product by oneDNN: what an int8 sparse kernel has to beat.

oneDNN uses AMX where the CPU has it, else VNNI. Its product knows one input range per call, so a dynamic range is that
of all tokens together: cheaper and coarser than the sparse kernels' range per token.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from twofour.kernels.base import Kernel, Prepared
from twofour.kernels.native_product import not_plain
from twofour.kernels.operands import plain_bias, require_memory
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.kernels.quantization import DYNAMIC, Quantization, quantize_output
from twofour.native import pages
from twofour.packing import Header, Packed, dense_of
from twofour.packing.encodings import INT8
from twofour.packing.validate import LARGEST_SCALE as LARGEST_STORED
from twofour.patterns import DENSE

LARGEST_SCALE = torch.finfo(torch.float32).max / 255
"""Where the 255 steps of a range span more than float32 holds."""


def whole_rows(weight: Packed | Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 (out, in) and float32 scales (out,): of a packed int8 weight its own, else rounded per row."""
    if (own := own_rows(weight)) is not None:
        return own
    whole, scales, _ = INT8.quantize(dense_of(weight).float())
    return whole.contiguous(), scales.flatten().contiguous()


def own_rows(weight: Packed | Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the whole numbers and scales of a packed int8 weight, None where it has not one scale for each row alone.

    A file's scales may be those of groups of inputs, or stand beside zero points: no dense int8 product has these.
    """
    if not isinstance(weight, Packed) or weight.header.dtype != INT8.name or weight.scales is None:
        return None
    if weight.header.group or weight.zeros is not None:
        return None
    return replace(weight, scales=None).unpack().contiguous(), weight.scales.flatten().contiguous()


def stored_rows(whole: Tensor, scales: Tensor) -> Packed | Tensor:
    """Return what a file holds of a dense int8 weight: all its whole numbers, int8 (out, in), and scales (out,).

    A scale beyond those that files take, of values about as large as float32 has them, leaves the weight in floats.
    """
    if bool((scales > LARGEST_STORED).any()):
        return whole.float() * scales.unsqueeze(1)
    nothing = torch.empty(len(whole), 0, dtype=torch.uint8, device="cpu")
    return Packed(Header(DENSE.name, INT8.name, tuple(whole.shape), 1), whole, nothing, scales.unsqueeze(1).clone())


@dataclass(frozen=True)
class OneDnnInt8Matmul(Kernel):
    """`onednn.qlinear_pointwise` on a prepacked int8 weight with one scale per output channel."""

    def unavailable(self) -> str | None:
        """Return why not: torch was built without oneDNN."""
        return None if torch.backends.mkldnn.is_available() else "this build of torch has no oneDNN"

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return the bytes of the weight in int8."""
        return out_features * in_features

    def beside_bytes(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Return the bytes of scales and zero points."""
        return 4 * out_features, 4 * out_features

    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the weight in oneDNN's order, an opaque int8 tensor; its scales and zero points stand beside it.

        Args:
            weight: Packed, or floating (out, in), which is rounded symmetrically per row.
        """
        _warn_no_more()
        whole, scales = whole_rows(weight)
        prepared = torch.ops.onednn.qlinear_prepack(whole, None)
        pages.collapse(prepared)
        zeros = torch.zeros(len(whole), dtype=torch.int32, device="cpu")
        return Prepared(self, prepared, (scales, zeros))

    def restore(self, prepared: Prepared) -> Tensor:
        """Return the weight as `prepare` rounded it: float32 (out, in)."""
        return prepared.tensor.to_dense().T.float() * prepared.beside[0].unsqueeze(1)

    def stored(self, prepared: Prepared) -> Packed | Tensor:
        """Return whole numbers and scales; see `Kernel.stored`."""
        return stored_rows(prepared.tensor.to_dense().T.contiguous(), prepared.beside[0])

    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Multiply; see `Kernel.run` and `NativeMatmul.run`."""
        if not len(x):  # an empty tensor has no range
            return torch.empty(0, problem.rows, dtype=problem.quantization.output(x), device="cpu")
        require_memory(x)
        bias = plain_bias(bias, problem.rows)
        lost = None
        try:
            whole, scale, zero = _quantize(x, problem.quantization)
        except _NoRangeError:
            x, lost = _without_unbounded(x)
            whole, scale, zero = _quantize(x, DYNAMIC)
        answer = problem.quantization.output(x)
        held = answer if answer.is_floating_point else torch.float32
        y = torch.ops.onednn.qlinear_pointwise(
            whole, scale, zero, weight.tensor, *weight.beside, bias, 1.0, 0, held, "none", [], ""
        )
        y = y if lost is None else y.masked_fill_(lost, torch.nan)
        y = problem.finish(y, other)
        return y if held == answer else quantize_output(y, problem.quantization)


def _quantize(x: Tensor, quantization: Quantization) -> tuple[Tensor, float, int]:
    """Return x as uint8, its scale and its zero point, by torch's own quantisation where the range is found here."""
    if not quantization.plain:
        raise not_plain("dense_matmul of int8", quantization)
    if quantization.x_scale is not None:
        scale, zero = quantization.x_scale, quantization.x_zero
        return x if x.dtype is torch.uint8 else _static(x, scale, zero), scale, zero
    try:
        found = torch.quantize_per_tensor_dynamic(x.float(), torch.quint8, False)
    except RuntimeError:  # of a NaN, or of an infinity above
        raise _NoRangeError from None
    scale = found.q_scale()
    if not scale <= LARGEST_SCALE:  # of an infinity below, or of a span that float32 cannot hold
        raise _NoRangeError
    return found.int_repr(), scale, found.q_zero_point()


class _NoRangeError(Exception):
    """The numbers of a call lie in no range that whole numbers could be spread over."""


def _without_unbounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x with zeros for each token whose numbers span no range, and which these are: (tokens, 1).

    They are the tokens to which `quantize_input` gives the scale NaN, and which sparse kernels answer with NaN.
    """
    low, high = x.float().aminmax(dim=1, keepdim=True)
    lost = ~torch.isfinite(high.clamp(min=0) - low.clamp(max=0))
    return x.masked_fill(lost, 0), lost


def _static(x: Tensor, scale: float, zero: int) -> Tensor:
    return torch.quantize_per_tensor(x.float(), scale, zero, torch.quint8).int_repr()


@cache
def _warn_no_more() -> None:
    """Use up torch's one warning: its quantised tensors are deprecated, and still its fastest way to round an input."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.quantize_per_tensor_dynamic(torch.zeros(1, dtype=torch.float32, device="cpu"), torch.quint8, False)


ONEDNN_INT8 = OneDnnInt8Matmul(
    "dense_matmul_int8_prepacked__onednn", "dense_matmul", "dense", "int8", "cpu", "any", "onednn_int8"
)
