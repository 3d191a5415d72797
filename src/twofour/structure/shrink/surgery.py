"""Surgery: a plan of a cut made true on a model, all of it or nothing; and the masked model that it has to equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from twofour.errors import ShrinkError
from twofour.errors import cut as cut_text
from twofour.layers import compiled_parts, describe_attached, is_distributed, is_masked, require_unwrapped
from twofour.structure.shrink.cut import Cut, runs
from twofour.structure.shrink.layers import drop, require_layers
from twofour.structure.shrink.sizes import Convolution, Transposed, number, refresh, same_axes, set_number

_MARK = "_twofour_cuts"

Undo = list[Callable[[], None]]


def cut(model: nn.Module, plan: Cut, *, inplace: bool = False) -> nn.Module:
    """Return the smaller model that a plan describes.

    Parameters and buffers are sliced and keep their dtype, device and `requires_grad`; sizes of torch's own layers and
    the attributes of the plan follow, layers of the plan are taken out. What was cut stays written in the model
    (`cuts_of`), so that `twofour.save` stores it and `twofour.load` makes it again.

    Args:
        model: The large model, dense; it stays as it is unless `inplace`.
        plan: From `Channels.plan`, or read from a file.
        inplace: Change the model itself: its parameters become other objects, optimisers have to be made anew.

    Raises:
        ShrinkError: The plan is not one of this model, or the model is masked, sharded, quantised or compiled, or a
            training scheme is at work in it; then nothing was changed.

    Example:
        >>> traced = channels(model, example)
        >>> small = cut(model, traced.plan({traced.groups[0].name: [0, 1, 2, 5]}))
    """
    require_unwrapped(model, ShrinkError)
    require_fit(model, plan)
    require_dense(model)
    small = model if inplace else copy.deepcopy(model)
    apply(small, plan)
    return small


def require_dense(model: nn.Module) -> None:
    """Refuse a model whose layers are not its own any more.

    Raises:
        ShrinkError: One is masked, compiled or quantised, or a training scheme is at work.
    """
    masked = next((name for name, module in model.named_modules() if is_masked(module)), None)
    got = compiled_parts(model) or describe_attached(model) or (f"a mask of `{masked}`" if masked is not None else "")
    if got:
        raise ShrinkError(
            "the model cannot be shrunk any more",
            got=got,
            wanted="a dense model",
            remedy="shrink first, then prune, quantise and compile; finish() or remove() ends a training scheme",
        )


def cuts_of(model: nn.Module) -> tuple[Cut, ...]:
    """Return the cuts that made a model what it is, in their order; none of a model that was never cut."""
    return tuple(model.__dict__.get(_MARK, ()))


@torch.no_grad()
def masked(model: nn.Module, plan: Cut) -> nn.Module:
    """Return a copy of the large model whose cut channels are zero in every parameter: the reference for `cut`.

    Layers that a plan drops stay in the copy.

    Raises:
        ShrinkError: The plan is not one of this model.
    """
    require_fit(model, plan)
    large = copy.deepcopy(model)
    tensors = dict(large.named_parameters(remove_duplicate=False))
    for axis in plan.axes:
        gone = torch.ones(axis.size, dtype=torch.bool, device="cpu")
        gone[list(axis.kept)] = False
        for name, dim in axis.places:
            if name in tensors:
                places = gone.nonzero().flatten().to(tensors[name].device)
                tensors[name].index_fill_(dim, places, 0)
    return large


def apply(model: nn.Module, plan: Cut) -> Callable[[], None]:
    """Cut a model in place, which `require_fit` has seen, and note the cut in it; return what puts everything back.

    An error on the way puts everything back.
    """
    undo: Undo = []
    try:
        _slice(model, plan, undo)
        for attribute in plan.attributes:
            module = model.get_submodule(attribute.module)
            undo.append(lambda m=module, a=attribute: set_number(m, a.name, a.before))
            set_number(module, attribute.name, attribute.after)
        for name in plan.biases:
            _add_bias(model.get_submodule(name), undo)
        for module in {id(m): m for m in _modules(model, plan)}.values():
            before = refresh(module)
            undo += [lambda m=module, n=name, v=value: setattr(m, n, v) for name, value in before.items()]
        drop(model, plan.layers, undo)
        before = cuts_of(model)
        undo.append(lambda: model.__dict__.update({_MARK: before}))
        model.__dict__[_MARK] = before if plan == Cut() else (*before, plan)
    except BaseException:
        put_back(undo)
        raise
    return lambda: put_back(undo)


def _add_bias(layer: Any, undo: Undo) -> None:
    """Give a layer a bias of zeros."""
    outputs = layer.weight.shape[1] * layer.groups if getattr(layer, "transposed", False) else layer.weight.shape[0]
    undo.append(lambda: setattr(layer, "bias", None))
    layer.bias = nn.Parameter(layer.weight.new_zeros(outputs), layer.weight.requires_grad)


def put_back(undo: Undo) -> None:
    """Undo what was done, the last first."""
    while undo:
        undo.pop()()


def _modules(model: nn.Module, plan: Cut) -> Iterable[nn.Module]:
    """Yield the modules whose tensors or attributes the plan changes."""
    cut_tensors = {id(tensor) for tensor in _by_name(model, {name for name, _ in plan.kept})}
    for name in {attribute.module for attribute in plan.attributes}:
        yield model.get_submodule(name)
    for module in model.modules():
        held = [*module._parameters.values(), *module._buffers.values()]
        if any(id(tensor) in cut_tensors for tensor in held):
            yield module


def _by_name(model: nn.Module, names: set[str]) -> list[Tensor]:
    return [tensor for name, tensor in tensors_of(model).items() if name in names]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by every name."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


@torch.no_grad()
def _slice(model: nn.Module, plan: Cut, undo: Undo) -> None:
    """Put slices in the places of the tensors that are cut; a tied one stays one."""
    tensors, wanted = tensors_of(model), dict[int, dict[int, tuple[int, ...]]]()
    for (name, dim), kept in plan.kept.items():
        wanted.setdefault(id(tensors[name]), {})[dim] = kept
    made: dict[int, Tensor] = {}
    for module in list(model.modules()):
        for held in (module._parameters, module._buffers):
            for attribute, tensor in list(held.items()):
                if tensor is None or id(tensor) not in wanted:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _sliced(tensor, wanted[id(tensor)])
                undo.append(lambda m=module, a=attribute, t=tensor: setattr(m, a, t))
                setattr(module, attribute, made[id(tensor)])  # recurrent layers keep a list of theirs beside


def _sliced(tensor: Tensor, axes: Mapping[int, tuple[int, ...]]) -> Tensor:
    values = tensor.detach()
    for dim, kept in axes.items():
        values = values.index_select(dim, torch.tensor(kept, dtype=torch.long, device=values.device))
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


def require_fit(model: nn.Module, plan: object) -> None:
    """Refuse a plan that is not one of the model.

    Raises:
        ShrinkError: A tensor, attribute or layer is missing or of another size, a tensor is masked or sharded, or
            tensors of one layer that hold the same channels keep others.
    """
    if not isinstance(plan, Cut):
        raise ShrinkError("the plan is none", got=type(plan).__name__, wanted="a `Cut`", remedy="Cut.from_text(text)")
    tensors = tensors_of(model)
    for axis in plan.axes:
        for name, dim in axis.places:
            tensor = tensors.get(name)
            if tensor is None:
                raise _misfit(f"`{name}`, which the model lacks", name)
            if dim >= tensor.ndim or tensor.shape[dim] != axis.size:
                found = f"axis {dim} of {tuple(tensor.shape)} in the model, {axis.size} in the plan"
                raise _misfit(found, name)
            _require_free(model, name, tensor)
            _require_channels(model, name, dim)
    _require_whole_layers(model, plan, tensors)
    for attribute in plan.attributes:
        module = _module(model, attribute.module)
        if number(module, attribute.name) != attribute.before:
            value = module.__dict__.get(attribute.name)
            got = f"`{attribute.name}` = {value!r} in the model, {attribute.before} in the plan"
            raise _misfit(got, attribute.module)
    for name in plan.biases:
        module = _module(model, name)
        if not isinstance(module, (nn.Linear, *Convolution, *Transposed)) or module.bias is not None:
            raise _misfit("a bias, or no layer that could have one", name)
    require_layers(model, plan.layers)


def _require_whole_layers(model: nn.Module, plan: Cut, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a plan that leaves a layer whose tensors do not fit each other, such as a bias that stays whole."""
    kept: dict[tuple[int, int], tuple[int, ...]] = {}
    for (name, dim), held in plan.kept.items():
        if kept.setdefault((id(tensors[name]), dim), held) != held:
            raise _misfit("other positions that stay than under another of the names that the tensor has", name)
    for layer, module in model.named_modules() if kept else ():
        held = {**module._parameters, **module._buffers}
        axes = {name: dim for name, dim in same_axes(module).items() if held.get(name) is not None}
        found = {name: kept.get((id(held[name]), dim)) for name, dim in axes.items()}
        if len(set(found.values())) > 1:
            told = (f"{'all' if one is None else runs(one)} of `{name}`" for name, one in found.items())
            raise ShrinkError(
                "the cut takes a layer's tensors apart",
                got=f"channels that stay: {cut_text(', '.join(told), 160)}",
                wanted=f"the same channels of {', '.join(f'`{name}`' for name in found)}",
                remedy="plans of `Channels.plan` cut all that a channel touches; edit none by hand",
                layer=layer,
            )


