"""The link: what a masked module carries beside its mask buffer, so that the process-wide hooks find it.

A module holds its links in an ordinary attribute, and every link is also in one process-wide weak set. The parameter
is looked up in the module at each use and never stored: deepcopy, `load_state_dict(assign=True)` and `fully_shard`
replace it, and torch keeps no attribute of the old one.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from twofour.errors import MaskError
from twofour.layers import Reduction, is_distributed, local, placed
from twofour.patterns import Pattern

LINKS = "_twofour_links"
"""Attribute of a masked module: a dict from the parameter's name in the module to its `Link`."""

unpickled: list[Callable[[], None]] = []
"""Called after a link was unpickled: `hooks` installs itself here, since that process may never attach a mask."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_log = logging.getLogger("twofour.masks")
_living: weakref.WeakSet[Link] = weakref.WeakSet()
_lock = threading.Lock()


class Link:
    """Ties a mask buffer to the parameter it rules. Copies and pickles along with its module."""

    def __init__(self, module: nn.Module | None, attribute: str, name: str, pattern: Pattern, axis: Reduction) -> None:
        self.attribute = attribute
        self.name = name
        self.pattern = pattern
        self.axis = axis
        self._bind(module)

    def _bind(self, module: nn.Module | None) -> None:
        # Weak, since the module owns the link: a strong reference would keep dropped models until the next collection.
        self._module = weakref.ref(module) if module is not None else None
        if module is not None:
            with _lock:
                _living.add(self)

    @property
    def module(self) -> nn.Module | None:
        """The masked module, or None once it is gone."""
        return self._module() if self._module is not None else None

    @property
    def keep(self) -> Tensor:
        """The mask, bool, True where a value is kept; sharded as its parameter is from the first look after that was.

        Raises:
            MaskError: The buffer was removed by hand.
        """
        module = self.module
        keep = module._buffers.get(buffer_name(self.attribute)) if module is not None else None
        if keep is None:
            raise MaskError(
                f"the mask buffer of `{self.name}` is gone",
                got="no buffer of its name",
                wanted=f"a bool buffer `{buffer_name(self.attribute)}` in the module",
                remedy="remove masks with twofour.masks.detach(model), which removes the link as well",
            )
        parameter = module._parameters.get(self.attribute) if module is not None else None
        if module is None or parameter is None or is_distributed(keep) or not is_distributed(parameter):
            return keep
        if parameter.shape == keep.shape and not keep.is_meta:
            keep = module._buffers[buffer_name(self.attribute)] = placed(keep, parameter)
        return keep

    def parameter(self) -> Tensor:
        """Return the parameter that the module has now.

        Raises:
            MaskError: The module has no such parameter any more, or one of another shape.
        """
        module = self.module
        parameter = module._parameters.get(self.attribute) if module is not None else None
        if parameter is None:
            raise MaskError(
                f"`{self.name}` can no longer be kept {self.pattern.name}: its module has no parameter "
                f"`{self.attribute}` any more",
                got="a module whose weight is flattened (FSDP1), parametrised or weight-normed after pruning",
                wanted="the parameter itself in the module",
                remedy="prune after that change, use FSDP2 (fully_shard), or let go with twofour.masks.detach(model)",
            )
        if parameter.shape != self.keep.shape:
            raise MaskError(
                f"`{self.name}` and its mask have different shapes",
                got=f"weight {tuple(parameter.shape)}, mask {tuple(self.keep.shape)}",
                wanted="the shape that was pruned; FSDP1 shards a weight flat, FSDP2 (fully_shard) does not",
                remedy="call twofour.masks.detach(model) before changing a weight's shape, then prune again",
            )
        return parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> Link:
        # deepcopy registers a module's copy before it copies the attributes, so the copy is in the memo by now.
        module = memo.get(id(self.module))
        if module is None:
            _log.warning("the copy of `%s` has no mask: its link was copied without its module", self.name)
        return Link(module, self.attribute, self.name, self.pattern, self.axis)

    def __getstate__(self) -> dict[str, Any]:
        names = ("module", "attribute", "name", "pattern", "axis")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.attribute, self.name, self.pattern = state["attribute"], state["name"], state["pattern"]
        self.axis = state.get("axis", Reduction())  # pickled before other axes than 1 were known
        self._bind(state["module"])
        for react in unpickled:
            react()


def buffer_name(attribute: str) -> str:
    """Name of the mask buffer of a parameter: "weight_mask"."""
    return f"{attribute}_mask"


def links_of(module: nn.Module) -> dict[str, Link]:
    """Return the links of one module, by the name of the parameter; empty when it has no mask."""
    return module.__dict__.get(LINKS, {})


def living() -> list[Link]:
    """Return the links of all masked modules in this process."""
    with _lock:
        return [link for link in _living if link.module is not None]


def fill_pruned(tensor: Tensor, keep: Tensor) -> None:
    """Set the pruned entries of `tensor` to exactly +0, in place, whatever they held (NaN, infinity, -0.0).

    A sharded tensor is filled in the part that this process holds.
    """
    keep, tensor = local(placed(keep, tensor)), local(tensor)
    # The bits times 0 or 1: exact for any value, and 16 times as quick as masked_fill_ (0.5 against 8 ms for 2**20).
    tensor.detach().view(_BITS[tensor.element_size()]).mul_(keep.to(tensor.device, torch.bool))


def keeps(tensor: Tensor, keep: Tensor) -> bool:
    """Whether `tensor` is zero wherever `keep` is False; NaN is not zero, -0.0 is."""
    return not bool((tensor.ne(0) & keep.to(tensor.device).logical_not()).any())
