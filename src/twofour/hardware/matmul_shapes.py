"""Products: which matrix products a model runs on an example, found on the meta device without computing any."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twofour import calls
from twofour.errors import HardwareError
from twofour.layers import walk

aten = torch.ops.aten
_VIEWS = {aten.t, aten.transpose, aten.view, aten._unsafe_view, aten.permute, aten.slice, aten.detach, aten.expand}
_VIEWS |= {aten.alias, aten.reshape, aten.select, aten.unsqueeze, aten.squeeze, aten.split, aten.chunk, aten.clone}
_VIEWS |= {aten._to_copy, aten.unbind, aten.split_with_sizes, aten.empty}
_SAME = {aten.relu, aten.relu_, aten.gelu, aten.silu, aten.tanh, aten.sigmoid, aten._softmax, aten.dropout}
_SAME |= {aten.silu_, aten.hardtanh_, aten._safe_softmax}
_BINARY = {aten.add, aten.add_, aten.mul, aten.sub, aten.div}
_NORMS = {aten.native_batch_norm, aten._native_batch_norm_legit_no_training, aten.native_layer_norm}
_FORWARD = {aten.convolution, aten.addmm, aten.baddbmm, aten.linear}
"""Products that no gradient consists of."""
_NORM_GRADIENTS = {aten.native_batch_norm_backward, aten.native_layer_norm_backward, aten.native_group_norm_backward}
_BATCH_NORMS = {aten.native_batch_norm: 1, aten.native_batch_norm_backward: 2}
"""Operations whose result has the shape of an operand: torch works that out in Python, 5000 calls for a layer norm."""


@dataclass(frozen=True)
class Product:
    """One product of (m, k) by (k, n), `batch` of them in one launch.

    Attributes:
        weight: Name of the parameter that is an operand; None between activations.
        m: Tokens.
        n: Outputs.
        k: Reduction.
        batch: Products in the launch: heads, groups.
        taps: Of a convolution: places of the input that an output sees in one channel.
        positions: Of a convolution: places of the input, all samples; None of other products, m there.
        input_gradient: Whether a training step asks for the gradient of the operand of m, the layer's input.
        weight_gradient: Whether it asks for that of the operand of n, the weight.
    """

    weight: str | None
    m: int
    n: int
    k: int
    batch: int = 1
    taps: int = 1
    positions: int | None = None
    input_gradient: bool = False
    weight_gradient: bool = False

    @property
    def values(self) -> int:
        """Of the weight, or of the operand of n."""
        return self.n * self.k * self.batch

    @property
    def repeats(self) -> float:
        """How often an input's value stands in the matrix (m, k) of a convolution; memory holds it once."""
        return max(1.0, self.m * self.taps / self.positions) if self.positions else 1.0

    @property
    def depthwise(self) -> bool:
        """Whether each channel has filters of its own: libraries multiply them by no matrix units."""
        return self.positions is not None and self.batch > 1 and self.k == self.taps


@dataclass(frozen=True)
class Traced:
    """What a model runs: its products, and the values that all other operations read and write.

    Attributes:
        products: Those of the forward pass, in the order they run.
        values: Of all other operations of the forward pass.
        norms: Of a training step: values that norms read and write, forward and back.
        elementwise: Of a training step: those of all other operations.
        anew: Whether the way back computes something of the forward pass a second time, as checkpoints do.
    """

    products: tuple[Product, ...]
    values: int
    norms: int = 0
    elementwise: int = 0
    anew: bool = False


