"""Products and convolutions by weights of a graph become layers that `prune` sees."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from twofour.graph.algebra.builder import MERGED
from twofour.graph.base import argument, aten, value
from twofour.layers import kind_of, walk

CONVOLUTIONS: dict[Any, type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]] = {
    aten.conv1d.default: nn.Conv1d,
    aten.conv2d.default: nn.Conv2d,
    aten.conv3d.default: nn.Conv3d,
}
LINEARS = (aten.linear.default, aten.addmm.default)

BASE = "base_layer"
"""Name of a layer inside the module whose weight it has, where that module holds other tensors too."""


@dataclass(frozen=True)
class Product:
    """A node that a layer can compute.

    Attributes:
        target: Its operator.
        weight: A whole parameter.
        bias: A whole parameter, None without one.
        options: Stride, padding, dilation and groups of a convolution.
    """

    target: Any
    weight: fx.Node
    bias: fx.Node | None
    options: tuple[tuple[str, Any], ...]


class Layers:
    """Places the weights of a graph in a module, each under the names it had.

    Args:
        root: Takes them.
        model: The captured model: which tensors are parameters, under which names, and which of them train.
        module: The graph.
    """

    def __init__(self, root: nn.Module, model: nn.Module, module: fx.GraphModule) -> None:
        self.root, self.model, self.module = root, model, module
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.stored = set(model.state_dict(keep_vars=True))
        self.aliases = _aliases({**self.parameters, **dict(model.named_buffers(remove_duplicate=False))})
        read = [_name(node) for node in module.graph.nodes if node.op == "get_attr"]
        self.taken = {alias for name in read if MERGED not in name for alias in self.aliases.get(name, [name])}
        self.read = {*self.taken, *(_short(name) for name in read)}
        self.prunable = {name for weight in walk(model, eligibility="any").weights for name in weight.names}
        self.names: dict[str, str] = {}
        self.layers: dict[Product, str] = {}
        self.placed: set[str] = set()
        self.multiplied: list[str] = []
        self.copies: dict[tuple[int, torch.Size, tuple[int, ...], bool], nn.Parameter] = {}

    def place(self, node: fx.Node) -> None:
        """Let a layer compute a product or convolution by a whole weight; products that agree share their layer."""
        found = _product(node)
        if found is None or not self._own(found):
            return
        if found not in self.layers:
            layer = self._linear(found) if found.target in LINEARS else self._conv(found)
            names = self._layer_names(found)
            for name in names:
                self._put(name, layer)
            self.placed.update(names)
            self.layers[found] = names[0]
        x = node.args[1] if found.target is aten.addmm.default else node.args[0]
        with node.graph.inserting_before(node):
            new = node.graph.create_node("call_module", self.layers[found], (x,))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)

    def _linear(self, found: Product) -> nn.Module:
        layer = nn.Linear(1, 1, bias=found.bias is not None, device="cpu", dtype=value(found.weight).dtype)
        layer.weight = self._parameter(found.weight, transposed=found.target is aten.addmm.default)
        layer.out_features, layer.in_features = layer.weight.shape
        if found.bias is not None:
            layer.bias = self._parameter(found.bias)
        return layer

    def _conv(self, found: Product) -> nn.Module:
        held, options = self._parameter(found.weight), dict(found.options)
        inputs, outputs = held.shape[1] * options["groups"], held.shape[0]
        taps: Any = tuple(held.shape[2:])
        kind, biased = CONVOLUTIONS[found.target], found.bias is not None
        layer = kind(inputs, outputs, taps, bias=biased, device="cpu", dtype=held.dtype, **options)
        layer.weight = held
        if found.bias is not None:
            layer.bias = self._parameter(found.bias)
        return layer

    def _own(self, found: Product) -> bool:
        """Tell whether a weight is a layer's: one that others read too must be that of a layer of the model."""
        users = [_product(user) for user in found.weight.users]
        if all(user is not None and user.weight is found.weight for user in users):
            turned = {user.target is aten.addmm.default for user in users if user is not None}
            return len(turned) == 1
        names = self.aliases.get(_name(found.weight), [])
        return found.target is not aten.addmm.default and any(self._of_layer(name) for name in names)

    def _of_layer(self, name: str) -> bool:
        """Tell whether a parameter of the model is the weight of a layer that prune knows."""
        path, _, last = name.rpartition(".")
        kind = kind_of(self.model.get_submodule(path)) if name in self.parameters else None
        return kind is not None and kind.holds(last)

    def _layer_names(self, found: Product) -> list[str]:
        """Return the names of the model's layers with this weight and bias, or a new one."""
        biases = [] if found.bias is None else self.aliases.get(_name(found.bias), [])
        stems = [name.removesuffix(".weight") for name in self.aliases.get(_name(found.weight), [])]
        same = [
            stem
            for stem in stems
            if self._of_layer(f"{stem}.weight") and stem not in self.placed
            if (f"{stem}.bias" in biases if found.bias is not None else f"{stem}.bias" not in self.parameters)
        ]
        names = same or [self.name(re.sub(r"[._]weight$", "", _name(found.weight)))]
        return [self._free(f"{name}.{BASE}" if self._shares(name) else name) for name in names]

    def _shares(self, name: str) -> bool:
        """Tell whether the graph reads tensors of a layer of the model, or inside it, that torch's layer has not."""
        own = (f"{name}.weight", f"{name}.bias")
        return any(other.startswith(f"{name}.") and other not in own for other in self.read)

    def _free(self, name: str) -> str:
        """Return a name that nothing has been placed under."""
        return next(free for free in (name, *(f"{name}_{i}" for i in range(2, 1 << 20))) if not self._has(free))

    def hold(self, node: fx.Node) -> str:
        """Place a tensor that operators read as it is, under all its names; returns one of them."""
        given = _name(node)
        names = [self.name(given), *(name for name in self.aliases.get(given, []) if name != given)]
        merged = MERGED in given
        if (given in self.parameters or merged) and value(node).dtype.is_floating_point:
            held: Tensor = self._parameter(node)
        else:
            held = self._stored(node).clone()
        layers = {found.weight for found in self.layers}
        names = [name for name in names if name.rpartition(".")[0] not in self.placed]
        names = [name for name in names if node not in layers or not self._of_layer(name)]
        names = names or [self._free(given.replace(".", "_"))]
        for name in names:
            self._put_tensor(name, held, persistent=given in self.stored)
        sees = merged and not self.prunable.isdisjoint(node.meta.get("sources", ()))
        if sees or (merged and any(user.target in (*LINEARS, *CONVOLUTIONS) for user in node.users) and held.ndim > 1):
            self.multiplied.append(names[0])
        return names[0]

    def lost(self) -> list[str]:
        """Return the weights that prune sees in the model, or that were merged, and does not see in the new module."""
        kept = set(dict(self.root.named_parameters(remove_duplicate=False)))
        seen = set(walk(self.root, eligibility="any").by_name)
        wanted = [weight.names for weight in walk(self.model, eligibility="any").weights]
        wanted += [(name,) for name in self.multiplied]
        return [names[0] for names in wanted if kept & {*names} and not seen & {*names}]

    def name(self, given: str) -> str:
        """Return the name for a tensor or layer: that of the first merged weight, where nothing else has it."""
        if given not in self.names:
            short = _short(given)
            used = {*self.taken, *self.names.values()}
            free = short not in used and f"{short}.weight" not in used
            self.names[given] = short if free or short == given else given.replace(MERGED, "_merged")
        return self.names[given]

    def _stored(self, node: fx.Node) -> Tensor:
        return getattr(self.module, str(node.target)).detach()

    def _parameter(self, node: fx.Node, transposed: bool = False) -> nn.Parameter:
        """Return a copy of a parameter, one for all names of a tied one; it trains where the model's does."""
        stored = self._stored(node)
        key = stored.data_ptr(), stored.shape, stored.stride(), transposed
        if key not in self.copies:
            names = node.meta.get("sources", (_name(node),))
            trains = any(self.parameters[name].requires_grad for name in names if name in self.parameters)
            copied = stored.t().clone(memory_format=torch.contiguous_format) if transposed else stored.clone()
            self.copies[key] = nn.Parameter(copied, requires_grad=trains)
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

    def _put_tensor(self, name: str, held: Tensor, *, persistent: bool) -> None:
        """Place a tensor; rows that are looked up stay those of an nn.Embedding, which tells prune what they are."""
        path, _, _ = name.rpartition(".")
        found = self.model.get_submodule(path) if name in self.parameters else None
        if self._has(name):
            return
        if type(found) is nn.Embedding and isinstance(held, nn.Parameter) and path and not self._has(path):
            rows = nn.Embedding(1, 1, device="cpu", dtype=held.dtype)
            rows.weight, (rows.num_embeddings, rows.embedding_dim) = held, held.shape
            self._put(path, rows)
        else:
            self._put(name, held, persistent=persistent)


