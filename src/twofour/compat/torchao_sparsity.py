"""torchao.sparsity by its own calls, as last released in torchao 0.18 (docs/migration.md); all of it runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from twofour import compiler, masks, pruning
from twofour.calibration import Statistics
from twofour.calls import first_input, observing
from twofour.criteria import Wanda
from twofour.errors import LayerError, MaskError, PatternError
from twofour.kernels.registration import register
from twofour.layers import PrunableWeight, nearest, require_module, walk
from twofour.patterns import Pattern, parse

__all__ = [
    "SemiSparseActivationLinear",
    "SemiSparseLinear",
    "SemiSparseWeightConfig",
    "WandaSparsifier",
    "apply_fake_sparsity",
    "block_sparse_weight",
    "mask_creator",
    "semi_sparse_weight",
    "sparsify_",
    "swap_linear_with_semi_sparse_linear",
    "swap_semi_sparse_linear_with_linear",
]

Filter = Callable[[nn.Module, str], bool]
_L = TypeVar("_L", bound=nn.Linear)


@dataclass(frozen=True)
class SemiSparseWeightConfig:
    """What `sparsify_` makes of Linear layers: kernels for 2:4 weights.

    Attributes:
        alg_id: As in torchao; 0 is the only one, since kernels are chosen by measuring.
        dtype: Computing type, as in `twofour.compile`.
        memory: As in `twofour.compile`.
        tokens: Token counts to measure at.
    """

    alg_id: int = 0
    dtype: str = "float32"
    memory: str = "fast"
    tokens: tuple[int, ...] = compiler.DEFAULT_TOKENS

    def __post_init__(self) -> None:
        if self.alg_id != 0:
            remedy = "leave alg_id out"
            raise LayerError("kernels have no numbers", got=f"alg_id={self.alg_id}", wanted="alg_id=0", remedy=remedy)


semi_sparse_weight = SemiSparseWeightConfig


def block_sparse_weight(blocksize: int = 64) -> None:
    """Refuse: a layer of blocks is pruned and compiled, not converted in place.

    Raises:
        PatternError: Always.
    """
    raise PatternError(
        "blocks are not converted layer by layer",
        got=f"blocksize={blocksize}",
        wanted="semi_sparse_weight()",
        remedy=f"twofour.prune(model, 'block:{blocksize}x{blocksize}@0.9'), then twofour.compile",
    )


def sparsify_(model: nn.Module, config: SemiSparseWeightConfig, filter_fn: Filter | None = None) -> nn.Module:
    """Replace Linear layers whose weights are 2:4 by layers on the fastest measured kernels, in place.

    Args:
        model: A model inside which the layers stand, pruned; torchao packed dense weights too, and dropped values.
        config: `semi_sparse_weight()`.
        filter_fn: Which modules, given the module and its name; default: every Linear.

    Returns:
        The same model; torchao returned nothing.

    Raises:
        MaskError: A chosen weight is not 2:4; nothing is changed then.
        LayerError: `model` is a Linear itself, or `filter_fn` chooses none.
    """
    chosen = _linears(model, filter_fn)
    rule = parse("2:4")
    for name, layer in chosen.items():
        columns = layer.weight.shape[1]
        if columns % rule.group or not (found := rule.check(layer.weight.detach())).ok:
            got = f"in_features {columns}" if columns % rule.group else f"{found.groups - found.legal} groups break it"
            raise MaskError(
                "the weight is not 2:4, and packing it would drop values",
                got=got,
                wanted="a weight that was pruned",
                remedy="twofour.prune(model, '2:4') first, or leave the layer out by filter_fn",
                layer=name,
            )
    fast = {
        name: compiler.compile(layer, dtype=config.dtype, memory=config.memory, tokens=config.tokens)
        for name, layer in chosen.items()
    }
    for name, layer in fast.items():
        model.set_submodule(name, layer)
    return model


def apply_fake_sparsity(model: nn.Module, *, filter_fn: Filter | None = None) -> None:
    """Prune every Linear to 2:4 by magnitude, in place; unlike torchao's, the weights stay sparse while they train.

    Raises:
        LayerError: There is none that can be pruned.
    """
    names = list(_linears(model, filter_fn))
    pruning.prune(model, dict.fromkeys(names, "2:4"), eligibility="any")


def mask_creator(tensor: Tensor, N: int = 2, M: int = 4) -> Tensor:
    """Return the N:M mask of a tensor by magnitude, in float32; of equal values the first stays.

    Raises:
        PatternError: N:M is impossible, or M does not divide the number of values.
    """
    rule = parse(f"{N}:{M}")
    if not tensor.ndim or tensor.numel() % M:
        raise PatternError(
            f"the tensor does not divide into groups of {M}",
            got=f"shape {tuple(tensor.shape)}",
            wanted=f"a number of values that is a multiple of {M}",
            remedy="pad it, or choose another M",
        )
    rows = tensor.detach().reshape(-1, M) if tensor.shape[-1] % M else tensor.detach()
    return rule.project(rows, absolute=True).to(torch.float32).view(tensor.shape)


class WandaSparsifier:
    """Wanda (Sun et al. 2023): prepare, run the model on your data, step, squash_mask.

    Ranks by |W| ||X||_2 as the paper does; torchao ranked by |W| ||X||_2^2. After `step` the weights stay sparse
    through training.

    Args:
        sparsity_level: 0.5; unstructured sparsity is not built.
        semi_structured_block_size: M of M/2:M: 4 for 2:4.

    Raises:
        PatternError: It is unstructured, another level than 0.5, or an odd block.
    """

    def __init__(self, sparsity_level: float = 0.5, semi_structured_block_size: int | None = None) -> None:
        if semi_structured_block_size is None:
            raise PatternError(
                "unstructured sparsity is not built: no kernel here would run it faster",
                got=f"sparsity_level={sparsity_level}, semi_structured_block_size=None",
                wanted="semi_structured_block_size=4",
                remedy="WandaSparsifier(semi_structured_block_size=4) prunes to 2:4",
            )
        if sparsity_level != 0.5 or semi_structured_block_size % 2:
            raise PatternError(
                "half of each block can be pruned, no other share",
                got=f"sparsity_level={sparsity_level}, semi_structured_block_size={semi_structured_block_size}",
                wanted="sparsity_level=0.5 and an even block",
                remedy='for other patterns: twofour.prune(model, "1:4", criterion="wanda", data=...)',
            )
        self.pattern: Pattern = parse(f"{semi_structured_block_size // 2}:{semi_structured_block_size}")
        self._watched: dict[str, tuple[PrunableWeight, Statistics]] = {}
        self._observing = ExitStack()

    def prepare(self, model: nn.Module, config: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Watch the inputs of the Linear layers that `config` names, by {"tensor_fqn": "layer.weight"}, or of all.

        Raises:
            LayerError: A name is no weight of a Linear.
        """
        known = {w.name: w for w in walk(model, eligibility="any").weights if isinstance(w.module, nn.Linear)}
        names = list(known) if config is None else [str(entry.get("tensor_fqn", "")) for entry in config]
        for name in names:
            if name not in known:
                wanted = "the weight of a Linear layer"
                raise LayerError("there is no such weight", got=repr(name), wanted=wanted, remedy=nearest(name, known))
        self.squash_mask()
        for name in names:
            self._watched[name] = known[name], Statistics("norms")
        layers = [(statistics, weight.module) for weight, statistics in self._watched.values()]
        self._observing.enter_context(observing(layers, _observe))

    @torch.no_grad()
    def step(self) -> None:
        """Choose the masks by the inputs seen so far and attach them.

        Raises:
            MaskError: `prepare` was not called, or a layer has seen no inputs.
            DataError: Inputs hold NaN or infinity.
        """
        if not self._watched:
            raise MaskError("the sparsifier has no model", wanted="prepare(model, config) first")
        plan = []
        for weight, statistics in self._watched.values():
            if statistics.dead:
                wanted = "a forward pass of the model between prepare and step"
                raise MaskError("the layer has seen no inputs", wanted=wanted, layer=weight.layer)
            statistics.require_finite()
            scores = Wanda().score(weight.parameter.detach().unsqueeze(0), statistics)[0]
            plan.append((weight, self.pattern.project(scores), self.pattern))
        masks.attach_all(plan)

    def squash_mask(self, *_: Any, **__: Any) -> None:
        """Stop watching; the weights are plain parameters with their zeros, and their masks stay."""
        self._observing.close()
        self._watched.clear()


