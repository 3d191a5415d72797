"""Which layers of a model compile can replace, with their weights; and why the others stay as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TypeGuard

import torch
from torch import Tensor, nn

from twofour import masks
from twofour.compiler.computing import FLOAT32, Computing, convolved
from twofour.compiler.plan import LayerPlan
from twofour.compiler.recurrent_kinds import is_recurrent, recurrent_refusal
from twofour.compiler.unpacked import exchanged
from twofour.errors import CompileError, one_of
from twofour.kernels.base import FLOATS
from twofour.kernels.conv import ConvProblem, Geometry, Images
from twofour.kernels.nm_matmul import DYNAMIC, Quantization
from twofour.kernels.problem import Problem
from twofour.layers import (
    compiled_parts,
    is_hugging_face_conv1d,
    kind_of,
    obstacle,
    require_finished,
    require_unwrapped,
)
from twofour.packing import Packed, shape_of
from twofour.patterns import Pattern
from twofour.quantization.carried import LowBits, held_by

_SHOWN = ("weight", "in_proj_weight", "q_proj_weight", "weight_ih_l0", "weight_ih")
"""Names of the weight whose shape the plan shows, of the layers of a kind that a pattern can be laid over."""

NO_IMAGES = "no example: the size of its images is not known"

IN_FLOATS = "it computes in floats that hold its whole numbers"

_PLACED = "nn.MultiheadAttention reads its weights without calling a layer; a graph runs its projections packed"


@dataclass(frozen=True, eq=False)
class LayerWeight:
    """The weight of a layer to be replaced.

    Attributes:
        name: Name of the layer.
        weight: (out, in), or (out, in / groups, [height,] width), as the model or the file holds it.
        bias: float32 (out,) or None.
        rows: Outputs, or output channels.
        columns: Inputs that one output sums over.
        source: What the model or the file holds; the same object for tied weights, alive so that its id is its own.
        computing: How the compiled layer writes it.
        activations: dtype of the layer's input in the model.
        quantization: int8: the input's static range, or dynamic.
        answers: float32 (2, out), the least and greatest of each output on data, where there were data.
        kind: Class of the layer.
        axis: Reduction axis of the weight in the model: 1, or 0 where it stands as (in, out).
        pattern: What the weight obeys: its mask's pattern, the file's, or the one that was found in its zeros; None
            for a dense weight.
        dense_because: Why there is no pattern, "" where there is.
        geometry: Of a convolution, else None.
        images: The input that a convolution's kernel is chosen for.
    """

    name: str
    weight: Packed | Tensor
    bias: Tensor | None
    rows: int
    columns: int
    source: Packed | Tensor
    computing: Computing
    activations: torch.dtype
    quantization: Quantization = DYNAMIC
    kind: str = "Linear"
    axis: int = 1
    pattern: Pattern | None = None
    dense_because: str = ""
    geometry: Geometry | None = None
    images: Images = (0, 0, 0)
    answers: Tensor | None = None

    @property
    def problem(self) -> Problem:
        """What the layer asks of a kernel."""
        if self.geometry is not None:
            return replace(ConvProblem.of(self.geometry), quantization=self.quantization)
        return Problem(self.rows, quantization=self.quantization)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `weight`."""
        return shape_of(self.weight)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense weight."""
        return self.rows * self.columns * self.activations.itemsize

    def encoded(self) -> tuple[Packed | Tensor, str]:
        """Return the weight as the kernels take it, and why it is not packed, "" when it is; made at each call.

        The kernels of convolutions pack a weight themselves.
        """
        if self.geometry is not None:
            return self.weight, self.dense_because
        if self.pattern is None:
            return self.weight.contiguous() if isinstance(self.weight, Tensor) else self.weight, self.dense_because
        if isinstance(self.weight, Packed):
            return self.computing.encode(self.weight, self.pattern)
        return self.computing.encode(self.weight.contiguous(), self.pattern)


def replaceable(
    model: nn.Module, computing: Computing, images: Mapping[str, Images] | None = None
) -> Iterator[tuple[str, LayerWeight]]:
    """Yield the layers that compile replaces, by name: Linear, Conv1D of Hugging Face, and Conv1d and Conv2d.

    Args:
        model: Any module.
        computing: How the compiled layers write their weights.
        images: The inputs of the convolutions; one without stays.

    Raises:
        PatternError: A weight holds NaN or infinity.
    """
    inside_attention = attention_parts(model)
    patterns = {name: mask.pattern for name, mask in masks.of(model).items()}
    for name, module in model.named_modules():
        if not (is_linear(module) or (is_convolution(module) and name in (images or {}))):
            continue
        if refusal(module, name in inside_attention, computing) is None:
            pattern = patterns.get(f"{name}.weight".lstrip("."))
            found = layer_weight(name, module, module.weight, module.bias, computing, pattern)
            yield name, replace(found, images=(images or {}).get(name, found.images))


def is_convolution(module: nn.Module) -> TypeGuard[nn.Conv1d | nn.Conv2d]:
    """Whether a layer is a convolution that there are kernels for."""
    return isinstance(module, nn.Conv1d | nn.Conv2d)


def is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer multiplies by a weight of two axes and adds a bias: Linear, and Conv1D of Hugging Face."""
    return isinstance(module, nn.Linear) or is_hugging_face_conv1d(module)