def _module(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise _misfit(f"the layer `{name}`, which the model lacks", name) from None


def _require_free(model: nn.Module, name: str, tensor: Tensor) -> None:
    module = model.get_submodule(name.rpartition(".")[0])
    if is_masked(module) or is_distributed(tensor):
        raise ShrinkError(
            "a masked or sharded weight cannot be cut",
            got="a mask" if is_masked(module) else "a DTensor",
            wanted="a dense, whole model",
            remedy="shrink before pruning and before fully_shard, or twofour.masks.detach(model) first",
            layer=name,
        )


def _require_channels(model: nn.Module, name: str, dim: int) -> None:
    """Refuse to cut what is no channel of a known layer: its sizes would not follow."""
    layer, _, attribute = name.rpartition(".")
    module = model.get_submodule(layer)
    if attribute == "weight" and isinstance(module, nn.Embedding) and dim == 0:
        raise _misfit("rows of an embedding, which have a number each", name)
    if attribute == "weight" and isinstance(module, (*Convolution, *Transposed)) and dim > 1:
        raise _misfit("taps of a convolution", name)


def _misfit(got: str, name: str) -> ShrinkError:
    return ShrinkError(
        "the cut does not fit the model",
        got=got,
        wanted="the large model that the cut was made from",
        remedy="build the model as it was built before it was cut",
        layer=name,
    )
