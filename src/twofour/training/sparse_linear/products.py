"""The three products of one layer: what an attached layer carries."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from twofour.kernels import Kernel, find
from twofour.kernels.base import Row
from twofour.training.sparse_linear.chooser import Chooser
from twofour.training.sparse_linear.implementations import TORCH
from twofour.training.sparse_linear.plan import PRODUCTS, Choice, LayerPlan
from twofour.training.sparse_linear.source import EXACT, Call, Source
from twofour.training.step_clock import part

PARTS = {"forward": "forward", "data": "data gradient", "weight": "weight gradient"}
"""Product -> what the clock of a step calls it."""

_log = logging.getLogger("twofour.training")
_numbers = itertools.count()
_numbered: WeakValueDictionary[int, LinearProducts] = WeakValueDictionary()


class LinearProducts:
    """How the products of one layer run. It copies along with its module.

    Attributes:
        title: What is attached, in messages.
        sources: Product -> where its sparse operand comes from; products without one are exact.
        plan: How each product runs: as it was given, or, with a chooser, as it ran last.
        chooser: Chooses in the first step of a size; None: the plan is fixed.
        anew: With a fixed plan: chooses, of a type and the plan's, for trainings that compute in another one.
        number: What `numbered` knows it by: operators carry it through a compiled graph.
    """

    def __init__(
        self,
        title: str,
        sources: Mapping[str, Source],
        plan: LayerPlan,
        chooser: Chooser | None = None,
        anew: Callable[[torch.dtype, str], Mapping[str, Choice]] | None = None,
    ) -> None:
        self.title, self.sources, self.plan, self.chooser, self.anew = title, dict(sources), plan, chooser, anew
        self._plans: dict[str, LayerPlan] = {}  # of types before
        self._signatures: dict[str, tuple[object, ...]] = {}
        self._register()

    @property
    def backward_only(self) -> bool:
        """Whether the forward product is the layer's own, so that only backward passes concern it."""
        return "forward" not in self.sources

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return X W^T + bias; (..., in) -> (..., out)."""
        a = x if self.backward_only else x.reshape(-1, x.shape[-1])
        return self.run(Call("forward", a, weight, bias)).view(*x.shape[:-1], len(weight))

    def data_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return dZ W; (..., out) -> (..., in)."""
        # The last axis but one stands for the pixels of a convolution, those before it for the samples.
        *samples, tokens, out = (1, *gradient.shape) if gradient.ndim == 1 else gradient.shape
        a = gradient.reshape(math.prod(samples), tokens, out)
        return self.run(Call("data", a, weight.t())).view(*gradient.shape[:-1], self.plan.shape[1])

    def weight_gradient(self, gradient: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return dZ^T X in `dtype`, of (..., out) and (..., in), as the parameter holds its weight."""
        a, b = (operand.reshape(-1, operand.shape[-1]).contiguous().t() for operand in (gradient, x))
        call = Call("weight", a, b, dtype=dtype)
        return self.run(call._replace(dense=self.sources.get("weight", EXACT).exact(call)))

    def run(self, call: Call) -> Tensor:
        """Return a product, by the row or the dense implementation that its choice names."""
        source = self.sources.get(call.product, EXACT)
        dtype = str(call.a.dtype).removeprefix("torch.")
        if self.chooser is not None and self._signatures.get(call.product) != call.signature:
            self._choose(self.chooser, call, source, dtype)
        plan = self.plan if dtype == self.plan.dtype else self._plans.get(dtype)
        if plan is None and self.anew is not None:
            self._say(f"in {dtype} without gradients, as in evaluation, or compiled: dense")
        choice = (plan or self.plan).choices[call.product]
        kernel = cast(Kernel, find(choice.kernel, Row)) if choice.sparse else None
        if kernel is not None and source.takes(kernel, call):
            with part("pack"):
                packed = source.packed(kernel, call)
            self._note(source)
            with part(PARTS[call.product]):
                return source.multiply(kernel, packed, call)
        with part("pack"):
            a, b = source.dense(call)
        self._note(source)
        with part(PARTS[call.product]):
            # Nothing was measured in other types than the plans'; a choice may be for when a mask is in force.
            ways, wanted = call.implementations(), (choice.kernel, choice.dense) if plan is not None else ()
            name = next((name for name in wanted if name in ways), TORCH)
            return ways[name](a, b).to(call.dtype or a.dtype)

    def meet(self, dtype: torch.dtype) -> None:
        """Choose anew where a training computes in another type than the plan's; the plan is of that type then."""
        name, before = str(dtype).removeprefix("torch."), self.plan
        if self.anew is None or name == before.dtype or not torch.is_grad_enabled():
            return
        self._plans[before.dtype] = before
        if (known := self._plans.get(name)) is not None:
            self.plan = known  # layouts stay: a layer that is called in both types in every step has those of both
            return
        choices = self.anew(dtype, before.dtype)
        gains, gained = (any(one.sparse for one in of.values()) for of in (choices, before.choices))
        mask = ", no product gains: the mask stays" if gained and not gains else ""
        plan = replace(before, dtype=name, choices=choices, note=f"chosen anew, after {before.dtype}{mask}")
        self.follow(plan.without_mask() if plan.unmasked else plan)

    def follow(self, plan: LayerPlan) -> None:
        """Run as a plan says from now on."""
        self.plan = plan
        for source in self.sources.values():
            source.forget_layouts()

    def leave_unmasked(self, unmasked: bool) -> None:
        """Say in the plans of all types whether the layer has no mask."""
        self.plan = replace(self.plan, unmasked=unmasked)
        self._plans = {dtype: replace(plan, unmasked=unmasked) for dtype, plan in self._plans.items()}

    def _say(self, what: str) -> None:
        if what not in self.plan.note:
            _log.info("`%s`: %s", self.plan.name, what)
            self.plan = replace(self.plan, note="; ".join(filter(None, (self.plan.note, what))))

    def settled(self, product: str, a: Tensor) -> Choice | None:
        """Return how a product runs with an operand of this size and type, or None: it has not run with one."""
        known = self._signatures.get(product)
        return self.plan.choices[product] if known is not None and known[:2] == (a.shape, a.dtype) else None

    def _note(self, source: Source) -> None:
        if source.pruned_where and source.pruned_where != self.plan.pruned:
            self.plan = replace(self.plan, pruned=source.pruned_where)

    def _choose(self, chooser: Chooser, call: Call, source: Source, dtype: str) -> None:
        """Have a call chosen that is of another size than the product's last, and note it in the plan."""
        out, columns = self.plan.shape
        tokens = call.a.numel() * len(call.b) // (out * columns)
        choice = chooser.choose(call, source, self.plan.shape, tokens)
        choices = {**self.plan.choices, call.product: choice}
        in_order = {product: choices[product] for product in PRODUCTS if product in choices}
        if (tokens, dtype) != (self.plan.tokens, self.plan.dtype):
            self._signatures.clear()  # the plan is of one size and type
        self.plan = replace(self.plan, tokens=tokens, dtype=dtype, choices=in_order)
        self._signatures[call.product] = call.signature

    def _register(self) -> None:
        self.number = next(_numbers)
        _numbered[self.number] = self

    def __getstate__(self) -> dict[str, Any]:  # what was chosen here holds for this machine
        if self.chooser is None:
            return self.__dict__.copy()
        plan = replace(self.plan, tokens=0, dtype="", choices={}, pruned="")
        return {**self.__dict__, "plan": plan, "_signatures": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:  # a copy, also of another process, gets a number of its own
        self.__dict__.update({"anew": None, "_plans": {}} | state)  # pickles of earlier versions have neither
        self._register()


def numbered(number: int) -> LinearProducts:
    """Return the products of that number."""
    return _numbered[number]