def layer_weight(
    name: str,
    module: nn.Module,
    weight: Packed | Tensor,
    bias: Tensor | None,
    computing: Computing,
    pattern: Pattern | None = None,
    like: torch.dtype | None = None,
) -> LayerWeight:
    """Describe the weight of a layer.

    Args:
        name: Name of the layer.
        module: The layer.
        weight: Dense or packed, the module's own or a file's, in the module's order: (out, in, ...), or (in, out).
        bias: (out,) or None.
        computing: How the compiled layer writes it.
        pattern: What the weight is said to obey, by its mask or its file; None looks for it in the zeros.
        like: dtype of the model's weight where `weight` is not it but a file's.

    Raises:
        PatternError: The weight holds NaN or infinity.
    """
    kind, axis = ("Conv1D (Hugging Face)", 0) if is_hugging_face_conv1d(module) else ("Linear", 1)
    geometry = Geometry.of(module) if is_convolution(module) else None
    if geometry is not None:
        kind, computing = type(module).__name__, convolved(computing)
    stored = torch.float32 if isinstance(weight, Packed) else weight.dtype
    held = exchanged(weight if isinstance(weight, Packed) else weight.detach(), axis)
    rows, *taps = shape_of(held)
    bias = None if bias is None else bias.detach().float()
    last = held if isinstance(held, Packed) else held.movedim(1, -1)
    pattern, because = computing.pattern_of(name, last, pattern)
    described = (held, bias, rows, prod(taps), weight, computing, like or stored)
    return LayerWeight(
        name, *described, kind=kind, axis=axis, pattern=pattern, dense_because=because, geometry=geometry
    )


def no_kernel(low: LowBits, module: nn.Module) -> str:
    """Return why no kernel multiplies codes for a layer of low bits, "" where some do."""
    if isinstance(module, nn.Conv2d) and (low.widths.inputs is None or low.shifted):
        what = "zero points of weights" if low.widths.inputs else "float inputs"
        return f"no kernel of a convolution takes {what} yet"
    if is_linear(module) and module.weight.dtype not in FLOATS:
        return f"its weight is {module.weight.dtype}, kernels of low bits take float32 and bfloat16"
    return f"padding_mode {module.padding_mode!r}" if getattr(module, "padding_mode", "zeros") != "zeros" else ""


def refusal(module: nn.Module, inside_attention: bool, computing: Computing = FLOAT32) -> str | None:
    """Return why a layer with a weight cannot be replaced, or None when it can."""
    image = is_convolution(module)
    if is_recurrent(module):
        return recurrent_refusal(module, computing)
    if inside_attention or isinstance(module, nn.MultiheadAttention):
        return _PLACED
    if kind_of(module) is None or not (image or is_linear(module)):
        return f"no packed kernel for {type(module).__name__} yet"
    if image and module.padding_mode != "zeros":
        return f"padding_mode {module.padding_mode!r}: the kernels pad with zeros"
    if (low := held_by(module)) is not None:
        return f"{low.widths.name}: {no_kernel(low, module) or 'not chosen yet'}; {IN_FLOATS}"
    if reason := obstacle(module):
        return reason
    if inner := [name for name, _ in module.named_children()]:
        return f"`{inner[0]}` stands inside it, which a replacement would lose"
    weight, takes = module.weight, module.weight.dtype in FLOATS if image else computing.takes(module.weight)
    if not takes or type(weight) is not nn.Parameter or not weight.numel():
        return _unread(weight, FLOAT32.dtype if image else computing.dtype)
    return "convolutions have kernels on CPUs alone" if image and computing.device != "cpu" else None


def _unread(weight: Tensor, dtype: str) -> str:
    """Say that no kernel of a computing type takes a weight, and what to do where its dtype is why."""
    other = weight.is_floating_point() and weight.dtype is not torch.float32 and weight.numel()
    remedy = "; convert the model first: model.float()" if other else ""
    if other and weight.dtype is torch.bfloat16 and weight.ndim == 2:
        remedy += ', or pass dtype="bfloat16"'
    return f"its weight is {weight.dtype} of shape {tuple(weight.shape)}: no {dtype} kernel takes it{remedy}"


def attention_parts(model: nn.Module) -> set[str]:
    """Return the names of all modules inside an nn.MultiheadAttention."""
    return {
        f"{outer}.{inner}".lstrip(".")
        for outer, attention in model.named_modules()
        if isinstance(attention, nn.MultiheadAttention)
        for inner, _ in attention.named_modules()
        if inner
    }


