"""Attach and remove: which layers get pruned gradients, and why the others do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn

from twofour.errors import TrainingError, cut
from twofour.layers import (
    CARRIED,
    kind_of,
    matches,
    obstacle,
    parse_globs,
    require_matches,
    require_module,
)
from twofour.patterns import Pattern
from twofour.training import fused
from twofour.training.fused.modules import activation_of, put_through
from twofour.training.sdgp.activation import through
from twofour.training.sdgp.convolution import SdgpConv1d, SdgpConv2d
from twofour.training.sdgp.pruned_gradient import PrunedGradient
from twofour.training.sdgp.rule import EPS, Rule
from twofour.training.sparse_linear import Choice, LayerPlan, LinearProducts, Workspace
from twofour.training.sparse_linear.chooser import POLICIES, Chooser
from twofour.training.sparse_linear.handle import ProductsHandle, require_same
from twofour.training.sparse_linear.module import put_products

TITLE = "pruned gradients (SDGP)"

FEW_INPUTS = 3
"""Layers with as few input channels stay exact: the authors' rule for the first convolution of an image."""


class Handle(ProductsHandle):
    """SDGP as it is attached to a model.

    Attributes:
        model: The model.
        plan: As in the last step; what is measured is measured in the first.
        rule: How gradients are pruned.
        layers: Names of the layers whose input gradient is pruned.
        skipped: Name of each other Linear, convolution, attention or recurrent layer -> why it stays exact.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: Rule,
        modules: Mapping[str, nn.Module],
        skipped: Mapping[str, str],
        activations: Mapping[str, nn.Module],
    ) -> None:
        super().__init__(model, TITLE, modules, skipped, activations)
        self.rule = rule

    def state_dict(self) -> dict[str, Any]:
        """Return how often each layer has drawn: with the seed it says where the random modes stand."""
        self._require_attached()
        draws = {name: source_of(products).draws for name, products in self._products().items()}
        return {"draws": draws, "arguments": self._arguments()}

    def _arguments(self) -> dict[str, Any]:
        """Return what changes the gradients: the rule, and the seed where it draws."""
        rule, seed = self.rule, source_of(next(iter(self._products().values()))).seed
        found = {"pattern": rule.pattern, "mode": rule.mode}
        return {**found, **({"eps": rule.eps} if rule.mode == "rescaled" else {"seed": seed} if rule.draws else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            TrainingError: It is of other layers or arguments, or none of ours.
        """
        self._require_attached()
        draws = state.get("draws", state) if isinstance(state, Mapping) else {}  # older states are the draws alone
        wrong = sorted(map(str, draws.keys() ^ set(self.layers))) if isinstance(draws, Mapping) else ["all of them"]
        if wrong or any(type(count) is not int or count < 0 for count in draws.values()):
            raise TrainingError(
                "the state is of other layers",
                got=f"a difference in {', '.join(wrong[:8])}" if wrong else f"draws {cut(repr(draws), 80)}",
                wanted="what state_dict() of these layers returned",
                remedy="attach to the same model with the same `skip` as when the state was taken",
            )
        require_same(self._arguments(), state.get("arguments", {}))
        for name, products in self._products().items():
            source_of(products).draws = draws[name]

    def remove(self) -> nn.Module:
        """Give every layer its exact gradient back; returns the model. Nothing is left behind.

        Raises:
            TrainingError: It was removed already, or a layer or an activation got another class since.
        """
        self._take_off()
        return self.model

    def finish(self) -> nn.Module:
        """Do what `remove` does: SDGP has no masks to leave behind."""
        return self.remove()

    def __str__(self) -> str:
        lines = [f"dL/dz {self.rule.pattern}, {self.rule.mode}: {len(self.layers)} layers"]
        lines += [f"  {name}" for name in self.layers]
        return "\n".join([*lines, *(f"  {name}: exact, {why}" for name, why in self.skipped.items())])


def source_of(products: LinearProducts) -> PrunedGradient:
    """Return where the data gradient of a layer gets its sparse operand from."""
    return cast(PrunedGradient, products.sources["data"])


