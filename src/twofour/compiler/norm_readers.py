"""What reads the answer of each normalisation: the layers that do, and why one cannot be divided by scales for them.

Each function of torch that a model calls on the data is looked at, and what each module around a normalisation returns:
whatever else reads an answer would read it divided. What the data do not call cannot be seen; a normalisation is left
where parameters of its width were never read, for they may be those of a layer that other calls run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from twofour import calls

ELSEWHERE = "its answer is read elsewhere too"
RETURNED = "its answer is returned by a module around it"
SHARED = "its layers, or their weights, are used for something else too"
_VALUES = {"__setitem__", "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__contains__"}
_VALUES |= {"__bool__", "__float__", "__int__", "__index__"}
"""Functions that return no tensor and read values, or write them."""
_NO_WRITES = {"__invert__", "__index__", "__int__"}


class Readers(TorchFunctionMode):
    """Watches a model run.

    Args:
        model: Any module.
        norms: Its normalisations by name.
        layers: Its layers by name.

    Attributes:
        of: The layers that read the answer of a normalisation, by its name.
    """

    def __init__(self, model: nn.Module, norms: Mapping[str, Any], layers: Mapping[str, Any]) -> None:
        super().__init__()
        self.model, self.norms, self.layers = model, norms, layers
        self.of: dict[str, dict[str, Any]] = {}
        self._answers: dict[int, tuple[str, Tensor]] = {}  # kept, so that its memory is no other's
        self._why: dict[str, str] = {}
        self._weights: dict[int, set[str]] = {}
        for name, layer in layers.items():
            self._weights.setdefault(id(layer.weight), set()).add(name)
        self._sources: dict[str, set[str | None]] = {}
        self._reused = {name for tied in self._weights.values() if len(tied) > 1 for name in tied}
        self._running, self._paused = set[str](), False
        self._unread = dict(_parameters(model))

    def run(self, inputs: Any, answered: Any) -> None:
        """Run the model on a batch; `answered(name, y)` is called with what each normalisation answers."""

        def after(name: str, module: Any, _: Any, __: Any, y: Any) -> None:
            self._running.discard(name)
            if name in self.norms and isinstance(y, Tensor) and y.numel() and y.shape[-1] == module.weight.numel():
                self._answers[_memory(y)] = name, y
                answered(name, y)

        around = {part for name in self.norms for part in _around(name)}
        modules = [(name, module) for name, module in self.model.named_modules() if name in around]
        inner = [*self.norms.items(), *self.layers.items()]
        watching = calls.observing(inner, self._quiet(self._reads), self._quiet(after))
        around_them = calls.observing(modules, None, self._quiet(self._returned))
        with calls.without_fast_paths(), watching, around_them, self:
            calls.call(self.model, calls.fresh(inputs))
        self._answers.clear()
        self._running.clear()

    def obstacle(self, norm: str) -> str:
        """Return why what a normalisation answers cannot be divided, "" where nothing speaks against it."""
        layers = self.of[norm]
        width = self.norms[norm].weight.numel()
        if norm in self._why:
            return self._why[norm]
        if any(self._sources[name] != {norm} or name in self._reused for name in layers):
            return SHARED
        unread = next((name for name, p in self._unread.values() if width in p.shape), "")
        return f"`{unread}`, of its width, is not read on the data" if unread else ""

    def _quiet(self, look: Any) -> Any:
        def called(*args: Any) -> None:
            self._paused = True
            try:
                look(*args)
            finally:
                self._paused = False

        return called

    def _reads(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the layer that is about to run, unless it reads a part of an answer."""
        x = calls.first_input(args, kwargs)
        if name not in self.layers or not isinstance(x, Tensor):
            return
        norm, y = self._answers.get(_memory(x), (None, None))
        if y is None or (x.data_ptr(), x.numel(), x.shape[-1]) == (y.data_ptr(), y.numel(), y.shape[-1]):
            self._running.add(name)
            self._sources.setdefault(name, set()).add(norm)
        if norm is not None:
            self.of.setdefault(norm, {})[name] = module
            self._sources.setdefault(name, set()).add(norm)

    def _returned(self, name: str, _: nn.Module, __: Any, ___: Any, output: Any) -> None:
        for leaf in calls.output_leaves(output):
            norm = self._answers.get(_memory(leaf), ("", None))[0] if isinstance(leaf, Tensor) else ""
            if norm and name in _around(norm):
                self._why.setdefault(norm, RETURNED)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, and look at what it read: views of an answer are the answer."""
        made = func(*args, **(kwargs or {}))
        if self._paused:
            return made
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        named = {name for leaf in read for name in self._weights.get(id(leaf), ())}
        product = bool(named & self._running)
        self._reused |= set() if product else named
        for leaf in read:
            self._unread.pop(id(leaf), None)
            norm = "" if product else self._answers.get(_memory(leaf), ("", None))[0]
            if norm and not _is_view(func, kwargs, made, leaf):
                self._why.setdefault(norm, ELSEWHERE)
        return made


def _is_view(func: Any, kwargs: Any, made: Any, read: Tensor) -> bool:
    """Tell whether a function only passed on what it read, as another view of it or a number of its shape."""
    name = getattr(func, "__name__", "")
    inner = name.startswith("__") and name.endswith("__")
    written = name.startswith("__i") and name not in _NO_WRITES if inner else name.endswith("_")
    tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
    if name in _VALUES or written or "out" in (kwargs or {}):
        return False
    return all(_memory(leaf) == _memory(read) for leaf in tensors)


def _memory(x: Tensor) -> int:
    """Return where the storage of a tensor lies, 0 where it has none."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided and not x.is_nested else 0


def _around(name: str) -> set[str]:
    """Return the names of the modules that a module stands in."""
    parts = name.split(".")
    return {".".join(parts[:end]) for end in range(len(parts))}


def _parameters(model: nn.Module) -> Iterable[tuple[int, tuple[str, Tensor]]]:
    return ((id(p), (name, p)) for name, p in model.named_parameters())
