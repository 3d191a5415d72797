"""From data to model calls: the forms an input may have, and the samples taken of what a caller passes as `data`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from twofour.calibration.words import TOKENISE, conversion, described, shapes
from twofour.calls import PAIRS, takes
from twofour.errors import DataError, integer_from

_log = logging.getLogger("twofour.calibration")

# Hugging Face marks the tokens that count, torch those that do not.
_COUNTING, _PADDING = ("attention_mask",), ("src_key_padding_mask", "key_padding_mask")
_BY_SAMPLE = (*_COUNTING, *_PADDING, "input_ids", "token_type_ids", "position_ids")
"""Names of tensors that are (samples, tokens) where they have two axes; `labels` count samples in any case."""
LABELS = "labels"
"""Name of the targets among keyword arguments, as transformers' collators give them and its models take them."""


@dataclass(frozen=True)
class Batch:
    """One call of the model: its inputs, and the target when the data are pairs.

    As an item of `data` it says which is which where a tuple of two could be read either way. `number` is its place in
    the data, from 1, where it is known.
    """

    inputs: Any
    target: Any = None
    number: int = field(default=0, compare=False)

    @property
    def samples(self) -> int:
        """Entries of the leading axis of the first tensor that has axes; 1 of numbers alone, 0 without a tensor."""
        return _size(self.inputs) or 0

    @property
    def whole(self) -> str:
        """Why the batch cannot be cut by samples, "" where it can.

        A tensor counts samples if its leading axis is as long as that of the first one, and stays whole if not. Shapes
        do not tell which where another axis is as long too: a mask may be (samples, tokens) or (tokens, tokens),
        positions (samples,) or (tokens,). Nor do they where the first tensor shares its leading axis with none and
        another has more axes (a table before the samples), or where whole numbers of a length of their own may point
        at samples (the edges of a graph).
        """
        size, found = self.samples, [(name, leaf) for name, leaf in named_leaves("", self.inputs) if leaf.ndim]
        others = [leaf for name, leaf in found[1:] if not _by_sample(name, leaf)]
        axes = {axis for _, leaf in found for axis in leaf.shape[1:]}
        if others and size > 1 and size in axes:
            return f"{size} is the number of its samples and the size of another axis of its inputs"
        apart = [leaf for leaf in others if leaf.shape[0] not in (1, size)]
        shared = any(leaf.shape[0] == size for _, leaf in found[1:])
        table = [leaf for leaf in apart if not shared and leaf.ndim > found[0][1].ndim]
        edges = [leaf for leaf in apart if _is_whole(leaf) and leaf.shape[0] not in axes]
        return f"the leading axes of its inputs are {size} and {(table + edges)[0].shape[0]}" if table + edges else ""

    @property
    def tokens(self) -> Tensor | None:
        """Bool (batch, sequence), True for tokens that are no padding; None when the inputs do not say.

        Nor where a decoder has its own tokens in as many places: which of the two a layer sees cannot be told by shape.
        """
        if not isinstance(self.inputs, Mapping):
            return None
        others = [value for name, value in self.inputs.items() if name.startswith("decoder_")]
        for name in (*_COUNTING, *_PADDING):
            mask = self.inputs.get(name)
            if isinstance(mask, Tensor) and mask.ndim == 2:
                if any(isinstance(other, Tensor) and other.shape[:2] == mask.shape for other in others):
                    return None
                if name in _COUNTING:
                    return mask != 0
                # torch's float form is added to the scores: what is far below zero is padding.
                return mask >= 0 if mask.is_floating_point() else mask == 0
        return None


def to_device(value: Any, device: torch.device) -> Any:
    """The value with every tensor in it on the device; other things pass as they are."""
    return _mapped(value, lambda tensor: tensor.to(device, non_blocking=True))


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    match value:
        case torch.Tensor():
            return change(value)
        case tuple() | list():
            return tuple(_mapped(item, change) for item in value)
        case Mapping():
            return {key: _mapped(item, change) for key, item in value.items()}
        case _:
            return value


