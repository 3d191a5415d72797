"""Whether a cut model computes what the masked one does: for the trial of what can be cut, and for the very plan.

Where a normalisation runs along what is cut, the small model computes something else by intent. Both are run then with
these normalisations made ones that zeros add nothing to, so that all the rest is compared.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from twofour import calls, capture
from twofour.errors import ShrinkError, cut, explained
from twofour.layers.modules import named_modules
from twofour.measure.distance import largest_difference
from twofour.structure.coupling.group import some
from twofour.structure.permutation.comparison import EXACT, outputs, outputs_in_float64
from twofour.structure.shrink.channels import Channels, Cuttable
from twofour.structure.shrink.cut import Cut
from twofour.structure.shrink.surgery import apply, masked, require_fit

_log = logging.getLogger("twofour.structure.shrink")

CLOSE = 1e-5
"""Largest difference, relative to an output's largest value, that is not looked at again in float64."""

Run = Callable[[nn.Module], list[Tensor]]


@dataclass(eq=False)
class Answers:
    """What a masked model answers, and the same model once it is cut.

    Attributes:
        masked: Outputs of the masked model, as it is.
        pairs: (masked, cut) outputs that should be equal: as they are, or with normalisations replaced, one after the
            other until they are.
    """

    masked: list[Tensor]
    pairs: tuple[list[Tensor], list[Tensor]]

    @property
    def difference(self) -> str | float:
        """How far the two are apart: by the shapes, in words, or relative to the largest value."""
        before, after = self.pairs
        was, now = ([tuple(tensor.shape) for tensor in found] for found in (before, after))
        return largest_difference(after, before) if was == now else f"the outputs are {now}, not {was}"


def answers(large: nn.Module, plan: Cut, run: Run, *, exact: bool) -> Answers:
    """Run a masked model, and once more cut; it is as it was afterwards.

    Args:
        large: A masked copy, which `require_fit` has seen.
        plan: What is cut.
        run: Returns the outputs of a model.
        exact: Compare them as they are, also where a normalisation runs along what is cut.
    """
    before, after = _Reductions(), _Reductions()
    with before:
        reference = run(large)
    with after, _cut(large, plan):
        found = run(large)
    answer = Answers(reference, (reference, found))
    along = [n for n, (b, a) in enumerate(zip(before.sizes, after.sizes, strict=False)) if b != a]
    if exact or not along or len(before.sizes) != len(after.sizes):
        return answer
    for constant in (False, True):
        places = {number: before.sizes[number] for number in along}
        with _Reductions(places, constant):
            reference = run(large)
        with _Reductions(places, constant), _cut(large, plan):
            found = run(large)
        answer = Answers(answer.masked, (reference, found))
        if not isinstance(apart := answer.difference, str) and apart <= CLOSE:
            break
    return answer


@contextmanager
def _cut(model: nn.Module, plan: Cut) -> Iterator[None]:
    undo = apply(model, plan)
    try:
        yield
    finally:
        undo()


REDUCING = ("mean", "amax", "amin", "logsumexp", "var", "std", "all", "any")
"""Functions whose answer depends on how many zeros there are, as that of `sum` and of norms does not."""

NORMS: Mapping[str, tuple[str, ...]] = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "softmax": ("input", "dim"),
    "log_softmax": ("input", "dim"),
}
"""Normalisations of torch, with their parameters (torch.nn.functional)."""


class _Reductions(TorchFunctionMode):
    """Notes over how many values each normalisation runs, and replaces some by others that pass zeros by.

    Args:
        places: Number of a call -> over how many values it runs in the large model; these are replaced.
        constant: By what computes nothing of the values, where False replaces means by those over as many values as the
            large model has, and normalisations by root mean squares. A mean that is subtracted makes numbers of zeros.
    """

    def __init__(self, places: Mapping[int, int] | None = None, constant: bool = False) -> None:
        super().__init__()
        self.places, self.constant, self.sizes = places or {}, constant, list[int]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer, name = func(*args, **(kwargs or {})), getattr(func, "__name__", "")
        if (name not in NORMS and name not in REDUCING) or not isinstance(answer, Tensor):
            return answer
        given = dict(zip(NORMS.get(name, ("input",)), args, strict=False)) | (kwargs or {})
        x = given.get("input")
        if not isinstance(x, Tensor):
            return answer
        number, size = len(self.sizes), _size(name, x, answer, given)
        self.sizes.append(size)
        if number not in self.places:
            return answer
        return self._replaced(name, x, answer, given, size / self.places[number])

    def _replaced(self, name: str, x: Tensor, answer: Tensor, given: Mapping[str, Any], share: float) -> Tensor:
        """Return an answer to which zeros add nothing, where this share of the large model's values is there."""
        if name in ("softmax", "log_softmax"):
            return x
        if name not in NORMS:
            return answer * share if name == "mean" and not self.constant else torch.ones_like(answer)
        grouped = name == "group_norm"
        rows = x.unflatten(1, (given["num_groups"], -1)) if grouped else x
        dims = tuple(range(2, rows.ndim)) if grouped else tuple(range(-len(given["normalized_shape"]), 0))
        if not self.constant:
            rows = rows * (rows.square().mean(dims, keepdim=True) * share + (given.get("eps") or 1e-6)).rsqrt()
        found = rows.reshape(x.shape)
        shape = [-1] + [1] * (x.ndim - 2) if grouped else list(given["normalized_shape"])
        for held, change in ((given.get("weight"), torch.mul), (given.get("bias"), torch.add)):
            found = found if held is None else change(found, held.view(shape))
        return found


