"""apex's ASP by its own calls: the same buffers in the same state dicts, masks kept by ours (docs/migration.md).

Calls and buffers after apex/contrib/sparsity/asp.py. Nothing is patched: the optimiser hooks of `twofour.masks` keep
the weights sparse, on any device.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from twofour import masks
from twofour.errors import LayerError, MaskError, PatternError
from twofour.layers import PrunableWeight, walk
from twofour.patterns import Pattern, parse
from twofour.structure import permutation

__all__ = ["ASP"]

_log = logging.getLogger("twofour.compat")

PATTERNS = {"m4n2_1d": "2:4", "m4n2_2d_best": "2:4-transposable", "m4n2_2d_greedy": "2:4-transposable"}
"""ASP's mask calculators and our patterns; where ASP searches greedily, ours is exact."""

TYPES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

Calculator = str | Callable[[Tensor], Tensor]


@dataclass(eq=False)
class _Known:
    """A weight that ASP knows, with its two buffers in the module's state dict."""

    weight: PrunableWeight
    pattern: Pattern
    calculator: Callable[[Tensor], Tensor] | None

    @property
    def buffer(self) -> Tensor:
        """The mask, bool; all True while the weight is dense."""
        return cast(Tensor, self.weight.module._buffers[f"__{self.weight.attribute}_mma_mask"])

    @property
    def stowed(self) -> Tensor | None:
        """The values that were pruned, on the CPU; None without allow_recompute_mask."""
        return self.weight.module._buffers.get(f"__{self.weight.attribute}_mma_pruned_p")

    @property
    def enabled(self) -> bool:
        """Whether the mask prunes anything."""
        return not bool(self.buffer.all())

    def register(self, stow: bool) -> None:
        """Add the buffers, and follow the masks of state dicts that are loaded."""
        module, attribute, like = self.weight.module, self.weight.attribute, self.weight.parameter.detach()
        module.register_buffer(f"__{attribute}_mma_mask", torch.ones_like(like, dtype=torch.bool))
        if stow:
            module.register_buffer(f"__{attribute}_mma_pruned_p", torch.zeros_like(like, device="cpu"))
        module.register_load_state_dict_post_hook(partial(_after_load, self))

    def choose(self) -> Tensor:
        """Return the mask of the weight as it is."""
        parameter = self.weight.parameter.detach()
        if self.calculator is not None:
            return self.calculator(parameter).to(torch.bool)
        last = self.weight.reduction_last(parameter)
        return self.weight.from_reduction_last(self.pattern.project(last, absolute=True))

    def restore(self) -> None:
        """Put the pruned values back; the weight is dense again and free to move."""
        if not self.enabled:
            return
        assert self.stowed is not None, self.weight.name
        masks.detach(self.weight.module)
        self.weight.parameter.detach().add_(self.stowed.to(self.weight.parameter.device))
        self.buffer.fill_(True)
        self.stowed.zero_()


@dataclass(eq=False)
class _Session:
    """What `init_model_for_pruning` was called with."""

    model: nn.Module
    known: list[_Known]
    permute: bool
    example: Any = None
    permuted: bool = field(default=False)


