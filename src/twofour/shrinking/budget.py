"""Budget: how small a model has to become; and Prices: what it has of parameters and products at given widths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from twofour import calls
from twofour.errors import ShrinkError, cut
from twofour.layers import PrunableWeight, walk
from twofour.structure.shrink import Channels, Cuttable

KINDS = ("parameters", "macs", "bytes", "time")
"""What a budget may count."""

PROJECTED = {"q_proj_weight": slice(0, 1), "k_proj_weight": slice(1, 2), "v_proj_weight": slice(2, 3)}
"""Which of query, key and value each weight of an attention multiplies, where these have weights of their own."""


class UnmetError(ShrinkError):
    """A budget cannot be met.

    Attributes:
        least: The least share that can be.
        gain: Of time, what narrower channels saved as measured, as a share of what they were predicted to.
    """

    least, gain = 1.0, 1.0

    @classmethod
    def of(cls, got: str, least: float, why: str, remedy: str) -> UnmetError:
        """Return the error for what was asked, the least that can be and why, and what to try."""
        wanted = f"at least {least:.3f}: {why}"
        error = cls("the budget cannot be met", got=got, wanted=wanted, remedy=remedy)
        error.least = least
        return error


@dataclass(frozen=True)
class Budget:
    """The size that a model may have, as a fraction of its own, above 0 and below 1.

    Attributes:
        parameters: Of its parameters.
        macs: Of the multiply-add operations of its weights in one forward pass of the example; products of activations
            with each other, as of queries and keys, are not counted.
        bytes: Of the bytes of its parameters, in the dtypes that they have.
        time: Of the milliseconds of one forward pass of the example on this machine, as `compile` makes it in float32,
            with the threads that torch has: layers are measured at several widths (`shrinking.times`). What cannot be
            compiled is timed as torch runs it, and the report says why.
    """

    parameters: float | None = None
    macs: float | None = None
    bytes: float | None = None
    time: float | None = None

    def __post_init__(self) -> None:
        given = {kind: getattr(self, kind) for kind in KINDS if getattr(self, kind) is not None}
        if len(given) != 1 or not all(isinstance(v, int | float) and 0 < v < 1 for v in given.values()):
            raise ShrinkError(
                "the budget is impossible",
                got=", ".join(f"{kind}={cut(repr(value), 40)}" for kind, value in given.items()) or "no limit",
                wanted="one of parameters, macs, bytes and time, a fraction above 0 and below 1",
                remedy="budget=0.5, or twofour.shrinking.Budget(macs=0.5)",
            )

    @property
    def kind(self) -> str:
        """What is counted: "parameters", "macs", "bytes" or "time"."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def fraction(self) -> float:
        """The limit."""
        return float(getattr(self, self.kind))

    @classmethod
    def of(cls, given: object) -> Budget:
        """Read what a caller passed: a budget, or a fraction of the parameters.

        Raises:
            ShrinkError: It is neither.
        """
        if isinstance(given, Budget):
            return given
        if isinstance(given, int | float) and not isinstance(given, bool):
            return cls(parameters=given)
        raise ShrinkError(
            "the budget is impossible",
            got=f"a {type(given).__name__}: {cut(repr(given), 60)}",
            wanted="a fraction of the parameters above 0 and below 1, or a Budget",
            remedy="budget=0.5, or twofour.shrinking.Budget(macs=0.5)",
        )


