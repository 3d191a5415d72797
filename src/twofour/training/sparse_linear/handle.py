"""What both handles do: find the products of their layers, say the plan, and give the layers their own class back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from twofour.errors import TrainingError, cut
from twofour.layers import CARRIED, Attachment, attached, take_off
from twofour.training import fused
from twofour.training.fused.modules import is_fused
from twofour.training.sparse_linear.module import on_top
from twofour.training.sparse_linear.plan import Plan
from twofour.training.sparse_linear.products import LinearProducts


class ProductsHandle(Attachment):
    """An attachment that has put `LinearProducts` over layers.

    Attributes:
        layers: Names of the weights or layers that take part.
        skipped: Name of each other one -> why it does not.
    """

    def __init__(
        self,
        model: nn.Module,
        title: str,
        modules: Mapping[str, nn.Module],
        skipped: Mapping[str, str],
        activations: Mapping[str, nn.Module],
    ) -> None:
        super().__init__(model, title)
        self._activations = activations
        self.layers, self.skipped, self._modules = tuple(modules), skipped, modules
        self._removed: dict[str, LinearProducts] = {}
        self._functions: Mapping[str, str] = {}

    @property
    def plan(self) -> Plan:
        """Which product of each layer runs how, and why."""
        mode = fused.fused_of(self.model)
        functions = {} if mode is None else mode.functions()
        written = {name: "fused (its formula in one pass)" for name, one in self._activations.items() if is_fused(one)}
        functions |= written
        layers = tuple(products.plan for products in self._products().values())
        return Plan(layers, self.skipped, functions if self.attached else self._functions)

    def _products(self) -> dict[str, LinearProducts]:
        """Return what each layer carries, or carried until the end."""
        if not self.attached:
            return self._removed
        return {name: module.__dict__[CARRIED] for name, module in self._modules.items()}

    def _take_off(self) -> None:
        """Give every layer its own class back; the attachment is over.

        Raises:
            TrainingError: It is over already, or something was put over a layer since.
        """
        self._require_attached()
        activations = {name: module for name, module in self._activations.items() if attached(module) == self.title}
        require_on_top({**self._modules, **activations})
        self._removed, self._functions = self._products(), self.plan.functions
        self._end()
        fused.take_off(self.model, self.title)
        for module in (*self._modules.values(), *activations.values()):
            take_off(module)

    def _require_attached(self) -> None:
        self.attached = self.attached and all(attached(module) == self.title for module in self._modules.values())
        super()._require_attached()


def require_on_top(modules: Mapping[str, nn.Module]) -> None:
    """Refuse to take our class off a module that got another one since, by a parametrisation for instance."""
    for name, module in modules.items():
        if not on_top(module):
            raise TrainingError(
                "a layer cannot get its own class back",
                got=f"{type(module).__name__}, put over ours after `attach`",
                wanted="the order reversed: what came last goes first",
                remedy="remove the parametrisation or finish the scheme, then call remove() again",
                layer=name,
            )


def require_same(here: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Refuse a state that was taken with other arguments; those that it does not name, as older ones, may be any."""
    known = isinstance(there, Mapping)
    other = {name: value for name, value in there.items() if here.get(name) != value} if known else there
    if other or not known:
        raise TrainingError(
            "the state was taken with other arguments",
            got=cut(repr(other), 200),
            wanted=cut(repr({name: here.get(name) for name in other} if known else dict(here)), 200),
            remedy="attach with the arguments of the interrupted run",
        )