def _product(node: fx.Node) -> Product | None:
    """Return what a layer would compute, None where a node is no product by whole parameters."""
    transposed = node.target is aten.addmm.default
    if node.target not in (*LINEARS, *CONVOLUTIONS) or (transposed and node.kwargs):
        return None
    bias, x, weight = node.args[:3] if transposed else (argument(node, 2, "bias"), *node.args[:2])
    held = [tensor for tensor in (weight, bias) if tensor is not None]
    if not all(isinstance(tensor, fx.Node) and tensor.op == "get_attr" for tensor in held) or x in held:
        return None
    found = value(weight)
    if not isinstance(found, Tensor) or found.ndim < 2 or not found.dtype.is_floating_point:
        return None
    assert isinstance(weight, fx.Node) and (bias is None or isinstance(bias, fx.Node)), node
    names = enumerate((("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1)), 3)
    options = {name: argument(node, index, name, default) for index, (name, default) in names}
    options = {name: tuple(size) if isinstance(size, list | tuple) else size for name, size in options.items()}
    return Product(node.target, weight, bias, tuple(options.items()) if node.target in CONVOLUTIONS else ())


def _aliases(tensors: dict[str, Tensor]) -> dict[str, list[str]]:
    """Return all names of each tensor, by each of them."""
    found: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        found.setdefault(id(tensor), []).append(name)
    return {name: names for names in found.values() for name in names}


def _short(name: str) -> str:
    return re.sub(rf"{re.escape(MERGED)}\d*", "", name)


def _name(node: fx.Node) -> str:
    return str(node.meta.get("weight") or node.target)