class ASP:
    """apex's class of the same name; all methods are class methods, as there.

    A second model may be initialised: it takes the place of the first in later calls, and the first one's masks stay.
    """

    _session: _Session | None = None

    @classmethod
    def init_model_for_pruning(
        cls,
        model: nn.Module,
        mask_calculator: Calculator = "m4n2_1d",
        verbosity: int = 3,
        whitelist: Sequence[type[nn.Module]] = TYPES,
        allowed_layer_names: Sequence[str] | None = None,
        disallowed_layer_names: Sequence[str] = (),
        allow_recompute_mask: bool = False,
        custom_layer_dict: Mapping[type[nn.Module], Sequence[str]] | None = None,
        allow_permutation: bool = True,
        *,
        example: Any = None,
    ) -> None:
        """Add ASP's buffers to the model; sparsity is off until `compute_sparse_masks`, or a checkpoint that has masks.

        Args:
            model: The model.
            mask_calculator: A name of `PATTERNS`, or a function from a weight to its mask, which must be 2:4.
            verbosity: 2 and more log each weight that stays dense.
            whitelist: Types of the layers that may become sparse.
            allowed_layer_names: Names of the layers that may; None for all.
            disallowed_layer_names: Names of layers that may not.
            allow_recompute_mask: Keep the pruned values, so that masks can be computed again or taken off.
            custom_layer_dict: Further types, and the names of their parameters.
            allow_permutation: Order the channels first so that the pattern fits better; needs `example`.
            example: Input of one forward pass, which apex does without: as in `twofour.prune`.

        Raises:
            LayerError: The model is initialised already, or has no such layer.
            PatternError: The mask calculator is unknown.
        """
        calculator = None if isinstance(mask_calculator, str) else mask_calculator
        pattern = parse("2:4" if calculator is not None else _pattern(str(mask_calculator)))
        attributes = dict(custom_layer_dict or {})
        known = [
            _Known(weight, pattern, calculator)
            for weight in _eligible(model, (*whitelist, *attributes), allowed_layer_names, disallowed_layer_names)
            if weight.attribute in attributes.get(type(weight.module), ("weight",))
        ]
        if not known:
            raise LayerError(
                "ASP finds no layer that it may prune",
                got=f"types {', '.join(kind.__name__ for kind in whitelist)}",
                wanted="a weight whose rows are a multiple of 8 and whose reduction is one of 16",
                remedy="`twofour.layers.walk(model).skipped` has a reason for each weight",
            )
        if any(f"__{entry.weight.attribute}_mma_mask" in entry.weight.module._buffers for entry in known):
            raise LayerError("ASP has been initialised with this model already", wanted="one call for each model")
        for entry in known:
            entry.register(allow_recompute_mask)
        if verbosity >= 2:
            for skipped in walk(model).skipped:
                _log.info("ASP leaves `%s` dense: %s", skipped.name, skipped.reason)
        cls._session = _Session(model, known, allow_permutation, example)

    @classmethod
    def already_init_asp_model(cls) -> bool:
        """Tell whether there is a model."""
        return cls._session is not None

    @classmethod
    def init_optimizer_for_pruning(cls, optimizer: Optimizer) -> None:
        """Check that the masks will reach the optimiser; nothing is patched, every `torch.optim` optimiser is served.

        Raises:
            MaskError: There is no model yet, or the optimiser is none of `torch.optim`.
        """
        cls._initialised("init_optimizer_for_pruning")
        if not isinstance(optimizer, Optimizer):
            raise MaskError(
                "the optimiser has no hooks that could keep the weights sparse",
                got=type(optimizer).__name__,
                wanted="a subclass of torch.optim.Optimizer",
                remedy="call twofour.masks.enforce(model) after each of its steps",
            )

    @classmethod
    @torch.no_grad()
    def compute_sparse_masks(cls) -> None:
        """Turn sparsity on, or compute the masks anew; where that was allowed, the channels are ordered the first time.

        Raises:
            MaskError: The model is sparse and the pruned values were not kept, or a mask is not of the pattern.
            PermutationError: The model cannot be traced with its example.
        """
        session = cls._initialised("compute_sparse_masks")
        _require_stowed(session)
        for entry in session.known:
            entry.restore()
        if session.permute and not session.permuted:
            _permute(session)
        chosen = [(entry, entry.choose()) for entry in session.known]
        dense = [entry.weight.parameter.detach().clone() for entry, _ in chosen]
        masks.attach_all([(entry.weight, keep, entry.pattern) for entry, keep in chosen])
        for (entry, keep), before in zip(chosen, dense, strict=True):
            entry.buffer.copy_(keep)
            if entry.stowed is not None:
                entry.stowed.copy_(before.masked_fill(keep, 0))

    @classmethod
    @torch.no_grad()
    def restore_pruned_weights(cls) -> None:
        """Turn sparsity off and put the pruned values back.

        Raises:
            MaskError: They were not kept: `allow_recompute_mask` was False.
        """
        session = cls._initialised("restore_pruned_weights")
        _require_stowed(session)
        for entry in session.known:
            entry.restore()

    @classmethod
    def is_sparsity_enabled(cls) -> bool:
        """Tell whether the masks prune, for instance after a checkpoint was loaded; False where there is no model yet.

        Raises:
            MaskError: Some do and some do not.
        """
        enabled = {entry.enabled for entry in cls._session.known} if cls._session is not None else set()
        if len(enabled) > 1:
            raise MaskError("the model's sparsity is inconsistent", got="masks of which some keep everything")
        return enabled == {True}

    @classmethod
    def prune_trained_model(cls, model: nn.Module, optimizer: Optimizer, *, example: Any = None) -> None:
        """Do all three: buffers, optimiser, masks of Linear and Conv2d; `example` as in `init_model_for_pruning`."""
        cls.init_model_for_pruning(model, "m4n2_1d", 2, (nn.Linear, nn.Conv2d), example=example)
        cls.init_optimizer_for_pruning(optimizer)
        cls.compute_sparse_masks()

    @classmethod
    def set_permutation_saving_params(
        cls, allow_permutation: bool = True, save_permutation_graph: bool = False, permutation_output_dir: str = "."
    ) -> None:
        """Allow or forbid ordering the channels; the graph is not written to a file.

        Raises:
            LayerError: `save_permutation_graph` is asked for.
        """
        if save_permutation_graph:
            raise LayerError(
                "the graph of a permutation is not written to a file",
                got=f"save_permutation_graph=True, {permutation_output_dir!r}",
                wanted="save_permutation_graph=False",
                remedy="twofour.structure.permute returns a report with every group of channels",
            )
        cls._initialised("set_permutation_saving_params").permute = allow_permutation

    @classmethod
    def _initialised(cls, call: str) -> _Session:
        if cls._session is None:
            raise MaskError(f"ASP.{call} was called before ASP.init_model_for_pruning", wanted="a model first")
        return cls._session


