"""A Linear whose parameter holds the kept values of its weight alone, (out, in / 2), in the order of the packed form.

Its optimiser has half as much to do and to remember. Elsewhere the weight is dense: `layer.weight` computes it, with a
gradient, and the state dict holds it and takes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from twofour.errors import TrainingError
from twofour.layers import CARRIED, STORED, Reduction
from twofour.layers.modules import parameters_of
from twofour.masks.loaded import reconcile
from twofour.masks.rule import Rule
from twofour.packing import Packed, kept
from twofour.patterns import Transposable
from twofour.training.both_ways.kept_states import moved
from twofour.training.both_ways.masked_weight import MaskedWeight
from twofour.training.both_ways.watched import STATES, watch, watched_by
from twofour.training.sparse_linear import LinearProducts
from twofour.training.sparse_linear.module import SparseLinear, through_products

WEIGHT = "weight"


class _Dense(torch.autograd.Function):
    """The dense weight of kept values; its gradient is gathered at their places."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Packed) -> Tensor:
        ctx.places = places
        return kept.scatter(replace(places, values=values))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, _Kept.apply(gradients[0], ctx.places)), None


class _Kept(torch.autograd.Function):
    """The kept values of a dense weight: the transpose of `_Dense`, so that either has derivatives of any order."""

    @staticmethod
    def forward(ctx: Any, dense: Tensor, places: Packed) -> Tensor:
        ctx.places = places
        return kept.gather(places, dense)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return cast(Tensor, _Dense.apply(gradients[0], ctx.places)), None


class KeptLinear(SparseLinear, nn.Linear):
    """An `nn.Linear` while its parameter holds kept values; (..., in) -> (..., out), in the computing type."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dense weight (out, in), computed anew: writing into it changes nothing."""
        masked_of(self).settle(values_of(self))
        return cast(Tensor, _Dense.apply(values_of(self), places_of(self)))

    def forward(self, input: Tensor) -> Tensor:
        """Return X W^T + bias."""
        if torch.compiler.is_exporting():
            _refuse_export()
        hold(self)
        masked_of(self).settle(values_of(self))
        return through_products(self.__dict__[CARRIED], input, values_of(self), self.bias)

    def reset_parameters(self) -> None:
        """Refuse: it would write into a dense weight that nobody reads."""
        raise TrainingError(
            "a layer that holds its kept values alone cannot be reset in place",
            got="reset_parameters()",
            wanted="a dense weight by load_state_dict, whose zeros are 2:4 both ways or which the mask is laid over",
            remedy="call finish() or remove() of the handle, reset the layer, and attach again",
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Come out of a copy or a pickle, in which a parameter keeps none of its attributes."""
        super().__setstate__(state)
        hold(self)

    def __getstate__(self) -> dict[str, Any]:
        masked_of(self).settle(values_of(self))
        return self.__dict__

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse another weight: whether its values stand at the same places cannot be seen."""
        held = parameters_of(self).get(WEIGHT)
        if held is None and (values := watched_by(masked_of(self))) is not None:
            others = dict(parameters_of(self))  # weight_norm takes it away before it says by what it is replaced
            parameters_of(self).clear()
            parameters_of(self).update({WEIGHT: values, **others})
        if held is None or (name == WEIGHT and param is not held):
            raise _takes_no_other(f"`{name}`: None" if param is None else f"`{name}`, a parameter {tuple(param.shape)}")
        super().register_parameter(name, param)

    def __delattr__(self, name: str) -> None:
        """Refuse to lose the weight, to a parametrisation for instance."""
        if name == WEIGHT:
            raise _takes_no_other("a parametrisation, or the weight taken away")
        super().__delattr__(name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + WEIGHT] = dense = self.weight if keep_vars else self.weight.detach()
        if not keep_vars:
            masked_of(self).hand_out(dense, values_of(self))

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *more: Any
    ) -> None:
        key, (*_, errors) = prefix + WEIGHT, more
        given = state_dict.get(key)
        if isinstance(given, Tensor):
            shape = shape_of(self)
            if given.shape != shape:
                errors.append(f"size mismatch for {key}: {tuple(given.shape)} in the state dict, {shape} in the model.")
                given = self.weight
            state_dict = {**state_dict, key: self._adopted(given.detach(), key)}
        # With assign=True too the parameter stays: optimisers and the places of its values are bound to it.
        copied = {**local_metadata, "assign_to_params_buffers": False}
        super()._load_from_state_dict(state_dict, prefix, copied, *more)

    def _adopted(self, dense: Tensor, name: str) -> Tensor:
        """Return the kept values of a dense weight, whose own zeros become the mask where they are others."""
        masked = masked_of(self)
        masked.forget_handed()
        keep = kept.mask_of(places_of(self))
        rule = Rule(name, Transposable(), Reduction(), keep.clone())
        dense = dense.clone().contiguous()
        reconcile(rule, dense)
        if not torch.equal(rule.keep, keep):
            put_places(values_of(self), masked, kept.places_of(rule.keep))
        masked.forget_values()
        return kept.gather(places_of(self), dense)