def take(
    model: nn.Module,
    data: Any,
    samples: int | Callable[[Batch], int],
    *,
    paired: bool = False,
    tell: Callable[[str], object] | None = None,
) -> list[Batch]:
    """Return as many samples (entries of the leading axis) of `data` as batches, in their order; one is cut to fit.

    A batch of which shapes do not tell what counts samples (`Batch.whole`) is taken whole.

    Of a list of more batches they are spread over the list, whose first ones may be all of a kind, and so they are in
    the batch that is cut; of what can only be walked they are the first.

    A tuple or list of two is a pair (input, target) if `paired`, or if the model's forward can be called with one
    argument; else it holds two arguments, unless its first entry is a dict of arguments for the forward, or a tuple of
    them beside None: that is a pair. A `Batch` is taken as it is. A warning says where what is taken for a target fits
    the forward as a mask of tokens.

    Args:
        model: Its forward decides whether a tuple of two is a pair.
        data: A batch (tensor or dict) or an iterable of batches.
        samples: At least 1; or what tells the number when it is given each batch in turn, the present one included.
        paired: A tuple of two always is (input, target), because a loss wants the target.
        tell: Called with a sentence that says which data are not used, where some are not.

    Raises:
        DataError: There is no batch, one without samples or that is no tensor, tuple, dict or pair of them, or one that
            could be read as a pair as well as two arguments.
    """
    require_usable(data, None if callable(samples) else samples)
    found: dict[int, Batch] = {}
    have = wanted = spare = rest = 0
    for number, item in _spread(data):
        batch = read(model, item, paired)
        if not found and batch is not item and not paired:
            _warn_of_mask(model, batch)
        batch = batch if batch.number else replace(batch, number=number)
        size = _require_samples(batch.inputs, item, number)
        wanted = samples(batch) if callable(samples) else samples
        if (spare := have + size - wanted) > 0:
            batch = some(batch, max(size - spare, 1))
        found[number] = batch
        have, rest = have + batch.samples, size - batch.samples
        if rest < min(spare, size - 1):
            _log.info("batch %d of the calibration data is taken whole: %s", number, batch.whole)
        if spare >= 0:
            break
    if not found:
        raise DataError(
            "there are no calibration data",
            got="no batch",
            wanted=PAIRS,
            remedy="an iterator can be walked only once: pass a list or a DataLoader",
        )
    if tell is not None and (unused := _unused(data, len(found), next(reversed(found)), rest)):
        which = f"{have} samples spread over the data" if _is_list(data) else f"the first {have} samples"
        tell(f"calibrated on {which}; not used: {unused}. `samples` takes another number")
    return [found[number] for number in sorted(found)]


def _is_list(data: Any) -> bool:
    return isinstance(data, Sequence) and not isinstance(data, str | Batch)


def _spread(data: Any) -> Iterator[tuple[int, Any]]:
    """Yield the items and their numbers from 1: those of a list so that each first part is spread over all of it."""
    if not _is_list(data):
        yield from enumerate(items(data), 1)
        return
    for place in spread(len(data)):
        yield place + 1, data[place]


def spread(count: int) -> Iterator[int]:
    """Yield the numbers below a count so that each first part is spread over all of them.

    The order is that of van der Corput: numbers whose bits are reversed.
    """
    bits = max(count - 1, 1).bit_length()
    for number in range(1 << bits):
        place = int(f"{number:0{bits}b}"[::-1], 2)
        if place < count:
            yield place


def some(batch: Batch, count: int) -> Batch:
    """Return so many samples of a batch, spread over it; all of one that is `whole`."""
    places = torch.arange(count, device="cpu") * batch.samples // count
    return picked(batch, lambda tensor: tensor[places.to(tensor.device)])


def part(batch: Batch, start: int, stop: int) -> Batch:
    """Return the samples of a batch from one place to another; all of one that is `whole`."""
    return picked(batch, lambda tensor: tensor[start:stop])


def pieces(batch: Batch, size: int) -> list[Batch]:
    """Return a batch in pieces of so many samples and a last one of what is left; one that is `whole` as it is."""
    return [batch] if batch.whole else [part(batch, at, at + size) for at in range(0, batch.samples, size)]


def picked(batch: Batch, pick: Callable[[Tensor], Tensor]) -> Batch:
    """Pick from what counts samples; what does not stays as it is, and so does all where that cannot be told."""
    if batch.whole:
        return batch
    size = batch.samples

    def change(tensor: Tensor) -> Tensor:
        return pick(tensor) if tensor.ndim and tensor.shape[0] == size else tensor

    return replace(batch, inputs=_mapped(batch.inputs, change), target=_mapped(batch.target, change))


def _unused(data: Any, taken: int, last: int, cut: int) -> str:
    """Say what is left of the data after `taken` batches, of the `last` of which `cut` samples were not used."""
    parts = [f"{cut} samples of batch {last}"] if cut > 0 else []
    if isinstance(data, Sized) and not isinstance(data, Tensor | Mapping) and len(data) > taken:
        parts.append(f"{len(data) - taken} of {len(data)} batches")
    return " and ".join(parts)


def require_usable(data: Any, samples: int | None = None) -> None:
    """Refuse data that cannot be walked, and a number of samples below 1, before anything looks at the data.

    Raises:
        DataError: They are no iterable, or the number is none.
    """
    if samples is not None:
        remedy = "leave it out to use 128, as SparseGPT and Wanda do"
        integer_from(1, "`samples` cannot be used", DataError, remedy, samples=samples)
    if isinstance(data, str) or not isinstance(data, Iterable | Batch):
        raise DataError(
            "the calibration data cannot be used",
            got=described(data),
            wanted=f"an iterable of {PAIRS}",
            remedy=TOKENISE if isinstance(data, str) else "a DataLoader, a list of batches, or one batch as a tensor",
        )