def _pattern(calculator: str) -> str:
    if calculator not in PATTERNS:
        wanted = f"{', '.join(PATTERNS)}, or a function"
        raise PatternError("the mask calculator is unknown", got=repr(calculator), wanted=wanted)
    return PATTERNS[calculator]


def _eligible(
    model: nn.Module, types: tuple[type[nn.Module], ...], allowed: Sequence[str] | None, disallowed: Sequence[str]
) -> list[PrunableWeight]:
    return [
        weight
        for weight in walk(model).weights
        if isinstance(weight.module, types)
        and weight.layer not in disallowed
        and (allowed is None or weight.layer in allowed)
        and weight.parameter.requires_grad
    ]


def _require_stowed(session: _Session) -> None:
    lost = [entry.weight.name for entry in session.known if entry.enabled and entry.stowed is None]
    if lost:
        raise MaskError(
            "the dense weights cannot be restored",
            got=f"`{lost[0]}`, pruned without allow_recompute_mask",
            wanted="ASP.init_model_for_pruning(..., allow_recompute_mask=True)",
            remedy="load the dense checkpoint again",
        )


def _permute(session: _Session) -> None:
    session.permuted = True
    if session.example is None:
        _log.warning(
            "ASP: the channels stay in their order: pass example= to init_model_for_pruning, or allow_permutation=False"
        )
        return
    with _without_buffers(session.known):
        permutation.permute(session.model, session.example, [(entry.weight, entry.pattern) for entry in session.known])


@contextmanager
def _without_buffers(known: Sequence[_Known]) -> Iterator[None]:
    """Take ASP's buffers off dense weights: the channels of what the forward does not use cannot be followed."""
    modules = {id(entry.weight.module): entry.weight.module for entry in known}.values()
    taken = [(module, name) for module in modules for name in module._buffers if "_mma_" in name]
    before = [(module, name, module._buffers.pop(name)) for module, name in taken]
    try:
        yield
    finally:
        for module, name, buffer in before:
            module._buffers[name] = buffer


@torch.no_grad()
def _after_load(entry: _Known, module: nn.Module, incompatible_keys: object) -> None:
    """Follow the mask that `load_state_dict` has just written into the buffer."""
    # torch is walking over this dict, and a mask adds or removes a hook of its own.
    module._load_state_dict_post_hooks = OrderedDict(module._load_state_dict_post_hooks)
    keep = entry.buffer
    if not entry.enabled:
        masks.detach(module)
        return
    if outside := int((entry.weight.parameter.ne(0) & ~keep).sum()):
        _log.warning("`%s`: %d loaded values lie outside the mask and are set to 0", entry.weight.name, outside)
    masks.attach(entry.weight, keep, entry.pattern)
