"""What is attached to a model for training: what else would change its weights asks here first.

An attachment that works on weights is in a registry until it ends. One that takes a layer's place gives the layer a
class of its own and keeps in the module what that class computes with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.nn.utils import parametrize

from twofour.errors import TrainingError, TwofourError
from twofour.layers.modules import named_modules

# Not in the modules: a copy of a model is not under the scheme of the original, and a reference would not pickle.
_REGISTRY: WeakKeyDictionary[nn.Module, ReferenceType[Attachment]] = WeakKeyDictionary()

CARRIED = "_twofour_attached"
"""Attribute of a module that another class was put over: what that class computes with, of a class with a `title`, and
`backward_only` where it is a training's products. It goes along with copies and pickles of the module."""

MASKED = "_twofour_links"
"""Attribute of a masked module, in which `masks` keeps what holds there; it goes along with copies and pickles."""

STORED = "_twofour_stored"
"""Attribute of a parameter that holds fewer values than the state dict does in its place: the shape there."""


def stored_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape in which a state dict holds what a parameter stands for."""
    return tuple(getattr(parameter, STORED, parameter.shape))


def is_masked(module: nn.Module) -> bool:
    """Return whether a parameter of the module itself is under a mask."""
    return bool(module.__dict__.get(MASKED))


class Attachment(ABC):
    """What is attached to a model for training, until `finish` or `remove`.

    Attributes:
        model: The model that is being trained.
        title: What it is called in messages.
        layers: Names of the weights or layers that it works on.
        attached: Whether it still is.
    """

    def __init__(self, model: nn.Module, title: str = "") -> None:
        self.model, self.title = model, title
        self.layers: tuple[str, ...] = ()
        self.attached = True
        self._held: tuple[nn.Module, ...] = ()

    def __repr__(self) -> str:
        return f"{self.title}: {len(self.layers)} layers{'' if self.attached else ', over'}"

    @abstractmethod
    def finish(self) -> nn.Module:
        """Make the model plain and masked, as if it had been pruned; returns it. The attachment is over."""

    @abstractmethod
    def remove(self) -> nn.Module:
        """Take it off and leave the weights as the optimiser left them; returns the model."""

    def step(self) -> None:
        """Count one optimiser step, after it; most have nothing to do, but not once they are over."""
        self._require_attached()

    def penalty(self) -> Tensor | float:
        """Return what is to be added to the loss of a step."""
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must hold beside the states of model and optimiser."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            TrainingError: The state is of another attachment, or this one is over.
        """
        self._require_attached()
        if state:
            raise TrainingError(
                "the state is of another attachment",
                got=f"keys {', '.join(map(str, state))}",
                wanted=f"the empty one of {self.title}",
                remedy="load the model's and the optimiser's own states, which hold all of it",
            )

    def _begin(self, title: str, modules: Iterable[nn.Module]) -> None:
        """Note that it works on the weights of these modules until its end."""
        self._held, self.title = tuple(modules), title
        for module in self._held:
            _REGISTRY[module] = ref(self)

    def _end(self) -> None:
        self._require_attached()
        self._require_on_top()
        self.attached = False
        for module in self._held:
            if module in _REGISTRY and _REGISTRY[module]() is self:
                del _REGISTRY[module]

    def _require_on_top(self) -> None:
        """Refuse to take parametrisations off under a class that was put over the layer since."""
        over = {attached(module) for module in self._held if parametrize.is_parametrized(module)} - {""}
        if over:
            raise TrainingError(
                f"{self.title} cannot end yet",
                got=f"{', '.join(sorted(over))}, attached after it",
                wanted="the order reversed: what came last goes first",
                remedy="call remove() of that handle, then this again",
            )

    def _require_attached(self) -> None:
        if not self.attached:
            raise TrainingError(
                f"{self.title} is over",
                got="a second finish() or remove(), or a state for it",
                wanted="one of them, once",
                remedy="attach it again to go on with it",
            )


def put_over(module: nn.Module, over: type[nn.Module], carried: object) -> None:
    """Give a layer another class, whose last base is its own; no module, parameter or hook is replaced."""
    module.__dict__[CARRIED] = carried
    module.__class__ = over


def take_off(module: nn.Module) -> None:
    """Undo `put_over`."""
    del module.__dict__[CARRIED]
    module.__class__ = type(module).__bases__[-1]


def attached(module: nn.Module) -> str:
    """Return the title of what was put over a layer, "" where nothing was; copies of a model keep theirs."""
    return getattr(module.__dict__.get(CARRIED), "title", "")


def keeps_zeros(module: nn.Module) -> bool:
    """Return whether what was put over a layer multiplies by zero where its weight is zero, so that a mask holds."""
    return bool(getattr(module.__dict__.get(CARRIED), "keeps_zeros", False))


def _working(model: nn.Module) -> dict[str, str]:
    """Return the titles of the attachments that work on a model's weights, by the names of their layers."""
    found = {name or "(model)": _REGISTRY[module]() for name, module in named_modules(model) if module in _REGISTRY}
    return {name: attachment.title for name, attachment in found.items() if attachment is not None}


def describe_schemes(model: nn.Module) -> str:
    """Return what works on a model's weights and on which layers, "" where nothing does."""
    return _described(_working(model))


def describe_attached(model: nn.Module) -> str:
    """Return the same, and what was put over layers: what must go before weights are exchanged."""
    working = _working(model)
    over = {name or "(model)": title for name, module in named_modules(model) if (title := attached(module))}
    over = {name: title for name, title in over.items() if working.get(name) != title}
    return "; ".join(filter(None, (_described(working), _described(over))))


def describe_stored(model: nn.Module) -> str:
    """Return what has layers hold fewer values than their weights have, and which; "" where all are whole."""
    found = {
        name or "(model)": attached(module)
        for name, module in named_modules(model)
        if any(hasattr(parameter, STORED) for parameter in module.parameters(recurse=False))
    }
    return _described(found)


def require_finished(model: nn.Module, kind: type[TwofourError]) -> None:
    """Refuse a model whose layers multiply as a training has them, in the forward pass too.

    Raises:
        TwofourError: It has such layers; of the kind that was asked for.
    """
    found: dict[str, str] = {}
    for name, module in named_modules(model):
        if getattr(module.__dict__.get(CARRIED), "backward_only", None) is False:
            found[name or "(model)"] = attached(module)
    if found:
        raise kind(
            "the model is in the middle of its training",
            got=_described(found),
            wanted="plain layers, masked or dense",
            remedy="call finish() of the handle that attach returned, or twofour.training.both_ways.finish(copy)",
        )


def _described(found: dict[str, str]) -> str:
    texts: list[str] = []
    for title in dict.fromkeys(found.values()):
        names = [f"`{name}`" for name, held in found.items() if held == title]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        texts.append(f"{title} on {', '.join(names[:4])}{more}")
    return "; ".join(texts)