class _Swapped(nn.Linear):
    """A Linear that shares its parameters with the one it was made from."""

    @classmethod
    def from_dense(cls, linear: nn.Linear) -> Self:
        """Return one with the parameters of `linear`, shared."""
        return _with_parameters_of(linear, cls)

    @classmethod
    def to_dense(cls, semi_sparse_linear: nn.Linear) -> nn.Linear:
        """Return a plain Linear with the parameters of this one, shared; they are dense."""
        return _with_parameters_of(semi_sparse_linear, nn.Linear)


class SemiSparseLinear(_Swapped):
    """A Linear whose parameter is dense and whose product runs with the best mask that is 2:4 both ways.

    The gradient reaches the dense parameter as it is (straight through). Sides must be multiples of 4. It computes
    what torchao's did, without its speed: `twofour.training.both_ways.attach` runs on 2:4 kernels.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the masked weight."""
        return nn.functional.linear(input, _pruned(self.weight), self.bias)


class SemiSparseActivationLinear(_Swapped):
    """A Linear whose input is pruned to 2:4 both ways, over (tokens, in), at each call.

    The gradient goes straight through to the input as it was.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the product with the pruned input."""
        return nn.functional.linear(_pruned(input.flatten(0, -2)).view_as(input), self.weight, self.bias)