def attach(
    model: nn.Module,
    pattern: str | Pattern = "2:4",
    *,
    mode: str = "rescaled",
    skip: str | Sequence[str] = (),
    seed: int = 0,
    eps: float = EPS,
    product: str = "auto",
    seconds: float = 0.3,
) -> Handle:
    """From now on Linear, Conv1d and Conv2d compute their input's gradient from a dL/dz pruned N:M along its channels.

    Forward pass, weights, their gradients and the bias's stay exact and dense; keys of the state dict stay. The error
    compounds: a layer's input gradient is the dL/dz of the layer before.

    Args:
        model: Any module, masked or not; a single layer is a model too.
        pattern: "N:M", M up to 32, along the output channels of each layer.
        mode: "magnitude", "rescaled", "random" or "unbiased"; see `pruned`.
        skip: Globs of layers to leave exact.
        seed: Of the random modes: same seed, same masks, also in every process of a DDP group (give each its own,
            seed + rank, to make their choices independent) and under activation checkpointing.
        eps: Added to the l1 norm that "rescaled" divides by; the authors' code has 1e-4 under a loss scale of 2^16.
        product: The input's gradient: "auto" packs dL/dz and multiplies it by a 2:4 kernel in layers where that is
            measured to be faster, in the first step; "sparse" wherever a kernel takes it; "dense" never. "auto" also
            takes the fastest dense implementation of a Linear's other products; the others leave those to torch.
        seconds: Time box of measuring one product at one size.

    Returns:
        A handle: `layers`, `plan`, `skipped`, `remove()`.

    Example:
        >>> handle = twofour.training.sdgp.attach(model, "2:4", mode="rescaled")
        >>> ...  # your own training loop
        >>> model = handle.remove()

    Raises:
        PatternError: The pattern is no N:M with M <= 32, or `mode` or `eps` is impossible.
        TrainingError: `product` or `seconds` is impossible.
        LayerError: A glob in `skip` matches no layer.
        TrainingError: SDGP is attached already, or no layer is left.
    """
    rule = Rule.parse(pattern, mode, eps)
    _require_options(model, product, seconds, seed)
    globs = parse_globs(skip)
    require_matches(model, globs, "a glob in `skip`")
    modules, skipped = _chosen(model, rule, globs)
    chooser, workspace = Chooser(product, seconds), Workspace()
    for position, (name, module) in enumerate(modules.items()):
        why = "asked for" if product == "dense" else _why_dense(rule)
        over = next((kind for kind in (SdgpConv1d, SdgpConv2d) if isinstance(module, kind.__bases__[-1])), None)
        source = PrunedGradient(rule, _parts(module), seed, position, workspace, why, convolution=over is not None)
        later = Choice("-", False, why or "chosen when its input first needs a gradient")
        plan = LayerPlan(name, _shape(module), 0, "", {"data": later})
        products = LinearProducts(TITLE, {"data": source}, plan, chooser)
        put_products(module, products, over=over)
    fused.put_on(model, TITLE, "measured" if product == "auto" else "never", seconds)
    free = {name: module for name, module in model.named_modules() if CARRIED not in module.__dict__}
    activations = {name: one for name, one in free.items() if activation_of(one) is not None} if rule.native else {}
    for module in activations.values():
        put_through(module, TITLE, through, fused=product == "auto")
    return Handle(model, rule, modules, skipped, activations)


def _chosen(model: nn.Module, rule: Rule, globs: Sequence[str]) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Return the layers whose gradients are pruned, and why the others are not."""
    modules: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        carried = module.__dict__.get(CARRIED)
        if isinstance(carried, LinearProducts) and (carried.title == TITLE or not any(matches(g, name) for g in globs)):
            raise _taken(name, carried)
        if kind_of(module) is not None:
            why = why_exact(name, module, rule, globs)
            if why is None:
                modules[name] = module
            else:
                skipped[name] = why
    if not modules:
        raise TrainingError(
            "no layer can have its gradient pruned",
            wanted=f"a Linear, Conv1d or Conv2d of at least {rule.m} outputs and more than {FEW_INPUTS} inputs",
            reasons=[f"{name}: {why}" for name, why in skipped.items()][:16],
            remedy="attach to a model with such layers, or take them out of `skip`",
        )
    return modules, skipped


def _taken(name: str, carried: LinearProducts) -> TrainingError:
    if carried.title == TITLE:
        what, got, remedy = "SDGP is", f"pruned gradients {source_of(carried).rule.pattern}", ""
    else:
        what, got = f"{carried.title} is", "a weight that makes dX = dZ W sparse, which has one sparse operand"
        remedy = ", or name the layer in `skip`"
    return TrainingError(
        f"{what} attached already",
        got=got,
        wanted="a model without",
        remedy=f"handle.remove() first{remedy}",
        layer=name,
    )


def _require_options(model: nn.Module, product: str, seconds: float, seed: int) -> None:
    require_module(model, TrainingError)
    if product not in POLICIES or not isinstance(seconds, int | float) or not seconds > 0 or type(seed) is not int:
        raise TrainingError(
            "an argument is impossible",
            got=f"product={product!r}, seconds={seconds!r}, seed={seed!r}",
            wanted=f"product {' or '.join(map(repr, POLICIES))}, seconds > 0",
            remedy="leave them out",
        )


def _shape(module: nn.Module) -> tuple[int, int]:
    """Return (out, everything else) of a layer's weight."""
    kind, weight = kind_of(module), module.weight
    assert kind is not None and isinstance(weight, Tensor)
    out = kind.rows(module, weight.shape)
    return out, weight.numel() // out


def _why_dense(rule: Rule) -> str | None:
    """Return why no layer's data gradient is computed by a 2:4 kernel, whatever the size, or None."""
    return None if rule.native else f"{rule.pattern}: kernels read 2:4"


def _parts(module: nn.Module) -> int:
    groups: Any = getattr(module, "groups", 1)
    return groups if isinstance(groups, int) else 1


def why_exact(name: str, module: nn.Module, rule: Rule, globs: Sequence[str]) -> str | None:
    """Return why a layer stays exact, or None."""
    kind = kind_of(module)
    assert kind is not None
    if any(matches(glob, name) for glob in globs):
        return "named in `skip`"
    if type(module) is nn.modules.linear.NonDynamicallyQuantizableLinear:
        return "attention reads its weight without calling it"
    if kind.name not in ("linear", "conv1d", "conv2d", "hf_conv1d"):
        return f"{kind.name}: no Linear, Conv1d or Conv2d"
    if own := obstacle(module, accepted=("parametrised", "hooks")):
        return own
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim < 2:
        return "its weight is not materialised"
    inputs = getattr(module, "in_channels", None) or kind.reduction(module).length(weight.shape)
    if inputs <= FEW_INPUTS:
        return f"{inputs} inputs"
    outputs = kind.rows(module, weight.shape) // _parts(module)
    if outputs < rule.m:
        return f"{outputs} output channels{' per group' if _parts(module) > 1 else ''}: no whole group of {rule.m}"
    return None
