"""Contents of a file into a model: as masked weights to train on, or as compiled layers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from twofour import masks
from twofour.compiler import CompiledConv, CompiledLinear
from twofour.compiler.build import build, concluded
from twofour.compiler.choose import DEFAULT_TOKENS
from twofour.compiler.choose_recurrent import RecurrentWeights, recurrent_weights
from twofour.compiler.compilation import Compilation
from twofour.compiler.compile import with_plan
from twofour.compiler.computing import Computing
from twofour.compiler.recurrent import RecurrentLayer
from twofour.compiler.recurrent_kinds import is_recurrent, recurrent_refusal
from twofour.compiler.replaceable import (
    LayerWeight,
    attention_parts,
    is_convolution,
    is_linear,
    layer_weight,
    left_alone,
    refusal,
    require_cpu,
)
from twofour.compiler.terms import Terms
from twofour.errors import FormatError, TwofourError
from twofour.export.buffers import fill_buffers
from twofour.export.engine import choose_engine
from twofour.export.file import Contents
from twofour.export.fit import misfit
from twofour.kernels.conv import Images
from twofour.kernels.nm_matmul import DYNAMIC
from twofour.layers import PrunableWeight, walk
from twofour.packing import Packed
from twofour.patterns import Pattern, parse

logger = logging.getLogger("twofour.export")

LARGEST_INPUT = 1 << 28
"""Numbers in the input that a file may ask a layer to be measured on: 1 GB of float32."""

MOST_WORK = 1 << 40
"""Multiply-adds of all that a file may ask to be measured, each called once: some ten seconds of one core, of which
measuring makes minutes. ResNet-50 on 256 images takes that; an 8B Llama at the default token counts two fifths, as its
layers are alike and count once."""

Stored = Packed | Tensor

COMPILED = (CompiledLinear, CompiledConv, RecurrentLayer)

WEIGHT = "a sparse weight of the file"


def fill_masked(path: Any, model: nn.Module, contents: Contents) -> nn.Module:
    """Fill `model` with plain weights and attach a mask to each that the file calls sparse; all or nothing.

    Raises:
        FormatError: A sparse weight is no prunable one of the model, does not keep its pattern, or there is none.
    """
    patterns = promised(contents)
    if not patterns:
        raise FormatError(
            "the file says of no weight that it is sparse",
            got=f"{path}: plain weights without patterns",
            wanted="a file that twofour.save wrote from a masked or compiled model",
            remedy="load it with load_state_dict, then twofour.masks.derive(model, pattern) finds masks in its zeros",
            code="no-patterns",
        )
    state = _dense(_all(contents), model)
    if any(parameter.is_meta for parameter in model.parameters()):
        _assign(model, state)  # nothing to lose there, and weights without values are not prunable
        fill_buffers(model)
    plan = _plan(path, model, state, patterns)
    masks.detach(model)
    _assign(model, state)
    for entry, keep, pattern in plan:
        masks.attach(entry, keep, pattern)
    return model


def promised(contents: Contents) -> dict[str, str]:
    """Return what each sparse weight of a file obeys: what it says of it, else the form that it is packed in."""
    forms = {name: weight.header.pattern for name, weight in contents.packed.items() if weight.header.sparse}
    said = contents.settings.get("patterns")
    return forms | said if isinstance(said, dict) else forms


def attach_masks(path: Any, model: nn.Module, patterns: Mapping[str, str]) -> None:
    """Attach masks to a model that holds sparse weights already; all or nothing.

    Raises:
        FormatError: A name is no prunable weight of the model, or one does not keep its pattern.
    """
    state = {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}
    for entry, keep, pattern in _plan(path, model, state, patterns):
        masks.attach(entry, keep, pattern)


def _plan(
    path: Any, model: nn.Module, state: Mapping[str, Tensor], patterns: Mapping[str, str]
) -> list[tuple[PrunableWeight, Tensor, Any]]:
    """Find the mask of each weight that is said to be sparse."""
    prunable = walk(model, eligibility="any", tied="*").by_name
    for name in patterns:
        if name not in prunable:
            raise misfit("model-unprunable", path, f"`{name}` is no prunable weight of the model", WEIGHT)
    return [_mask(path, prunable[name], name, state[name], text) for name, text in patterns.items()]


def _mask(path: Any, entry: PrunableWeight, name: str, weight: Tensor, text: str) -> tuple[PrunableWeight, Tensor, Any]:
    pattern, last = parse(text), entry.reduction_last(weight)
    try:
        keep = pattern.project(last, absolute=True)
        if not pattern.check(last).ok:
            raise misfit("pattern-broken", path, f"`{name}` does not keep {text}", WEIGHT)
    except FormatError:
        raise
    except TwofourError as error:
        raise misfit("pattern-unfit", path, f"`{name}` cannot carry {text}: {error.got}", WEIGHT) from error
    return entry, entry.from_reduction_last(keep), pattern


def fill_compiled(
    path: Any,
    model: nn.Module,
    contents: Contents,
    memory: str | None,
    tokens: Sequence[int] | None,
    graph: bool | str = "auto",
    example: Any = None,
    measure: bool = False,
) -> nn.Module:
    """Return a compiled copy of `model` with the file's weights; its own are not read.

    With `graph` it runs as a whole on the fastest engine, as in `compile`, by the graph of the file or one captured on
    the example. What a CPU of this one's
    instruction sets measured is in the file and is not measured again, unless `measure` asks for it.

    Raises:
        FormatError: A tensor that no checkpoint holds is on the meta device.
        CompileError: The model is on a device without kernels, or it does not run on the example.
    """
    require_cpu(model, meta=True)
    stored, patterns = _all(contents), _patterns(contents)
    said = Compilation.from_dict(contents.settings, path)
    allowance = Allowance()
    terms = _terms(model, said, memory, tokens or _affordable(said.tokens, model, allowance), measure)
    kept = said.kept_dense
    weights = dict(_weights(stored, patterns, model, said, terms.computing, allowance))
    counts = dict(_counts(said.counts, weights, allowance))
    recurrent = dict(_recurrent(stored, patterns, model, said, terms.computing, allowance))
    left = left_alone(model, terms.computing, {**weights, **recurrent}, kept)
    fast, plan = build(model, weights, counts, terms, recurrent=recurrent, left=left)
    compiled = {name for name, module in fast.named_modules(remove_duplicate=False) if isinstance(module, COMPILED)}
    outside = {name: weight for name, weight in stored.items() if name.rpartition(".")[0] not in compiled}
    state = _dense(outside, model)
    if isinstance(fast, COMPILED):
        state = {}
    _assign(fast, state)
    fill_buffers(fast)
    _require_values(path, fast)
    # Layers that stay torch's own keep their masks, as in `compile`.
    promises, prunable = promised(contents), walk(fast, eligibility="any", tied="*").by_name
    attach_masks(path, fast, {name: text for name, text in promises.items() if name in prunable})
    fast = fast.eval().requires_grad_(False)
    plan = choose_engine(fast, replace(plan, kept_dense=kept, graph=said.graph), example, terms, graph)
    return with_plan(fast, concluded(plan, terms), terms.computing)


def _patterns(contents: Contents) -> dict[str, Pattern]:
    """Return the pattern of each sparse weight, under every name of it."""
    found = {name: parse(text) for name, text in promised(contents).items()}
    return found | {alias: found[name] for alias, name in contents.aliases.items() if name in found}


def _layer_weight(
    stored: Mapping[str, Stored],
    patterns: Mapping[str, Pattern],
    layer: str,
    module: nn.Linear | nn.Conv1d | nn.Conv2d,
    computing: Computing,
) -> LayerWeight:
    """Describe a layer with the file's weight; a dense one in the model's type, as after loading a state dict."""
    key = f"{layer}.weight".lstrip(".")
    weight = source = stored[key]
    bias = stored.get(f"{layer}.bias".lstrip("."))
    if isinstance(weight, Tensor) and weight.is_floating_point():
        weight = weight.to(module.weight.dtype)
    bias = bias if isinstance(bias, Tensor) else None
    found = layer_weight(layer, module, weight, bias, computing, patterns.get(key), module.weight.dtype)
    return replace(found, source=source)  # `weight` may be a copy, whose id the next layer's gets


def _weights(
    stored: Mapping[str, Stored],
    patterns: Mapping[str, Pattern],
    model: nn.Module,
    said: Compilation,
    computing: Computing,
    allowance: Allowance,
) -> Iterator[tuple[str, LayerWeight]]:
    """Yield the layers to compile with the weights of a file: linear ones, and convolutions whose images it knows."""
    parts = attention_parts(model)
    for name, module in model.named_modules():
        if name in said.kept_dense or not (is_linear(module) or is_convolution(module)):
            continue
        if refusal(module, name in parts, computing) is not None:
            continue
        if is_convolution(module) and not _measurable(name, module, said.images.get(name), allowance):
            continue
        found = _layer_weight(stored, patterns, name, module, computing)
        ranged = replace(found, quantization=said.ranges.get(name, DYNAMIC))
        yield name, ranged if found.geometry is None else replace(found, images=said.images[name])


def _recurrent(
    stored: Mapping[str, Stored],
    patterns: Mapping[str, Pattern],
    model: nn.Module,
    said: Compilation,
    computing: Computing,
    allowance: Allowance,
) -> Iterator[tuple[str, RecurrentWeights]]:
    """Yield the recurrent layers to compile with the weights of a file."""
    for name, module in model.named_modules():
        if name in said.kept_dense or not is_recurrent(module) or recurrent_refusal(module, computing) is not None:
            continue
        prefix = f"{name}." if name else ""
        own = {part: _as_in(stored[prefix + part], p) for part, p in module._parameters.items() if p is not None}
        found = recurrent_weights(name, module, own, computing, patterns, said.steps.get(name))
        count, batch = found.steps
        sizes = [(rows, columns, count * batch) for rows, columns in found.problem.shapes]
        if allowance.takes(count * batch * max(map(max, sizes)), sizes):
            yield name, found
        else:
            logger.warning("layer `%s`: %d steps of %d in the file are not measured: too many", name, count, batch)


def _as_in(weight: Stored, parameter: nn.Parameter) -> Stored:
    """Return a dense weight in the model's type, as after loading a state dict."""
    if isinstance(weight, Packed) or not weight.is_floating_point():
        return weight
    return weight.to(parameter.dtype)


