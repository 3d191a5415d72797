"""Products and convolutions by weights of a graph become layers that `prune` sees."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, fx, nn

from twofour.graph.algebra.builder import MERGED
from twofour.graph.base import argument, aten, value

CONVOLUTIONS: dict[Any, type[nn.Conv1d] | type[nn.Conv2d]] = {
    aten.conv1d.default: nn.Conv1d,
    aten.conv2d.default: nn.Conv2d,
}


class Layers:
    """Places the weights of a graph in a module, each under the name it had.

    Args:
        root: Takes them.
        model: The captured model: which tensors are parameters, and which of them train.
        module: The graph.
    """

    def __init__(self, root: nn.Module, model: nn.Module, module: fx.GraphModule) -> None:
        self.root, self.module = root, module
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.stored = set(model.state_dict(keep_vars=True))
        self.taken = {_name(node) for node in module.graph.nodes if node.op == "get_attr" and MERGED not in _name(node)}
        self.names: dict[str, str] = {}
        self.copies: dict[tuple[int, torch.Size, bool], nn.Parameter] = {}

    def place(self, node: fx.Node) -> None:
        """Let a layer compute a product or convolution by weights that nothing else reads otherwise."""
        made = self._linear(node) if node.target in (aten.linear.default, aten.addmm.default) else self._conv(node)
        if made is None:
            return
        layer, x, weight = made
        name = self.name(re.sub(r"[._]weight$", "", _name(weight)))
        self._put(name, layer)
        with node.graph.inserting_before(node):
            new = node.graph.create_node("call_module", name, (x,))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)

    def _linear(self, node: fx.Node) -> tuple[nn.Module, Any, fx.Node] | None:
        transposed = node.target is aten.addmm.default
        if transposed and node.kwargs:
            return None
        bias: Any
        weight: Any
        bias, x, weight = node.args[:3] if transposed else (argument(node, 2, "bias"), *node.args[:2])
        if not self._layer_like(node, weight, bias):
            return None
        layer = nn.Linear(1, 1, bias=bias is not None, device="cpu", dtype=value(weight).dtype)
        layer.weight = self._parameter(weight, transposed)
        layer.out_features, layer.in_features = layer.weight.shape
        if bias is not None:
            layer.bias = self._parameter(bias)
        return layer, x, weight

    def _conv(self, node: fx.Node) -> tuple[nn.Module, Any, fx.Node] | None:
        kind = CONVOLUTIONS.get(node.target)
        if kind is None:
            return None
        x: Any
        weight: Any
        x, weight, *_ = node.args
        bias = argument(node, 2, "bias")
        if not self._layer_like(node, weight, bias):
            return None
        held = self._parameter(weight)
        names = enumerate((("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1)), 3)
        options: dict[str, Any] = {name: argument(node, index, name, default) for index, (name, default) in names}
        options = {name: tuple(size) if isinstance(size, list | tuple) else size for name, size in options.items()}
        inputs, outputs = held.shape[1] * options["groups"], held.shape[0]
        taps: Any = tuple(held.shape[2:])
        layer = kind(inputs, outputs, taps, bias=bias is not None, device="cpu", dtype=held.dtype, **options)
        layer.weight = held
        if bias is not None:
            layer.bias = self._parameter(bias)
        return layer, x, weight

    def _layer_like(self, node: fx.Node, weight: Any, bias: Any) -> bool:
        """Tell whether weight and bias are whole parameters that this node alone reads."""
        tensors = [held for held in (weight, bias) if held is not None]
        whole = all(isinstance(held, fx.Node) and held.op == "get_attr" and len(held.users) == 1 for held in tensors)
        if not whole or isinstance(value(weight), Tensor) is False:
            return False
        return value(weight).ndim > 1 and value(weight).dtype.is_floating_point

    def hold(self, node: fx.Node) -> str:
        """Place a tensor that operators read as it is; returns its name."""
        name = self.name(_name(node))
        if name in self.names.values() and self._has(name):
            return name
        if (_name(node) in self.parameters or MERGED in _name(node)) and value(node).dtype.is_floating_point:
            self._put(name, self._parameter(node))
        else:
            self._put(name, self._stored(node).clone(), persistent=_name(node) in self.stored)
        return name

    def name(self, given: str) -> str:
        """Return the name for a tensor or layer: that of the first merged weight, where nothing else has it."""
        if given not in self.names:
            short = re.sub(rf"{re.escape(MERGED)}\d*", "", given)
            used = {*self.taken, *self.names.values()}
            free = short not in used and f"{short}.weight" not in used
            self.names[given] = short if free or short == given else given.replace(MERGED, "_merged")
        return self.names[given]

    def _stored(self, node: fx.Node) -> Tensor:
        return getattr(self.module, str(node.target)).detach()

    def _parameter(self, node: fx.Node, transposed: bool = False) -> nn.Parameter:
        """Return a copy of a parameter, one for all names of a tied one; it trains where the model's does."""
        stored = self._stored(node)
        key = stored.data_ptr(), stored.shape, transposed
        if key not in self.copies:
            found = self.parameters.get(_name(node))
            copied = stored.t().clone(memory_format=torch.contiguous_format) if transposed else stored.clone()
            self.copies[key] = nn.Parameter(copied, requires_grad=found is None or found.requires_grad)
        return self.copies[key]

    def _has(self, name: str) -> bool:
        path, _, last = name.rpartition(".")
        try:
            return hasattr(self.root.get_submodule(path), last)
        except AttributeError:
            return False

    def _put(self, name: str, held: nn.Module | Tensor, *, persistent: bool = True) -> None:
        parent = self.root
        *path, last = name.split(".")
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        if isinstance(held, nn.Module):
            if last in parent._modules:  # a place for parameters beside the layer's own
                raise AssertionError(name)
            parent.add_module(last, held)
        elif isinstance(held, nn.Parameter):
            parent.register_parameter(last, held)
        else:
            parent.register_buffer(last, held, persistent=persistent)


def _name(node: fx.Node) -> str:
    return str(node.meta.get("weight") or node.target)