@torch.compiler.disable(reason="twofour: kept values alone; call finish() of the handle before torch.export")
def _refuse_export() -> None:
    raise TrainingError(
        "a layer that holds its kept values alone is not exported",
        got="torch.export in the middle of the training",
        wanted="plain layers, dense or masked",
        remedy="call finish() of the handle first; of a copy, twofour.training.both_ways.finish(copy)",
    )


def _takes_no_other(got: str) -> TrainingError:
    return TrainingError(
        "a layer that holds its kept values alone takes no other weight by assignment, parametrisation or weight norm",
        got=got,
        wanted="a dense weight by load_state_dict",
        remedy='layer.load_state_dict({"weight": dense}, strict=False), or handle.remove() first',
    )


def require_whole(layer: nn.Module, name: str) -> None:
    """Raise unless a layer can be made dense again.

    Raises:
        TrainingError: Its parameter is not of the shape of its kept values.
    """
    rows, columns = shape_of(layer)
    values = parameters_of(layer).get(WEIGHT)
    if values is None or values.shape != (rows, columns // 2):
        raise TrainingError(
            "a layer no longer holds its kept values",
            got="no parameter" if values is None else f"a parameter {tuple(values.shape)}",
            wanted=f"{(rows, columns // 2)}, as attach left it",
            remedy="put the parameter back that was there; load dense weights with load_state_dict",
            layer=name,
        )


def values_of(layer: nn.Module) -> nn.Parameter:
    """Return the parameter of a layer that holds kept values alone: (out, in / 2)."""
    return cast(nn.Parameter, parameters_of(layer)[WEIGHT])


def hold(layer: nn.Module) -> None:
    """Have the parameter that a layer has now known to optimisers, and its dense shape to who stores it."""
    values = values_of(layer)
    watch(values, masked_of(layer))
    if isinstance(values, nn.Parameter) and not hasattr(values, STORED):
        setattr(values, STORED, shape_of(layer))


def masked_of(layer: nn.Module) -> MaskedWeight:
    """Return the weight as the products of a layer read it."""
    products: LinearProducts = layer.__dict__[CARRIED]
    return cast(MaskedWeight, products.sources["forward"])


def places_of(layer: nn.Module) -> Packed:
    """Return where the kept values of a layer stand."""
    places = masked_of(layer).places
    assert places is not None
    return places


def shape_of(layer: nn.Module) -> tuple[int, ...]:
    """Return the dense shape of a layer's weight."""
    return places_of(layer).header.shape


@torch.no_grad()
def put_places(parameter: nn.Parameter, masked: MaskedWeight, places: Packed | None) -> None:
    """Have a parameter hold its values at `places` alone, or, for None, all of them; what it held elsewhere is lost.

    It stays the same object, so that optimisers go on with it. Its gradient is moved along.
    """
    if masked.places is not None:
        masked.settle(parameter)
    masked.forget_handed()
    gradient, parameter.grad = parameter.grad, None
    held = parameter.data
    # A graph that is still alive holds what accumulates the gradient, and its shape: another dtype lets go of that.
    parameter.data = torch.empty(0, dtype=torch.complex64, device=held.device)
    parameter.data = moved(held, masked.places, places)
    torch.autograd.graph.increment_version(parameter)  # a forward pass before this has no backward pass after it
    if gradient is not None:
        parameter.grad = moved(gradient, masked.places, places)
    if places is None:
        vars(parameter).pop(STORED, None)
        keep = masked.mask()
        assert keep is not None
        masked.put(keep)
    else:
        setattr(parameter, STORED, places.header.shape)
        if masked.places is not None:
            STATES.note_moved(parameter)
        masked.put_places(places)
        watch(parameter, masked)