def swap_linear_with_semi_sparse_linear(
    model: nn.Module, config: Mapping[str, type[_Swapped]], current: str = ""
) -> None:
    """Replace the Linear layers that `config` names by its classes, in place.

    Raises:
        LayerError: A name is none of a Linear inside the model.
    """
    require_module(model)
    for name, kind in config.items():
        inside = name.removeprefix(f"{current}.") if current else name
        layers = _linears(model, None)
        if inside not in layers:
            wanted = "the name of a Linear layer"
            raise LayerError("there is no such layer", got=repr(name), wanted=wanted, remedy=nearest(inside, layers))
        model.set_submodule(inside, kind.from_dense(layers[inside]))


def swap_semi_sparse_linear_with_linear(model: nn.Module, current: str = "") -> None:
    """Replace them by plain Linear layers again, in place; the parameters stay what they are, dense."""
    require_module(model)
    for name, layer in list(model.named_modules()):
        if name and isinstance(layer, _Swapped):
            model.set_submodule(name, type(layer).to_dense(layer))


def _linears(model: nn.Module, filter_fn: Filter | None) -> dict[str, nn.Linear]:
    require_module(model)
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    found = {name: module for name, module in modules if filter_fn is None or filter_fn(module, name)}
    if not found or "" in found:
        raise LayerError(
            "there is no Linear layer inside the model to replace",
            got="a Linear by itself" if "" in found else f"{len(modules)} Linear layers, none of them chosen",
            wanted="a module that holds one",
            remedy="put it into nn.Sequential, or let filter_fn choose it",
        )
    return found


def _with_parameters_of(linear: nn.Linear, kind: type[_L]) -> _L:
    made = kind(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    made.weight, made.bias = linear.weight, linear.bias
    return made.train(linear.training)


def _pruned(dense: Tensor) -> Tensor:
    """Prune to 2:4 both ways; the gradient goes straight through."""
    keep = torch.ops.twofour.project_tiles(dense.detach())  # registered: torch.compile cannot trace a native call
    return dense + (dense * keep - dense).detach()


def _project_tiles(scores: Tensor) -> Tensor:
    return parse("2:4-transposable").project(scores, absolute=True)


register(
    "project_tiles(Tensor scores) -> Tensor",
    lambda scores: torch.empty_like(scores, dtype=torch.bool),
    CompositeExplicitAutograd=_project_tiles,
)


@torch.no_grad()
def _observe(statistics: Statistics, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = first_input(args, kwargs)
    statistics.add(x.reshape(1, -1, x.shape[-1]))