def _measurable(name: str, module: nn.Conv1d | nn.Conv2d, images: Images | None, allowance: Allowance) -> bool:
    """Whether a convolution may be measured on the images that a file says."""
    if images is None:
        return False
    numbers = prod(images) * max(module.in_channels, module.out_channels)
    pixels = prod(images) // prod(module.stride)
    if allowance.takes(numbers, [(module.out_channels, prod(module.weight.shape[1:]), pixels)]):
        return True
    logger.warning("layer `%s`: images of %s in the file are not measured: too large", name, images)
    return False


def _affordable(counts: Sequence[int], model: nn.Module, allowance: Allowance) -> tuple[int, ...]:
    """Return the token counts of a file that are measured at every layer, the smallest first where not all can be."""
    sizes = {(module.out_features, module.in_features) for module in model.modules() if isinstance(module, nn.Linear)}
    widest = max((max(size) for size in sizes), default=0)
    taken = [n for n in sorted(set(counts)) if allowance.takes(n * widest, [(*size, n) for size in sizes])]
    if left := [count for count in counts if count not in taken]:
        logger.warning("%s tokens in the file are not measured: too many", ", ".join(map(str, left)))
    return tuple(count for count in counts if count in taken) or tuple(DEFAULT_TOKENS)


class Allowance:
    """What a file may still ask to be measured; cases that are alike are measured once, and count once."""

    def __init__(self) -> None:
        self.left = MOST_WORK
        self._seen: set[tuple[int, int, int]] = set()

    def takes(self, numbers: int, cases: Sequence[tuple[int, int, int]]) -> bool:
        """Whether all of `cases` may be measured; then they are taken from what is left.

        Args:
            numbers: In the largest operand of one of them.
            cases: Rows, columns, and tokens or pixels.
        """
        new = {case for case in cases if case not in self._seen}
        work = sum(map(prod, new))
        if numbers > LARGEST_INPUT or work > self.left:
            return False
        self.left -= work
        self._seen |= new
        return True