def items(data: Any) -> Iterator[Any]:
    """Yield the items of data; a tensor, a dict or a `Batch` is the only one.

    Raises:
        DataError: They are no iterable.
    """
    if isinstance(data, Tensor | Mapping | Batch):
        return iter((data,))
    require_usable(data)
    return iter(data)


def read(model: nn.Module, item: Any, paired: bool = False) -> Batch:
    """Return an item of data as a batch: `take` says how its inputs are told from its target.

    Positional inputs of which one is a mask of tokens, by the name that the model's forward has for it, become keyword
    arguments, so that what it hides does not count.
    """
    batch = _parted(model, item, paired)
    inputs = _named(model, accepted(model, batch.inputs))
    return batch if inputs is batch.inputs else replace(batch, inputs=inputs)


def accepted(model: nn.Module, inputs: Any) -> Any:
    """Return inputs as the model's forward takes them: a dict without `labels` where it takes all but these."""
    if not isinstance(inputs, Mapping) or LABELS not in inputs or takes(model, (), inputs):
        return inputs
    others = {name: value for name, value in inputs.items() if name != LABELS}
    return others if takes(model, (), others) else inputs


def _named(model: nn.Module, inputs: Any) -> Any:
    """Return a tuple as keyword arguments where the forward's names tell a mask of tokens; all else as it is."""
    if not isinstance(inputs, tuple | list):
        return inputs
    try:
        signature = inspect.signature(model.forward)
        given = signature.bind(*inputs).arguments
    except (TypeError, ValueError):  # they do not fit, which the call tells, or there is no signature
        return inputs
    nameable = all(signature.parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for name in given)
    return given if nameable and Batch(given).tokens is not None else inputs


def _parted(model: nn.Module, item: Any, paired: bool) -> Batch:
    if isinstance(item, Batch):
        return item
    if not isinstance(item, tuple | list) or len(item) != 2:
        return Batch(item)
    first, second = item
    if paired or takes(model, (None,)):
        return Batch(first, second)
    if isinstance(first, Mapping) and takes(model, (), first):
        return Batch(first, second)
    if isinstance(first, tuple | list) and takes(model, tuple(first)):
        if second is None:
            return Batch(first)
        raise DataError(
            "a batch of the calibration data could be a pair (input, target) as well as two arguments",
            got=f"a tuple of ({described(first)}, {type(second).__name__}), and a forward that takes either",
            wanted="one reading",
            remedy="twofour.calibration.Batch(inputs, target), or a dict of keyword arguments",
        )
    return Batch(item)


def _warn_of_mask(model: nn.Module, pair: Batch) -> None:
    """Warn where the target of a pair may be a mask of tokens: the forward has one there, and it holds what one does.

    It is not taken for the mask, since classes of tokens may be 0 and 1 too.
    """
    tokens, mask = pair.inputs, pair.target
    if not isinstance(tokens, Tensor) or not isinstance(mask, Tensor) or mask.ndim != 2:
        return
    try:
        names = [*inspect.signature(model.forward).bind(tokens, mask).arguments]
    except (TypeError, ValueError):  # it takes one argument alone, or there is no signature
        return
    fits = mask.shape == tokens.shape[:2] and names[1:] and names[1] in (*_COUNTING, *_PADDING)
    if fits and bool(((mask == 0) | (mask == 1) | (mask == float("-inf"))).all()):
        _log.warning(
            "the second of a pair is taken for the target, though `forward` has `%s` in its place and it holds what "
            "a mask does: if it is the mask, padding counts as data. Pass a dict, {%r: ..., %r: ...}, where it is the "
            "mask, and twofour.calibration.Batch(input, target) where it is the target",
            *(names[1], names[0], names[1]),
        )


def _require_samples(inputs: Any, item: Any, number: int) -> int:
    """Return how many samples a batch holds, at least 1."""
    size = _size(inputs)
    if size is None:
        raise DataError(
            "a batch of the calibration data holds no tensor",
            got=described(item),
            wanted=PAIRS,
            remedy=conversion(item),
        )
    if size == 0:
        raise DataError(
            "a batch of the calibration data holds no samples",
            got=f"batch {number}: {shapes(inputs)}",
            wanted="at least one sample along the leading axis",
            remedy="look at what the data are read from: a filter or a split may have left nothing",
        )
    return size


def _size(value: Any) -> int | None:
    leaves = [leaf for _, leaf in named_leaves("", value)]
    return next((leaf.shape[0] for leaf in leaves if leaf.ndim), 1 if leaves else None)


def named_leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a value, each with the name of the argument that it is or is in, "" without one."""
    match value:
        case torch.Tensor():
            yield name, value
        case tuple() | list():
            for item in value:
                yield from named_leaves(name, item)
        case Mapping():
            for key, item in value.items():
                yield from named_leaves(str(key), item)


def _by_sample(name: str, tensor: Tensor) -> bool:
    """Whether a tensor counts samples by its name."""
    return name == LABELS or (name.removeprefix("decoder_") in _BY_SAMPLE and tensor.ndim == 2)


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype != torch.bool