class Recorder(TorchDispatchMode):
    """Notes each product, and which tensors are views of which parameter."""

    def __init__(self, names: Mapping[int, str], keep: list[Tensor]) -> None:
        super().__init__()
        self.names, self.keep = dict(names), keep  # kept: the id of a dead tensor may be given again
        self.products: list[Product] = []
        self.values = self.norms = 0
        self.backward = self.anew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        result = None if torch.is_grad_enabled() and packet in _NORMS else _shaped(packet, args)
        if result is None:
            result = func(*args, **(kwargs or {}))
        if packet in _VIEWS:
            self._inherit(args, result)
        elif (found := self.products_of(packet, args, result)) is not None:
            self.products += [] if self.backward else found
            self.anew |= self.backward and packet in _FORWARD
        elif packet is not aten.convolution_backward:
            self.note(packet, (args, tuple((kwargs or {}).values()), result))
        return result

    def note(self, packet: Any, tensors: Any) -> None:
        """Count what an operation reads and writes; a batch norm of a training step reads its inputs a second time."""
        found = [leaf for leaf in _tensors(tensors) if leaf.is_floating_point() and id(leaf) not in self.names]
        again = _BATCH_NORMS.get(packet, 0)
        values = sum(leaf.numel() for leaf in found) + sum(leaf.numel() for leaf in found[:again])
        self.values += values
        self.norms += values * (packet in _NORMS or packet in _NORM_GRADIENTS)

    def _inherit(self, args: Any, result: Any) -> None:
        name = next((self.names[id(a)] for a in args if isinstance(a, Tensor) and id(a) in self.names), None)
        if name is not None:
            for leaf in tree_leaves(result):
                self.names[id(leaf)] = name
                self.keep.append(leaf)

    def products_of(self, packet: Any, args: Any, result: Any) -> list[Product] | None:
        """Return the products that an operation is, None where it is none."""
        if packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.linear):
            left, right = args[1:3] if packet in (aten.addmm, aten.baddbmm) else args[:2]
            if packet is aten.linear:
                return [self._matrix(left, right, left.numel() // left.shape[-1], right.shape[0], right.shape[1])]
            batch = left.shape[0] if left.ndim == 3 else 1
            return [self._matrix(left, right, left.shape[-2], right.shape[-1], left.shape[-1], batch)]
        if packet is aten.convolution:
            return [self._convolution(args, result)]
        if "scaled_dot_product" in str(packet):
            query, key, value = args[:3]
            batch, length, width = math.prod(query.shape[:-2]), query.shape[-2], query.shape[-1]
            return [
                Product(None, length, key.shape[-2], width, batch, **_asked(query, key)),
                Product(None, length, value.shape[-1], key.shape[-2], batch, **_asked(query, value)),
            ]
        return None

    def _matrix(self, left: Tensor, right: Tensor, m: int, n: int, k: int, batch: int = 1) -> Product:
        name = self.names.get(id(right))
        if name is None and id(left) in self.names:  # W x instead of x W
            return Product(self.names[id(left)], n, m, k, batch, **_asked(right, left))
        return Product(name, m, n, k, batch, **_asked(left, right))

    def _convolution(self, args: Any, result: Tensor) -> Product:
        given, weight, transposed, groups = args[0], args[1], args[6], args[8]
        positions = math.prod((given if transposed else result).shape[2:]) * result.shape[0]
        taps = math.prod(weight.shape[2:])
        rows, columns = weight.shape[0] // groups, weight.shape[1]
        name, asked = self.names.get(id(weight)), _asked(given, weight)
        if transposed:
            return Product(name, positions, columns * taps, rows, groups, **asked)
        places = math.prod(given.shape[2:]) * given.shape[0]
        return Product(name, positions, rows, columns * taps, groups, taps, places, **asked)


def _asked(given: Tensor, weight: Tensor) -> dict[str, bool]:
    """Say which gradients of a product a training step asks for."""
    wanted = torch.is_grad_enabled()
    return {
        "input_gradient": wanted and given.requires_grad,
        "weight_gradient": wanted and weight.requires_grad,
    }


class _Shortcuts(TorchFunctionMode):
    """Takes linear layers, and attention seen before, ahead of torch, which makes many operations of each."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder
        self.seen: dict[Any, tuple[list[Product], int, torch.Size]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and len(args) >= 2:
            given, weight = args[:2]
            name = self.recorder.names.get(id(weight))
            fits = name is not None and weight.ndim == 2 and given.shape[-1:] == weight.shape[1:]
            if fits and given.dtype == weight.dtype:
                rows, columns = weight.shape
                self.recorder.products.append(Product(name, given.numel() // columns, rows, columns))
                return empty_like((*given.shape[:-1], rows), given)
        if func is F.scaled_dot_product_attention:
            return self._attention(args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _attention(self, args: Any, kwargs: Any) -> Tensor:
        """Note what the same shapes noted before; parameters as operands are never the same."""
        given = (*args, *kwargs.values())
        parts = [(p.shape, p.dtype) if isinstance(p, Tensor) else p for p in given]
        key = (tuple(kwargs), *parts)
        known = not any(id(p) in self.recorder.names for p in given)
        if known and key in self.seen:
            products, values, shape = self.seen[key]
            self.recorder.products += products
            self.recorder.values += values
            return empty_like(shape, next(p for p in given if isinstance(p, Tensor)))
        count, values = len(self.recorder.products), self.recorder.values
        result = F.scaled_dot_product_attention(*args, **kwargs)
        if known:
            noted = self.recorder.products[count:]
            self.seen[key] = (noted, self.recorder.values - values, result.shape)
        return result


def _tensors(values: tuple[Any, ...] | list[Any]) -> Iterator[Tensor]:
    """Tensors of an operation's arguments and results: torch's own walk of them took a quarter of an estimate."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def empty_like(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return a tensor of that shape and another one's type, on the meta device."""
    return torch.empty(shape, dtype=like.dtype, device="meta")


def _shaped(packet: Any, args: Any) -> Any:
    """Return a tensor of the result's shape where an operand has it; None where torch has to say."""
    first = args[0]
    if packet in _SAME:
        return empty_like(first.shape, first)
    if packet in _NORMS:
        none = empty_like((0,), first)
        return empty_like(first.shape, first), none, none
    if packet in _BINARY:
        second = args[1]
        if not first.is_floating_point() or not isinstance(second, Tensor):
            return empty_like(first.shape, first) if first.is_floating_point() else None
        if second.dtype == first.dtype:
            same = first.shape == second.shape
            return empty_like(first.shape if same else torch.broadcast_shapes(first.shape, second.shape), first)
    if packet in (aten.mm, aten.addmm):
        left, right = args[-2:]
        return empty_like((left.shape[0], right.shape[1]), left) if left.shape[1] == right.shape[0] else None
    return None


def prepared(model: nn.Module, example: Any) -> tuple[Recorder, dict[str, Tensor], calls.Example]:
    """Return a recorder, the model's tensors on the meta device, and the example there."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    found = walk(model)  # of a weight's names that of the layer that multiplies, not of an embedding
    multiplied = [entry.name for entry in (*found.weights, *found.skipped) if entry.name in parameters]
    unique = {id(parameters[name]): name for name in multiplied}
    shared = {name: unique.setdefault(id(tensor), name) for name, tensor in parameters.items()}
    first = {name: parameters[name].detach().to("meta") for name in unique.values()}
    for name, tensor in first.items():  # also where nothing is trained: torch folds batches by it
        tensor.requires_grad_(parameters[name].requires_grad)
    meta = {name: first[shared[name]] for name in parameters}
    names = {id(tensor): name for name, tensor in first.items()}
    buffers = {name: tensor.to("meta") for name, tensor in model.named_buffers(remove_duplicate=False)}
    given = calls.Example.of(example).map(lambda leaf: _on_meta(leaf) if isinstance(leaf, Tensor) else leaf)
    return Recorder(names, list(meta.values())), {**meta, **buffers}, given


def _on_meta(leaf: Tensor) -> Tensor:
    return leaf.detach().to("meta").requires_grad_(leaf.requires_grad)


def trace(model: nn.Module, example: Any) -> Traced:
    """Run the model's shapes on the meta device and return its products in the order they run.

    Args:
        model: Any module; it is neither changed nor computed.
        example: A tensor, a tuple of positional arguments or a dict of keyword arguments.

    Raises:
        HardwareError: The model reads values, which the meta device has none of, or does not run on the example.
    """
    recorder, tensors, given = prepared(model, example)
    wanted, remedy = calls.FORMS, "leave the example out and give tokens=: its Linear layers alone are priced then"
    with (
        calls.evaluating(model),
        torch.no_grad(),
        calls.explaining(HardwareError, "the shapes of the example alone", wanted=wanted, remedy=remedy),
        recorder,
        _Shortcuts(recorder),
    ):
        torch.func.functional_call(model, tensors, given.args, given.kwargs, tie_weights=False)
    return Traced(tuple(recorder.products), recorder.values)


def require_products(model: nn.Module, traced: Traced) -> None:
    """Refuse a model without products, and an example without values.

    Raises:
        HardwareError: It has none, or one of them multiplies nothing.
    """
    if any(not (p.m and p.n and p.k and p.batch) for p in traced.products):
        raise HardwareError(
            "the example is empty",
            got="a product without values",
            wanted="a sample, or more",
            remedy="give an example whose sizes are not zero",
        )
    if not traced.products:
        raise HardwareError(
            "the model runs no matrix product",
            got=type(model).__name__,
            wanted="a linear layer, a convolution or attention",
            remedy="estimate a model with weights",
        )


def linears(model: nn.Module, tokens: int) -> Traced:
    """Return one product for each linear weight of the model, each on `tokens` rows, without running anything."""
    found = walk(model, eligibility="any")
    entries = [
        entry for entry in found.weights if entry.kind in ("linear", "hf_conv1d", "attention_in", "attention_out")
    ]
    return Traced(tuple(Product(entry.name, tokens, entry.rows, entry.reduction) for entry in entries), 0)