def _size(name: str, x: Tensor, answer: Tensor, given: Mapping[str, Any]) -> int:
    """Return over how many values a normalisation runs."""
    if name == "group_norm":
        return x.numel() // max(len(x) * given["num_groups"], 1)
    if name in ("layer_norm", "rms_norm"):
        return prod(given["normalized_shape"])
    if name in NORMS:
        return x.shape[given["dim"]] if type(given.get("dim")) is int else x.numel()
    return x.numel() // max(answer.numel(), 1)


def fault(large: nn.Module, plan: Cut, given: Mapping[str, Any], *, exact: bool) -> tuple[list[Tensor], str]:
    """Return the outputs of a masked model, and what is wrong with those of the cut one, "" where nothing is.

    Where outputs in the model's own dtype differ by more than rounding, float64 decides.

    Raises:
        Exception: Whatever a forward raises on sizes that it does not expect.
    """
    answer = answers(large, plan, partial(outputs, given=given), exact=exact)
    difference = answer.difference
    if isinstance(difference, float) and difference > CLOSE:
        try:
            wide = copy.deepcopy(large).double()
            difference = answers(wide, plan, partial(outputs_in_float64, given=given), exact=exact).difference
        except Exception as error:  # a forward in a dtype that it was not written for
            _log.info("a cut cannot be compared in float64: %s", error)
        else:
            return answer.masked, _told(difference, EXACT)
    return answer.masked, _told(difference, CLOSE)


def _told(difference: str | float, allowed: float) -> str:
    if isinstance(difference, str):
        return difference
    return "" if difference <= allowed else f"an output differs by {difference:.1e}"


def verify(model: nn.Module, plan: Cut, example: Any, found: Channels | None = None) -> None:
    """Check that the model which a plan cuts computes what the masked one does, on an example.

    Where a normalisation runs along what is cut, it is replaced in both, since it is another one over fewer channels.
    A layer that goes has to leave what comes after it as if it had handed on what it got; where it changes the shape,
    that is not compared.

    Args:
        model: The large model; it is not changed.
        plan: What is cut.
        example: Input of one forward pass.
        found: What of the model can be cut, to name the channels that are wrong.

    Raises:
        ShrinkError: The plan is not one of the model, the model does not run on the example, or the outputs differ.
    """
    require_fit(model, plan)
    wrong = _wrong(model, plan, example)
    if not wrong:
        return
    parts = _parts(plan, found) if found is not None else {}
    alone = next((name for name, part in parts.items() if len(parts) > 1 and _wrong(model, part, example)), None)
    places = [axis.places[0][0] for axis in plan.axes]
    names = [alone] if alone else list(parts) or places or list(plan.layers)
    raise ShrinkError(
        "the small model would compute something else than the large one with zeros in place of what is cut",
        got=f"without some of {some(names)} {wrong}",
        wanted=f"outputs that are equal to {CLOSE:g} of their largest value",
        remedy="leave these channels whole, and report the model: they were traced wrongly"
        if plan.axes
        else "keep the layer: what follows takes more from it than its output",
        layer=names[0],
    )


def _wrong(model: nn.Module, plan: Cut, example: Any) -> str:
    arguments = calls.Example.of(example)
    remedy = "call the model on it yourself: an example is what one forward pass takes"
    with calls.explaining(ShrinkError, "the example", wanted=calls.FORMS, remedy=remedy):
        given = capture.arguments(model, arguments.args, arguments.kwargs)
    large = masked(model, plan)
    with calls.without_cache(large), _handing_on(large, plan.layers) as changing:
        with calls.explaining(ShrinkError, "the example", wanted=calls.FORMS, remedy=remedy):
            outputs(large, given)
        try:
            return fault(large, replace(plan, layers=() if changing else plan.layers), given, exact=False)[1]
        except Exception as error:
            if out_of_memory(error):
                raise
            return f"the forward does not run: {cut(explained(error), 160)}"


@contextmanager
def _handing_on(model: nn.Module, layers: Collection[str]) -> Iterator[list[str]]:
    """Let layers hand on what they get inside; yield the names of those that cannot, once they were called."""
    changing, held = list[str](), dict[str, Any]()

    def keep(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = calls.first_input(args, kwargs)
        held[name] = given.clone() if isinstance(given, Tensor) else None  # a layer may work in place

    def hand_on(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        given, first = held.pop(name), output[0] if isinstance(output, tuple) else output
        if not isinstance(first, Tensor) or not isinstance(given, Tensor) or first.shape != given.shape:
            changing.append(name)
            return None
        return (given, *output[1:]) if isinstance(output, tuple) else given

    with ExitStack() as stack:
        for name in layers:
            layer = model.get_submodule(name)
            if sum(module is layer for _, module in named_modules(model, again=True)) > 1:  # it stays elsewhere
                changing.append(name)
                continue
            stack.callback(layer.register_forward_pre_hook(partial(keep, name), with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(partial(hand_on, name), with_kwargs=True).remove)
        yield changing


def _parts(plan: Cut, found: Channels) -> dict[str, Cut]:
    """Return the plan of each group that a plan cuts alone, with those that have to get its size."""
    kept = {group.name: channels for group in found.groups if (channels := _kept(plan, group)) is not None}
    units = {group.name: [group.name] for group in found.groups}
    units |= {member.name: [other.name for other in bound] for bound in found.bound for member in bound}
    return {name: found.plan({other: kept[other] for other in units[name] if other in kept}) for name in kept}


def _kept(plan: Cut, group: Cuttable) -> list[int] | None:
    """Return the channels of a group that stay, None where all do."""
    place = group.group.places[0]
    if (place.name, place.axis) not in plan.kept:
        return None
    stay = place.index[list(plan.kept[place.name, place.axis])]
    channels = stay[stay >= 0].unique().tolist()
    return channels if 0 < len(channels) < group.size else None


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is short, which says nothing of the model."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
