"""save and load: models to files and back, packed or plain."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from twofour import masks
from twofour.compiler import DEFAULT_TOKENS, CompiledLinear
from twofour.compiler.compile import build, with_plan
from twofour.compiler.replaceable import LayerWeight, attention_parts, left_alone, refusal, replaceable
from twofour.errors import FormatError, TwofourError
from twofour.export.file import Contents, read, untie, write
from twofour.layers import walk
from twofour.packing import Packed, pack
from twofour.patterns import parse


def save(model: nn.Module, path: str | os.PathLike[str], *, packed: bool = True) -> None:
    """Write a masked or compiled model to one safetensors file.

    A compiled model's sparse layers are written in the canonical packed form and its dense ones as plain tensors, so
    that any machine can load the file and choose its own kernels. A masked model's masked weights are packed.

    Args:
        model: From `twofour.prune` or `twofour.compile`; a dense model is written plainly.
        path: File to write; it is replaced only once the new one is complete.
        packed: False writes plain weights with their zeros, as any other tool reads them.

    Raises:
        FormatError: The file cannot be written.
        PackingError: A masked weight does not keep its pattern.
    """
    state = dict(model.state_dict())
    weights: dict[str, Packed] = {}
    plan = getattr(model, "plan", None)
    settings: dict[str, Any] = {"kind": "masked" if masks.of(model) else "plain"}
    if plan is not None and hasattr(plan, "memory"):
        settings = {"kind": "compiled", "memory": plan.memory, "tokens": list(plan.tokens), "dtype": plan.dtype}
    for name, module in model.named_modules():
        if isinstance(module, CompiledLinear):
            source = module.prepared.source()
            key = f"{name}.weight".lstrip(".")
            if isinstance(source, Packed):
                weights[key] = source
            else:
                state[key] = source
    for name, mask in masks.of(model).items():
        try:
            weights[name] = pack(state.pop(name), mask.pattern, axis=1)
        except TwofourError as error:
            raise error.for_layer(name) from None
    if not packed:
        state |= {name: weight.unpack() for name, weight in weights.items()}
        weights = {}
    plain, aliases = untie({name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)})
    write(path, Contents(plain, weights, aliases, settings))


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    masked: bool = False,
    memory: str | None = None,
    tokens: Sequence[int] | None = None,
) -> nn.Module:
    """Read a file that `save` wrote into a model of the same architecture.

    Args:
        path: A twofour file, or plain safetensors.
        model: Gives the architecture; its own weights are not read and may be on the meta device, so that the dense
            weights are never in memory.
        masked: True fills `model` itself with plain weights, zeros included, attaches the masks and returns it, ready
            for training; False returns a compiled copy.
        memory: "fast" or "small"; default: what the file was compiled with, else "fast".
        tokens: Token counts to measure; default: those the file was compiled with.

    Raises:
        FormatError: The file is damaged or does not fit the model.
    """
    contents = read(path)
    _require_fit(path, model, contents)
    if masked:
        return _load_masked(path, model, contents)
    memory = memory or str(contents.settings.get("memory", "fast"))
    counts = tokens or _tokens(contents.settings)
    if not contents.packed:
        fast, plan = _from_plain(model, contents, memory, counts)
    else:
        fast, plan = _from_packed(model, contents, memory, counts)
    _require_values(path, fast)
    return with_plan(fast, plan)


def _load_masked(path: Any, model: nn.Module, contents: Contents) -> nn.Module:
    dense = {name: weight.unpack() for name, weight in contents.packed.items()}
    masks.detach(model)
    _assign(model, _expanded(contents, dense))
    by_name = {entry.name: entry for entry in walk(model, eligibility="any").weights}
    for name, weight in contents.packed.items():
        if name not in by_name:
            raise _misfit(path, f"`{name}` is packed, but is no prunable weight of the model")
        pattern = parse(weight.header.pattern)
        entry = by_name[name]
        keep = pattern.project(entry.reduction_last(entry.parameter), absolute=True)
        masks.attach(entry, entry.from_reduction_last(keep), pattern)
    return model


def _from_plain(model: nn.Module, contents: Contents, memory: str, tokens: Sequence[int]) -> Any:
    import copy

    filled = copy.deepcopy(model)
    _assign(filled, _expanded(contents, {}))
    return build(filled, dict(replaceable(filled)), {}, memory=memory, tokens=tokens, left=left_alone(filled))


def _from_packed(model: nn.Module, contents: Contents, memory: str, tokens: Sequence[int]) -> Any:
    parts = attention_parts(model)
    weights: dict[str, LayerWeight] = {}
    plain = dict(contents.plain)
    unpacked: dict[str, Tensor] = {}
    for name, packed in contents.packed.items():
        layer = name.removesuffix(".weight") if name != "weight" else ""
        module = model.get_submodule(layer)
        bias = plain.get(f"{layer}.bias".lstrip("."))
        if (
            refusal(module, layer in parts) is None
            and packed.header.pattern == "2:4"
            and packed.header.dtype == "float32"
        ):
            rows, columns = packed.header.shape
            weights[layer] = LayerWeight(packed, bias, rows, columns, id(packed))
        else:
            unpacked[name] = packed.unpack()
    for layer, module in model.named_modules():
        key = f"{layer}.weight".lstrip(".")
        if layer not in weights and refusal(module, layer in parts) is None and key in plain:
            rows, columns = plain[key].shape
            bias = plain.get(f"{layer}.bias".lstrip("."))
            weights[layer] = LayerWeight(plain[key], bias, rows, columns, id(plain[key]), "stored dense")
    fast, plan = build(model, weights, {}, memory=memory, tokens=tokens, left=left_alone(model))
    held: set[str] = set()
    for layer, entry in weights.items():
        key = f"{layer}.weight".lstrip(".")
        if isinstance(fast.get_submodule(layer), CompiledLinear):
            held.add(key)
        else:
            unpacked[key] = entry.source.unpack() if isinstance(entry.source, Packed) else entry.source
    state = _expanded(contents, unpacked)
    _assign(fast, {name: tensor for name, tensor in state.items() if name not in held})
    return fast.eval().requires_grad_(False), plan


def _expanded(contents: Contents, more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    state = {**contents.plain, **more}
    return state | {alias: state[name] for alias, name in contents.aliases.items() if name in state}


def _assign(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fill parameters and buffers; those on the meta device are replaced by the file's tensors."""
    assign = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    model.load_state_dict(dict(state), strict=False, assign=assign)