def _counts(
    known: Mapping[str, int], weights: Mapping[str, LayerWeight], allowance: Allowance
) -> Iterator[tuple[str, int]]:
    """Yield the layers whose token count in the example the file knows; older files know none."""
    for name, weight in weights.items():
        found = known.get(name)
        if found is None or weight.geometry is not None:
            continue
        if not allowance.takes(found * max(weight.rows, weight.columns), [(weight.rows, weight.columns, found)]):
            logger.warning("layer `%s`: %d tokens in the file are not measured: too many", name, found)
            continue
        yield name, found


def _all(contents: Contents) -> dict[str, Stored]:
    """Every name of the state dict with what is stored for it; tied names share one object."""
    stored: dict[str, Stored] = {**contents.plain, **contents.packed}
    return stored | {alias: stored[name] for alias, name in contents.aliases.items()}


def _dense(stored: Mapping[str, Stored], model: nn.Module) -> dict[str, Tensor]:
    """Return tensors as the model has them; whole numbers without scales become real ones. Tied names stay one."""
    made: dict[int, Tensor] = {}
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    for name, weight in stored.items():
        if id(weight) not in made:
            dense = weight.unpack() if isinstance(weight, Packed) else weight
            whole = isinstance(weight, Packed) and not dense.is_floating_point()
            made[id(weight)] = dense.to(dtypes[name]) if whole else dense
    return {name: made[id(weight)] for name, weight in stored.items()}


def _assign(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fill parameters and buffers; where any is on the meta device, the file's tensors take their places."""
    assign = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    compiled = {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, COMPILED)}
    tied = _tied(model) if assign else []
    found = model.load_state_dict(dict(state), strict=False, assign=assign)
    for first, *others in tied:  # each name got a parameter of its own
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    missing = [name for name in found.missing_keys if name.rpartition(".")[0] not in compiled]
    assert not missing and not found.unexpected_keys, (missing, found.unexpected_keys)


def _tied(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]


def _terms(
    model: nn.Module, said: Compilation, memory: str | None, tokens: Sequence[int] | None, measure: bool
) -> Terms:
    """Return what the caller asks for, else the file, else what suits the model's own type."""
    own = {module.weight.dtype for module in model.modules() if is_linear(module)}
    computing = said.computing or Computing("bfloat16" if own == {torch.bfloat16} else "float32")
    return Terms(computing, memory or said.memory, tuple(tokens or said.tokens), said.machines, measure, said.rules)


def _require_values(path: Any, model: nn.Module) -> None:
    empty = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if empty:
        raise FormatError(
            "the loaded model has tensors without values",
            got=f"{path}: {', '.join(empty[:3])} are on the meta device and not in any checkpoint",
            wanted="a model whose non-persistent buffers have values",
            remedy="build the model normally, or compute those buffers before loading",
        )