def left_alone(
    model: nn.Module,
    computing: Computing = FLOAT32,
    replaced: Collection[str] = (),
    kept: Collection[str] = (),
) -> list[LayerPlan]:
    """Return a plan entry for every layer that stays and that a pattern could be laid over, with its reason.

    Args:
        model: Any module.
        computing: How the compiled layers write their weights.
        replaced: Layers that are replaced.
        kept: Layers that were kept dense when the model was compiled.
    """
    inside_attention = attention_parts(model)
    entries = []
    for name, module in model.named_modules():
        if name in replaced or kind_of(module) is None:
            continue
        reason = refusal(module, name in inside_attention, computing) or (NO_IMAGES if is_convolution(module) else None)
        reason = "the whole model was faster so where it was compiled" if name in kept else reason
        weight = next((w for shown in _SHOWN if isinstance(w := getattr(module, shown, None), Tensor)), None)
        if reason and weight is not None:
            kind, size = type(module).__name__, sum(p.nbytes for p in module._parameters.values() if _has_axes(p))
            shape = tuple(weight.shape)
            sizes = size, size, size
            entries.append(LayerPlan(name, kind, shape, None, "torch", "", None, None, f"dense: {reason}", *sizes))
    return entries


def _has_axes(parameter: Tensor | None) -> TypeGuard[Tensor]:
    return parameter is not None and parameter.ndim >= 2


def require_tokens(tokens: object) -> None:
    """Refuse token counts that cannot be measured.

    Raises:
        CompileError: They are no sequence of positive whole numbers.
    """
    counts = tokens if isinstance(tokens, Sequence) and not isinstance(tokens, str) else ()
    if not counts or any(type(count) is not int or count < 1 for count in counts):
        raise CompileError(
            "the token counts are impossible",
            got=repr(tokens),
            wanted="a sequence of positive whole numbers",
            remedy="tokens=(1, 8, 32, 128): batch times sequence length of the calls to come",
        )


def require_memory_mode(memory: object) -> None:
    """Refuse a mode that decides which layouts stay in memory.

    Raises:
        CompileError: It is none.
    """
    one_of(
        "the memory is not known",
        memory,
        ("fast", "small"),
        CompileError,
        "'fast' keeps what is fastest, 'small' packed weights alone",
    )


def require_plain(model: nn.Module) -> None:
    """Refuse a model that is compiled already, or in the middle of its training.

    Raises:
        CompileError: It is, or some of its layers are, `model` is no module, or torch.compile has wrapped it.
    """
    require_unwrapped(model, CompileError)
    require_finished(model, CompileError)
    if found := compiled_parts(model):
        raise CompileError(
            "the model is compiled already",
            got=found,
            wanted="the masked or dense model that it was compiled from",
            remedy="compile that one with other options, or twofour.load(path, model, memory=..., graph=...) its file",
        )


def require_no_autocast(model: nn.Module) -> None:
    """Refuse to compile where autocast changes what torch's own products compute in: dense times would be another's.

    Raises:
        CompileError: `torch.autocast` is at work on the model's device.
    """
    on_gpu = any(tensor.is_cuda for tensor in (*model.parameters(), *model.buffers()))
    device = "cuda" if on_gpu else "cpu"  # a model on the meta device is filled on the CPU
    if torch.is_autocast_enabled(device):
        dtype = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        raise CompileError(
            "a model is not compiled inside torch.autocast",
            got=f'torch.autocast("{device}", torch.{dtype}) at work',
            wanted="a call outside of it: the computing type of a compiled model is `dtype`",
            remedy=f'leave the block and pass dtype="{dtype}", or wrap the call in torch.autocast("{device}", '
            "enabled=False)",
        )


def device_of(model: nn.Module) -> str:
    """Return where a model is that kernels can run: "cpu" or "cuda".

    Raises:
        CompileError: A parameter or buffer is elsewhere, or they are on several devices.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    kinds = {device.type for device in devices}
    if kinds == {"cuda"} and len(devices) > 1:
        raise CompileError(
            "the model is on several GPUs",
            got=", ".join(sorted(map(str, devices))),
            wanted="a model on one device",
            remedy="compile each part on its own device",
        )
    if kinds == {"cuda"}:
        return "cuda"
    require_cpu(model)
    return "cpu"


def require_cpu(model: nn.Module, *, meta: bool = False) -> None:
    """Refuse a model on a device without kernels.

    Args:
        model: Any module.
        meta: Accept tensors on the meta device: a file will give them values.

    Raises:
        CompileError: A parameter or buffer is elsewhere than on the CPU.
    """
    devices = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    if devices - {"cpu", *(["meta"] if meta else [])}:
        raise CompileError(
            "the model is on a device without kernels",
            got=", ".join(sorted(devices)),
            wanted="a model on the CPU",
            remedy="model.cpu(), or, for a model on the meta device, load its weights first",
        )