def _tokens(settings: Mapping[str, Any]) -> Sequence[int]:
    found = settings.get("tokens")
    good = isinstance(found, list) and 0 < len(found) <= 64 and all(type(n) is int and 0 < n < 1 << 20 for n in found)
    return tuple(found) if good and found else DEFAULT_TOKENS


def _require_fit(path: Any, model: nn.Module, contents: Contents) -> None:
    want = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    have = {name: tuple(tensor.shape) for name, tensor in contents.plain.items()}
    have |= {name: weight.header.shape for name, weight in contents.packed.items()}
    have |= {alias: have[name] for alias, name in contents.aliases.items() if name in have}
    if missing := sorted(want.keys() - have.keys()):
        raise _misfit(path, f"{len(missing)} tensors of the model are not in the file, such as `{missing[0]}`")
    if foreign := sorted(have.keys() - want.keys()):
        raise _misfit(path, f"{len(foreign)} tensors of the file are not in the model, such as `{foreign[0]}`")
    for name, shape in want.items():
        if have[name] != shape:
            raise _misfit(path, f"`{name}` is {have[name]} in the file and {shape} in the model")
        axis = contents.packed[name].header.axis if name in contents.packed else 1
        if axis != 1:
            raise _misfit(path, f"`{name}` is packed along axis {axis}; the reduction axis of its layer is 1")


def _require_values(path: Any, model: nn.Module) -> None:
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if empty:
        raise FormatError(
            "the loaded model has tensors without values",
            got=f"{path}: {', '.join(empty[:3])} are on the meta device and not in any checkpoint",
            wanted="a model whose non-persistent buffers have values",
            remedy="build the model normally, or compute those buffers before loading",
        )


def _misfit(path: Any, got: str) -> FormatError:
    return FormatError(
        "the file does not fit the model",
        got=f"{path}: {got}",
        wanted="a file saved from a model of the same architecture",
    )