@torch.no_grad()
def uses(model: nn.Module, example: Any) -> dict[str, float]:
    """Return how often each weight is used by one forward pass: MACs are its values times that.

    A Linear uses its weight once for each row of its input, a convolution for each place of its output, a recurrent
    layer each of its own for each row of its output. Attention projects queries, keys and values, each as many rows as
    it gets, and its output. A tied weight has the first of its names, and the uses
    of all layers that multiply by it. Weights of layers that are not called are missing.
    """
    found: dict[str, float] = {}
    names = first_names(model)

    def see(weight: PrunableWeight, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first = answer_of(output)
        rows = weight.of.rows(weight.module, weight.parameter.shape)
        count: float
        if weight.kind == "attention_in":
            read = [*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
            read = [x for x in read if isinstance(x, Tensor) and x.is_floating_point()][:3]
            read = read[PROJECTED[weight.attribute]] if weight.attribute in PROJECTED else read
            count = sum(x.numel() // x.shape[-1] for x in read) / len(read)
        elif weight.kind.startswith(("lstm", "gru", "rnn", "attention")):
            count = first.numel() // first.shape[-1]
        else:
            count = first.numel() // max(rows, 1)
        name = names[id(weight.parameter)]
        found[name] = found.get(name, 0) + count

    weights = walk(model, eligibility="any", tied="*", empty=True).weights
    observed = calls.observing(multiplying(weights), after=see)
    with calls.evaluating(model), calls.without_cache(model), observed:
        calls.call(model, calls.Example.of(example).copy())
    return found


def parameters(model: nn.Module) -> int:
    """Return how many parameters a model has."""
    return sum(parameter.numel() for parameter in model.parameters())


def size(model: nn.Module) -> int:
    """Return the bytes of a model's parameters."""
    return sum(parameter.nbytes for parameter in model.parameters())


def macs(model: nn.Module, example: Any) -> int:
    """Return the multiply-add operations of a model's weights in one forward pass."""
    times = uses(model, example)
    return round(sum(parameter.numel() * times.get(name, 0) for name, parameter in model.named_parameters()))


def answer_of(output: Any) -> Tensor:
    """Return what a layer puts out: the first tensor, that of a packed sequence too."""
    first = output[0] if isinstance(output, tuple | list) and not isinstance(output, PackedSequence) else output
    return first.data if isinstance(first, PackedSequence) else first


def first_names(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter by its id: the first where it is tied, as `named_parameters` has it."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def multiplying(weights: Sequence[PrunableWeight]) -> list[tuple[PrunableWeight, nn.Module]]:
    """Return each weight with every module that multiplies by it, several where it is tied."""
    return [(w, module) for w in weights for module in (w.module, *(module for module, _, _ in w.shared))]


@dataclass(eq=False)
class Prices:
    """What a model costs at the widths that its groups have now.

    Attributes:
        found: Its channels.
        price: Name and sizes of a tensor -> what it costs.
        width: Channels that each group has now, by name.
        gone: Layers that went.
    """

    found: Channels
    price: Callable[[str, tuple[int, ...]], float]
    width: dict[str, int] = field(default_factory=dict)
    gone: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.width = {group.name: group.size for group in self.found.groups}
        self._axes: dict[tuple[str, int], list[Cuttable]] = {}
        for group in self.found.groups:
            for name, axis in {(place.name, place.axis) for place in group.group.places}:
                if name in self.found.shapes:
                    self._axes.setdefault((name, axis), []).append(group)
        self._length = {key: self.found.shapes[key[0]][key[1]] for key in self._axes}

    @property
    def total(self) -> float:
        """What all tensors cost now."""
        return sum(self.of(name) for name in self.found.shapes)

    def drop(self, layer: str, *, back: bool = False) -> float:
        """Take a layer out, or put it back; return what that saves."""
        names = [name for name in self.found.shapes if name.startswith(f"{layer}.")]
        before = sum(map(self.of, names))
        (self.gone.discard if back else self.gone.add)(layer)
        return before - sum(map(self.of, names))

    def went(self, name: str) -> bool:
        """Whether a tensor went with its layer."""
        return any(name.startswith(f"{layer}.") for layer in self.gone)

    def of(self, name: str) -> float:
        """Return what a tensor costs now."""
        if self.gone and self.went(name):
            return 0.0
        shape = self.found.shapes[name]
        return self.price(name, tuple(self._length.get((name, axis), size) for axis, size in enumerate(shape)))

    def set(self, group: Cuttable, width: int) -> float:
        """Give a group another width; return what that saves."""
        names = {place.name for place in group.group.places if place.name in self.found.shapes}
        before = sum(map(self.of, names))
        self.width[group.name] = width
        for key in [key for key, groups in self._axes.items() if group in groups]:
            self._length[key] = self._count(key)
        return before - sum(map(self.of, names))

    def _count(self, key: tuple[str, int]) -> int:
        """Return how many positions of an axis stay, with the first channels of each group for those that do."""
        stay = None
        for group in self._axes[key]:
            for place in self._places(group, key):
                here = (place.index < self.width[group.name]) | (place.index < 0)
                stay = here if stay is None else stay & here
        assert stay is not None
        return int(stay.sum())

    @staticmethod
    def _places(group: Cuttable, key: tuple[str, int]) -> Iterator[Any]:
        return (place for place in group.group.places if (place.name, place.axis) == key)
