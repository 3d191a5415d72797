"""The link: the place of a masked weight, a parameter's name in a module, and the rule that holds there.

A module holds its links in an ordinary attribute, and every link is also in one process-wide weak set. The parameter
is looked up in the module at each use and never stored: deepcopy, `load_state_dict(assign=True)` and `fully_shard`
replace it, and torch keeps no attribute of the old one. Each place of a tied weight has a link, so that all of them
stay masked once they are untied.
"""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from twofour.errors import MaskError
from twofour.layers import MASKED
from twofour.layers.modules import parameters_of
from twofour.masks import rule as rules
from twofour.masks.rule import Rule

unpickled: list[Callable[[], None]] = []
"""Called after a link was unpickled: `hooks` installs itself here, since that process may never attach a mask."""

_log = logging.getLogger("twofour.masks")
_living: weakref.WeakSet[Link] = weakref.WeakSet()
_lock = threading.Lock()


class Changes:
    """Counts what may give an optimiser's parameters other masks, so that it looks them up again."""

    count = 0

    @classmethod
    def note(cls) -> None:
        """Have every optimiser look its parameters up again, once, at its next step."""
        cls.count += 1


class Link:
    """Ties a rule to a place. Copies and pickles along with its module."""

    def __init__(self, module: nn.Module | None, attribute: str, name: str, rule: Rule) -> None:
        self.attribute = attribute
        self.name = name
        self.rule = rule
        rule.links.add(self)
        self._bind(module)

    def obey(self, rule: Rule) -> None:
        """Have another rule hold in the place."""
        self.rule.links.discard(self)
        self.rule = rule
        rule.links.add(self)

    def _bind(self, module: nn.Module | None) -> None:
        # Weak, since the module owns the link: a strong reference would keep dropped models until the next collection.
        self._module = weakref.ref(module) if module is not None else None
        Changes.note()
        if module is not None:
            with _lock:
                _living.add(self)

    def dissolve(self) -> None:
        """Let the place go; an optimiser that has stepped it may still hold the link."""
        self.rule.links.discard(self)
        with _lock:
            _living.discard(self)

    @property
    def module(self) -> nn.Module | None:
        """The masked module, or None once it is gone."""
        return self._module() if self._module is not None else None

    def standing(self) -> Tensor | None:
        """Return the parameter that stands in the place now, whatever its shape."""
        module = self.module
        return parameters_of(module).get(self.attribute) if module is not None else None

    @property
    def keep(self) -> Tensor:
        """The mask, bool, True where a value is kept, where the parameter is."""
        return self.rule.on(self.standing())

    def parameter(self) -> Tensor:
        """Return the parameter that the module has now.

        Raises:
            MaskError: The module has no such parameter any more, or one of another shape.
        """
        parameter = self.standing()
        if parameter is None:
            raise MaskError(
                f"`{self.name}` can no longer be kept {self.rule.pattern.name}: its module has no parameter "
                f"`{self.attribute}` any more",
                got="a module whose weight is flattened (FSDP1), parametrised or weight-normed after pruning",
                wanted="the parameter itself in the module",
                remedy="prune after that change, use FSDP2 (fully_shard), or let go with twofour.masks.detach(model)",
            )
        if parameter.shape != self.rule.keep.shape:
            raise MaskError(
                f"`{self.name}` and its mask have different shapes",
                got=f"weight {tuple(parameter.shape)}, mask {tuple(self.rule.keep.shape)}",
                wanted="the shape that was pruned; FSDP1 shards a weight flat, FSDP2 (fully_shard) does not",
                remedy="call twofour.masks.detach(model) before changing a weight's shape, then prune again",
            )
        return parameter

    def settle(self) -> Tensor | None:
        """Bring place, parameter and rule together; return the parameter, None where the place has lost it.

        A parameter that obeys a rule brings it along. One that is new here obeys the rule of the place; if the place
        was tied to others, which keep the old parameter, it gets a copy of the rule, and a warning says so.
        """
        parameter = self.standing()
        if parameter is None or parameter.shape != self.rule.keep.shape:
            return None
        known = rules.of_parameter(parameter)
        if known is None:
            others = [link for link in self.rule.links if link is not self]
            tied = [link for link in others if not (link.standing() is None or link.standing() is parameter)]
            if tied:
                self._leave(tied[0])
            rules.put(parameter, self.rule)
        elif known is not self.rule:
            self.obey(known)
        return parameter

    def _leave(self, other: Link) -> None:
        _log.warning(
            "`%s` is no longer the same parameter as `%s`: each is kept %s by itself from now on; "
            "twofour.masks.detach(module) lets one go",
            self.name,
            other.name,
            self.rule.pattern.name,
        )
        self.obey(self.rule.apart(self.name))

    def __deepcopy__(self, memo: dict[int, Any]) -> Link:
        # deepcopy registers a module's copy before it copies the attributes, so the copy is in the memo by now.
        module = memo.get(id(self.module))
        if module is None:
            _log.warning("the copy of `%s` has no mask: its link was copied without its module", self.name)
        return Link(module, self.attribute, self.name, copy.deepcopy(self.rule, memo))

    def __getstate__(self) -> dict[str, Any]:
        names, rule = ("module", "attribute", "name"), self.rule
        return {
            **{name: getattr(self, name) for name in names},
            "rule": (rule.name, rule.pattern, rule.axis, rule.keep),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "rule" not in state:
            raise MaskError(
                "the pickled model is of an earlier version, whose masks were buffers",
                got=f"the link of `{state.get('name')}` without its mask",
                wanted="a model pickled since masks are kept beside the buffers",
                remedy="save its state_dict with the version that wrote it; twofour.masks.derive finds masks in zeros",
            )
        self.attribute, self.name, self.rule = state["attribute"], state["name"], Rule(*state["rule"])
        self.rule.links.add(self)
        self._bind(state["module"])
        for react in unpickled:
            react()


def links_of(module: nn.Module) -> dict[str, Link]:
    """Return the links of one module, by the name of the parameter; empty when it has no mask."""
    links: dict[str, Link] = module.__dict__.get(MASKED, {})
    if any(link.module is not module for link in links.values()):  # copy.copy shares them with the original
        links = {name: Link(module, name, link.name, link.rule) for name, link in links.items()}
        module.__dict__[MASKED] = links
    return links


def living() -> list[Link]:
    """Return the links of all masked modules in this process."""
    with _lock:
        return [link for link in _living if link.module is not None]
