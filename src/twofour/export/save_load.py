"""save and load: models to files and back, packed or plain."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from twofour import masks, native
from twofour.compiler import CompiledConv, CompiledLinear
from twofour.compiler.compilation import compilation_of
from twofour.compiler.embeddings import CompiledEmbedding
from twofour.compiler.graph import require_graph
from twofour.compiler.recurrent import RecurrentLayer
from twofour.compiler.replaceable import require_memory_mode, require_no_autocast, require_tokens
from twofour.compiler.unpacked import WeightedLayer
from twofour.errors import FormatError, PackingError, TwofourError, integer_from
from twofour.export import cuts
from twofour.export.cuts import CUTS
from twofour.export.file import Contents, read, untie, write
from twofour.export.fill import fill_compiled, fill_given, fitting
from twofour.export.low_bits import LOW_BITS, described, patterns_of_codes, take_packed, unpacked
from twofour.export.shards import write_folder
from twofour.files import named
from twofour.layers import describe_schemes, describe_stored, require_unwrapped
from twofour.masks import Mask
from twofour.native.mapped import forget
from twofour.packing import Packed, pack

logger = logging.getLogger("twofour.export")


def save(
    model: nn.Module, path: str | os.PathLike[str], *, packed: bool = True, max_shard_bytes: int | None = None
) -> None:
    """Write a masked or compiled model to one safetensors file, or into a folder as one or several.

    A compiled model's weights that obey a pattern are written in its canonical packed form, whether they run sparse or
    dense here, and its dense ones as plain tensors, those of int8 as whole numbers with their scales. Beside them stand
    the graph it was captured as and the times that its kernels were chosen by: a machine with other instruction sets
    chooses its own, and a file that it saves carries both machines' times. A masked model's masked weights are packed.

    Args:
        model: From `twofour.prune` or `twofour.compile`; a dense model is written plainly.
        path: File to write; it is replaced only once the new one is complete. A folder that exists, or with
            `max_shard_bytes` a new one, gets model.safetensors, or several files and model.safetensors.index.json; what
            an earlier `save` wrote there goes, and another program's model of those names is refused.
        packed: False writes plain weights with their zeros, as any other tool reads them; which of them are sparse
            stands in the metadata. The default writes layers of low bits by their whole numbers and scales: what is
            between two levels of a weight that trains on is in the plain form alone.
        max_shard_bytes: Bytes of tensors in a file at most: `path` is a folder, and a tensor that has more gets a file
            of its own.

    Raises:
        FormatError: The file cannot be written, the folder holds another program's model, `max_shard_bytes` is
            impossible, `model` is no module, it has no values (meta device), or a training scheme is at work in it.
        PackingError: A masked weight does not keep its pattern, or its dtype or pattern has no packed form.
        MaskError: A masked module has lost its weight.
    """
    require_unwrapped(model, FormatError)
    path = named(path, FormatError)
    folder = _is_folder(path, max_shard_bytes)
    contents = contents_of(model, packed=packed)
    if folder:
        write_folder(path, contents, max_shard_bytes)
    else:
        write(path, contents)


def contents_of(model: nn.Module, *, packed: bool = True) -> Contents:
    """Return what a file of a masked or compiled model holds; `save` says what that is, and what is raised."""
    if found := describe_schemes(model):
        raise FormatError(
            "a model in the middle of its training cannot be saved",
            got=found,
            wanted="a model whose weights are what its forward pass uses",
            remedy="call finish() first; for a checkpoint, torch.save the state dicts of model and scheme",
        )
    if found := describe_stored(model):
        raise FormatError(
            "a copy of a model in training holds kept values alone and cannot be saved",
            got=found,
            wanted="a plain and masked model",
            remedy="twofour.training.both_ways.finish(model), then save",
        )
    plain, aliases = untie(_tensors(model))
    masked = {aliases.get(name, name): mask for name, mask in masks.of(model).items()}
    _ = [mask.parameter for mask in masked.values()]  # refuses a module that has lost it
    obeyed = {name: mask.pattern for name, mask in masked.items()} | patterns_of_codes(model)
    patterns = {name: pattern.name for name, pattern in obeyed.items()}
    axes = {name: mask.axis.axis for name, mask in masked.items() if mask.axis.axis != 1}
    weights = dict(take_packed(model, plain, aliases, obeyed)) if packed else {}
    for name, mask in masked.items():
        weights |= _sparse(plain, name, mask, packed) if name not in weights else {}
    _add_compiled(model, plain, weights, aliases, patterns)
    for name, weight in weights.items():
        if weight.header.sparse:
            patterns.setdefault(name, weight.header.pattern)
            axes |= {name: weight.header.axis} if weight.header.axis != 1 else {}
    if not packed:
        plain |= unpacked(model) | {name: weight.unpack() for name, weight in weights.items()}
        weights = {}
    compiled = compilation_of(model)
    made = compiled.to_dict() if compiled is not None else {"kind": "masked" if masks.of(model) else "plain"}
    low = described(model)
    settings = {**made, "patterns": patterns, **({"axes": axes} if axes else {}), **({LOW_BITS: low} if low else {})}
    settings |= {CUTS: plans} if (plans := cuts.described(model)) else {}
    return Contents(plain, weights, aliases, settings)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    masked: bool = False,
    memory: str | None = None,
    tokens: Sequence[int] | None = None,
    graph: bool | str = "auto",
    example: Any = None,
    measure: bool = False,
    mapped: bool = True,
) -> nn.Module:
    """Read a file that `save` wrote into a model of the same architecture.

    Args:
        path: A twofour file, plain safetensors, or a folder with model.safetensors or several files and their index.
        model: Gives the architecture, of a shrunk model the large one's or its own; its weights are not read and may
            be on the meta device, so that the dense weights are never in memory.
        masked: True cuts `model` itself where the file's was shrunk, fills it with plain weights, zeros included,
            attaches the masks and returns it, ready for training; False returns a compiled copy and leaves `model` as
            it is.
        memory: "fast" or "small"; default: what the file was compiled with, else "fast".
        tokens: Token counts to measure besides those that each layer saw in the example of `compile`, which are in the
            file; default: those it was compiled with.
        graph: As in `twofour.compile`. The graph is in the file of a model that was compiled with an example, and is
            checked against the layers; where it does not fit, or there is none, `example` captures the model again, and
            without one the layers run by themselves, with the reason in the plan.
        example: As in `twofour.compile`; read for `graph` alone. Not needed where the file has a graph: inputs like
            those it was compiled with are made up, of random numbers.
        measure: Measure every kernel here once more. False takes the times that the file carries from this machine, or
            from another one with the same instruction sets and as many threads, and measures what they leave open.
        mapped: Let large tensors that run as the file has them, tables of embeddings above all, stand on the file's own
            pages, which processes share; they keep their values whatever becomes of it. A file that the system does not
            guard is read, and the log says why. False reads every file; `masked=True` always does.

    Raises:
        FormatError: The file is damaged, does not fit the model, or (`masked`) says of no weight that it is sparse.
        CompileError: The model is on a device without kernels, `memory` or `tokens` is impossible, `graph` has
            neither an example nor a graph in the file, the model does not run on it, or autocast is at work.
    """
    require_unwrapped(model, FormatError)
    path = named(path, FormatError)
    require_graph(graph, True if example is None else example)
    if not masked:
        require_no_autocast(model)
    if memory is not None:
        require_memory_mode(memory)
    if tokens not in (None, (), []):
        require_tokens(tokens)

    def filled() -> nn.Module:  # `contents` is gone when it ends
        if masked:
            return fill_given(path, model, read(path))
        twin, contents = fitting(path, model, read(path, mapped=mapped))
        return fill_compiled(path, twin, contents, memory, tokens, graph, example, measure)

    loaded = filled()
    native.release_free_memory()  # the file's bytes lay between the layouts made from them: as much again
    if not masked:
        forget((*loaded.parameters(), *loaded.buffers()))  # what a call reads of a table comes back from the file
    return loaded


def _is_folder(path: Path, max_shard_bytes: int | None) -> bool:
    """Say whether `path` is a folder to write into, before any work is done."""
    if max_shard_bytes is None:
        return path.is_dir()
    remedy = "max_shard_bytes=5_000_000_000 is what Hugging Face's hub uses"
    integer_from(1, "the size of a shard is impossible", FormatError, remedy, max_shard_bytes=max_shard_bytes)
    if path.is_file() or path.suffix == ".safetensors":
        raise FormatError(
            "several files cannot be written under the name of one",
            got=f"{path} with max_shard_bytes={max_shard_bytes}",
            wanted="the name of a folder",
            remedy=f"twofour.save(model, {str(path.with_suffix(''))!r}, max_shard_bytes=...)",
        )
    return True


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    if other := [name for name, value in state.items() if not isinstance(value, Tensor)]:
        logger.warning("not stored, because only tensors are: %s", ", ".join(other))
    tensors = {name: value.detach() for name, value in state.items() if isinstance(value, Tensor)}
    if empty := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise FormatError(
            "a model without values cannot be saved",
            got=f"{len(empty)} tensors on the meta device, such as `{empty[0]}`",
            wanted="a model whose weights are loaded",
            remedy="load its weights first: twofour.load(path, model, masked=True)",
        )
    return tensors


def _sparse(plain: dict[str, Tensor], name: str, mask: Mask, packed: bool) -> dict[str, Packed]:
    """Move a masked weight from `plain` into packed form, or only check it when it stays plain."""
    pattern = mask.pattern
    try:
        if not (found := pattern.check(mask.axis.last(plain[name]))).ok:
            raise PackingError(
                f"the weight does not obey {pattern.name}",
                got=found.sentence,
                wanted="a weight that keeps its mask",
                remedy="twofour.masks.enforce(model) applies the masks again",
            )
        return {name: pack(plain.pop(name), pattern, axis=mask.axis.axis)} if packed else {}
    except TwofourError as error:
        raise error.for_layer(name) from None


def _add_compiled(
    model: nn.Module,
    plain: dict[str, Tensor],
    weights: dict[str, Packed],
    aliases: dict[str, str],
    patterns: dict[str, str],
) -> None:
    """Add the weights of compiled layers, each tied one once, and what they obey."""
    first: dict[int, str] = {}
    for key, held in _compiled_weights(model):
        if (stored := first.setdefault(id(held.prepared), key)) != key:
            aliases[key] = stored
            continue
        source = held.source()
        if held.pattern is not None:
            patterns[key] = held.pattern.name
        if isinstance(source, Packed):
            weights[key] = source
        else:
            plain[key] = source


def _compiled_weights(model: nn.Module) -> Iterator[tuple[str, WeightedLayer]]:
    """Yield the weights of compiled layers by their names in the model that was compiled."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, CompiledLinear | CompiledConv | CompiledEmbedding):
            yield f"{name}.weight".lstrip("."), module
        elif isinstance(module, RecurrentLayer):
            for part, held in module.held.items():
                yield f"{name}.{part}".lstrip("."), held
