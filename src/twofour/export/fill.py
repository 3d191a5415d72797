"""Contents of a file into a model: as masked weights to train on, or as compiled layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from twofour import masks
from twofour.compiler import CompiledConv, CompiledLinear
from twofour.compiler.build import build, concluded
from twofour.compiler.compilation import Compilation
from twofour.compiler.compile import with_plan
from twofour.compiler.computing import Computing
from twofour.compiler.conv import answer_in_order
from twofour.compiler.embeddings import CompiledEmbedding, Tables, heads
from twofour.compiler.graph import NATIVE
from twofour.compiler.kept import tables_once
from twofour.compiler.low_bits import run_low_bits
from twofour.compiler.plan import Plan
from twofour.compiler.recurrent import RecurrentLayer
from twofour.compiler.replaceable import is_linear, left_alone, require_cpu
from twofour.compiler.terms import Terms
from twofour.errors import FormatError, TwofourError
from twofour.export.buffers import fill_buffers
from twofour.export.cuts import CUTS, cut_given, with_cuts
from twofour.export.engine import choose_engine
from twofour.export.file import Contents
from twofour.export.fit import misfit, require_fit, with_ties
from twofour.export.layers import Allowance, FileLayers, Stored, affordable
from twofour.export.low_bits import LOW_BITS, adopt, require_codes, with_low_bits
from twofour.layers import PrunableWeight, walk
from twofour.native.mapped import mapped_bytes
from twofour.packing import Packed, dense_of
from twofour.packing.encodings import Bits
from twofour.patterns import Pattern, parse

COMPILED = (CompiledLinear, CompiledConv, RecurrentLayer, CompiledEmbedding)

WEIGHT = "a sparse weight of the file"


def fitting(path: Any, model: nn.Module, contents: Contents) -> tuple[nn.Module, Contents]:
    """Return a model that is cut, and whose layers compute, as contents say, and contents that fit it.

    Raises:
        FormatError: The contents are not those of a model of this architecture.
    """
    twin, contents = with_low_bits(path, with_cuts(path, model, contents), contents)
    contents = with_ties(twin, contents)
    require_fit(path, twin, contents)
    return twin, contents


def fill_given(path: Any, model: nn.Module, contents: Contents) -> nn.Module:
    """Cut and fill `model` itself, as `fill_masked` does, let its layers compute as contents say; all or nothing.

    Raises:
        FormatError: The contents do not fit the model, or say of no weight that it is sparse or of low bits.
    """
    undo: list[Callable[[], object]] = [cut_given(path, model, contents)]
    try:
        twin, contents = fitting(path, model, contents)
        undo += adopt(model, twin) if twin is not model else []
        return fill_masked(path, model, contents)
    except BaseException:  # memory that ran out, and Ctrl-C, too
        for put_back in reversed(undo):
            put_back()
        raise


def fill_masked(path: Any, model: nn.Module, contents: Contents) -> nn.Module:
    """Fill `model` with plain weights and attach a mask to each that the file calls sparse; all or nothing.

    Raises:
        FormatError: A sparse weight is no prunable one of the model, does not keep its pattern, or there is none.
    """
    patterns = promised(contents)
    if not patterns and not any(contents.settings.get(key) for key in (LOW_BITS, CUTS)):
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
    terms = _terms(model, said, memory, tokens or affordable(said.tokens, model, allowance), measure)
    terms = replace(terms, native=graph == NATIVE)
    layers = FileLayers(stored, patterns, model, said, terms.computing, allowance)
    weights = dict(layers.weights())
    recurrent = dict(layers.recurrent())
    left = left_alone(model, terms.computing, {**weights, **recurrent}, said.kept_dense)
    tables = Tables.of(model, said.embeddings, weights, stored=stored)
    fast, plan = build(
        model, weights, dict(layers.counts(weights)), terms, recurrent=recurrent, tables=tables.made, left=left
    )
    plan = replace(plan, embeddings=tables.kind, notes=(*plan.notes, *filter(None, [said.smoothed, tables.said])))
    if said.in_order:
        answer_in_order(fast)
    compiled = {name for name, module in fast.named_modules(remove_duplicate=False) if isinstance(module, COMPILED)}
    outside = {name: weight for name, weight in stored.items() if name.rpartition(".")[0] not in compiled}
    _assign(fast, {} if isinstance(fast, COMPILED) else _dense(outside, model), own=True)
    fill_buffers(fast)
    _require_values(path, fast)
    _attach_promised(path, fast, contents)
    fast = fast.eval().requires_grad_(False)
    require_codes(path, fast, contents)
    seen = dict(layers.low_bits_counts(fast)), terms, dict(layers.low_bits_images(fast))
    plan = run_low_bits(fast, replace(plan, kept_dense=said.kept_dense), *seen)
    terms.share_tables(model, fast, weights, stored)
    plan = choose_engine(fast, replace(plan, graph=said.graph), example, terms, graph)
    return _concluded(model, fast, plan, terms)


def _attach_promised(path: Any, fast: nn.Module, contents: Contents) -> None:
    """Let layers that stay torch's own keep their masks, as in `compile`."""
    promises, prunable = promised(contents), walk(fast, eligibility="any", tied="*").by_name
    attach_masks(path, fast, {name: text for name, text in promises.items() if name in prunable})


def _concluded(model: nn.Module, fast: nn.Module, plan: Plan, terms: Terms) -> nn.Module:
    """Return a loaded model with its plan, tables that heads hold kept once."""
    plan = tables_once(fast, plan, terms)
    return with_plan(fast, concluded(plan.with_note(*_notes(model, fast, plan)), terms), terms.computing)


def _notes(model: nn.Module, fast: nn.Module, plan: Plan) -> Iterator[str]:
    """Say what tied heads keep beside their tables, and how much of a loaded model is its file's own pages."""
    yield from heads(model, fast, plan.layers)
    if nbytes := mapped_bytes((*fast.parameters(), *fast.buffers())):
        yield f"{nbytes / 1e6:.2f} MB of it are pages of the file, which processes share"


def _patterns(contents: Contents) -> dict[str, Pattern]:
    """Return the pattern of each sparse weight, under every name of it."""
    found = {name: parse(text) for name, text in promised(contents).items()}
    return found | {alias: found[name] for alias, name in contents.aliases.items() if name in found}


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
            dense = dense_of(weight)
            held = isinstance(weight, Packed)
            whole = held and (isinstance(weight.header.encoding, Bits) or not dense.is_floating_point())
            made[id(weight)] = dense.to(dtypes[name]) if whole else dense
    return {name: made[id(weight)] for name, weight in stored.items()}


def _assign(model: nn.Module, state: Mapping[str, Tensor], *, own: bool = False) -> None:
    """Fill parameters and buffers; in a model of our `own`, or without values, the file's tensors take their places.

    They are then no second copy, and the file's own pages where it is mapped.
    """
    if assign := own or any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        held = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
        state = {name: _like(held[name], tensor) if name in held else tensor for name, tensor in state.items()}
    compiled = {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, COMPILED)}
    tied = _tied(model) if assign else []
    found = model.load_state_dict(dict(state), strict=False, assign=assign)
    for first, *others in tied:  # each name got a parameter of its own
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))
    missing = [name for name in found.missing_keys if name.rpartition(".")[0] not in compiled]
    assert not missing and not found.unexpected_keys, (missing, found.unexpected_keys)


def _like(held: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor as a model's own has it: of its type, and its order of memory; itself where that is so."""
    if held.is_meta or (held.dtype == tensor.dtype and held.is_contiguous()):
        return tensor
    return torch.empty_like(held).copy_(tensor)


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
