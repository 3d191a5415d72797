"""Batches with padding run on their real tokens alone, where the graph allows that, agrees and is faster so."""

from __future__ import annotations

import bisect
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from twofour.calls import fast_paths_are_off
from twofour.capture import Guard
from twofour.compiler.agreement import Agreement
from twofour.compiler.terms import Terms
from twofour.compiler.timed import held_by_program
from twofour.errors import cut
from twofour.graph import Executor, NotRaggedError, Program, Ragged, attention_masks, filled, pack
from twofour.kernels.ragged import lay_out, real_tokens
from twofour.measure.chooser import clock, race
from twofour.measure.distance import distance

logger = logging.getLogger("twofour.compiler")

FORMS = ("padded", "packed")
"""What a batch with padding is timed as."""

MOST_REAL = 0.9
"""Largest part of a batch's places that is real tokens where packing is worth its copies."""

STEPS = 16
"""Packed batches come in so many sizes between a power of two and the next, so that recordings serve many of them."""

LEAST_STEP = 8
"""Rows; of smaller batches the sizes are multiples of this."""

MASKS = (torch.int64, torch.bool, torch.float32)
"""dtypes of masks whose real tokens are counted."""

LONGEST = 2048
"""Tokens of the longest sequences that are packed where lengths are free: masks are looked at up to them."""

FILLS = (1e3, -1e3)
"""What stands at padding in trials of whether an answer hangs on it."""

MOST_SEQUENCES, MOST_TRIED = 4, 1024
"""Sequences that the example is repeated to, where they have so many tokens at most; else to two."""

LONG_CALL = 0.25
"""Seconds of a call of the example from which it is repeated to two as well: twenty calls of such a batch are made."""

HIDDEN = -1000.0
"""A score that this is added to has no weight: e^-1000 is 0 in float32."""


def room_for(tokens: int) -> int:
    """Return the rows of the packed batch for so many real tokens: the next of `STEPS` sizes an octave.

    At most a sixteenth of the rows are in vain.
    """
    step = max(LEAST_STEP, (1 << (tokens.bit_length() - 1)) // STEPS)
    return -(-tokens // step) * step


class RaggedProgram:
    """The program of a graph for packed batches, and which batches it serves.

    Args:
        graph: The packed graph.
        longest: Tokens of the longest sequences whose masks were looked at.
    """

    def __init__(self, graph: Ragged, longest: int) -> None:
        self.mask, self.batch, self.longest = graph.mask, graph.batch, longest
        self.program = Executor(Program(graph.module))

    def leaves(self, leaves: Sequence[Any]) -> list[Any] | None:
        """Return what the program takes for a batch, None where the padded graph serves it better.

        That is a batch of few places of padding; one of sequences that are longer than any that was tried; one whose
        mask is of other sizes, or holds other numbers than 0 and 1, or a sequence that begins with padding, whose first
        token models read; and any while a compilation or a calibration compares layers, at padded places too.
        """
        mask = leaves[self.mask]
        if leaves[self.batch].shape[:2] != mask.shape or mask.shape[1] > self.longest:
            return None
        real = real_tokens(mask)
        if not 0 < real <= MOST_REAL * mask.numel() or fast_paths_are_off():
            return None
        return self.packed(leaves, real)

    def packed(self, leaves: Sequence[Any], real: int) -> list[Any]:
        """Return what the program takes for a batch of so many real tokens."""
        return [*leaves, *lay_out(leaves[self.mask], room_for(real))]


@dataclass(frozen=True)
class RaggedChoice:
    """What became of packing.

    Attributes:
        program: What runs batches with padding, None where the padded graph does.
        said: What the plan says of it, "" of a graph that has no mask of padding.
    """

    program: RaggedProgram | None = None
    said: str = ""


def choose_ragged(
    module: fx.GraphModule,
    padded: Executor,
    guard: Guard,
    example: Sequence[Any],
    allowed: Agreement,
    terms: Terms,
    held: Sequence[str] = (),
) -> RaggedChoice:
    """Let batches with padding run packed, where that gives the padded graph's answers and takes less time.

    Args:
        module: The rewritten graph.
        padded: The same as a program.
        guard: Which leaves it holds for.
        example: Leaves of a call.
        allowed: How far answers may be apart.
        terms: What held for every layer.
        held: What the layers of the model are timed with.
    """
    if terms.native:  # what `to_runtime` writes answers the same bits, at padding too
        return RaggedChoice()
    try:
        return _chosen(module, padded, guard, example, allowed, terms, held)
    except NotRaggedError as error:
        return RaggedChoice(None, f"batches with padding run padded: {error}" if str(error) else "")
    except MemoryError:
        raise
    except Exception as error:  # a graph never seen must not cost the padded one
        logger.debug("the packed graph failed", exc_info=error)
        said = f"{type(error).__name__}: {cut(' '.join(str(error).split()), 200)}, please report it"
        return RaggedChoice(None, f"batches with padding run padded: {said}")


def _chosen(
    module: fx.GraphModule,
    padded: Executor,
    guard: Guard,
    example: Sequence[Any],
    allowed: Agreement,
    terms: Terms,
    held: Sequence[str],
) -> RaggedChoice:
    found = pack(module)
    most = 2 if _is_long(padded, example) else MOST_SEQUENCES
    leaves = _with_padding(found.mask, guard, example, most)
    _require_mask(module, found.mask, leaves)
    if longer := _longer(found.mask, guard, leaves):
        _require_mask(module, found.mask, longer)
    program = RaggedProgram(found, (longer or leaves)[found.mask].shape[1])
    _require_agreement(program, padded, found, leaves, allowed)
    times = _times(program, padded, leaves, terms, held)
    share = times["packed"] / times["padded"]
    parts = f"of {len(leaves[found.mask])} sequences {_real(leaves[found.mask])} take {share:.2f}x the time of all"
    if share > 1:
        return RaggedChoice(None, f"batches with padding run padded, which is faster ({parts})")
    own = f"; of the example {_real(example[found.mask])}" if program.leaves(example) is not None else ""
    said = f"batches with padding run on their real tokens, {found.calls} calls of them ({parts}{own})"
    return RaggedChoice(program, said)


def _is_long(padded: Executor, example: Sequence[Any]) -> bool:
    """Tell whether a call takes longer than `LONG_CALL`, the sooner of two: the first makes memory and layouts."""
    now = time.thread_time if clock() == "thread" else time.perf_counter

    def taken() -> float:
        begin = now()
        padded(*example)
        return now() - begin

    return taken() > LONG_CALL and taken() > LONG_CALL


def _real(mask: Tensor) -> str:
    return f"{real_tokens(mask)} of {mask.numel()} tokens"


def _with_padding(index: int, guard: Guard, example: Sequence[Any], most: int) -> list[Any]:
    """Return leaves like the example's whose sequences are of many lengths, of up to `most` where there were fewer.

    Raises:
        NotRaggedError: Of such a mask nobody counts the tokens, or the example's sequences are of one.
    """
    leaves, mask = list(example), example[index]
    if mask.dtype not in MASKS:
        raise NotRaggedError(f"its mask is of {mask.dtype}, not of {', '.join(map(str, MASKS))}")
    if mask.shape[1] < 2:
        raise NotRaggedError("the example's sequences are of one token, on which padding cannot be tried")
    wanted = most if most * mask.shape[1] <= MOST_TRIED else 2
    first = [place for place, axis in guard.free if axis == 0]
    if len(mask) < wanted and index in first:
        for place in first:
            leaves[place] = torch.cat([leaves[place]] * -(-wanted // len(mask)))
        if guard.leaves(guard.inputs.value(leaves)) is None:  # an axis that only looks like the batch
            leaves = list(example)
    sequences, length = leaves[index].shape
    parts = max(2, min(sequences, MOST_SEQUENCES))
    real = [max(1, length * (sequence % parts + 1) // parts) for sequence in range(sequences)]
    ends = torch.tensor(real, dtype=torch.int64, device="cpu")
    leaves[index] = (torch.arange(length, device="cpu") < ends[:, None]).to(mask.dtype)
    return leaves


def _longer(index: int, guard: Guard, example: Sequence[Any]) -> list[Any]:
    """Return leaves of the longest sequences that the graph holds for, up to `LONGEST`; none where one length is all.

    A window hides what is far away: at the length of an example all may be near.
    """
    known = example[index].shape[1]
    if (index, 1) not in guard.free:
        return []

    def of_length(length: int) -> list[Any]:
        leaves = list(example)
        for place, axis in guard.free:
            if axis == 0 and len(leaves[place]) > 2:  # the mask of many takes gigabytes
                leaves[place] = leaves[place][:2]
            elif axis == 1 and leaves[place].shape[1] == known:
                leaves[place] = torch.cat([leaves[place]] * -(-length // known), 1)[:, :length]
        return leaves

    def refuses(length: int) -> bool:
        return guard.leaves(guard.inputs.value(of_length(length))) is None

    lengths = range(known + 1, LONGEST + 1)
    held = bisect.bisect_left(lengths, True, key=refuses)
    return of_length(lengths[held - 1]) if held else []


def _require_mask(module: fx.GraphModule, index: int, leaves: Sequence[Any]) -> None:
    """Compute the masks of attention for padding at any place.

    Raises:
        NotRaggedError: They hide something else than the padding among the keys.
    """
    program = Program(attention_masks(module))
    draw = torch.Generator().manual_seed(0)
    given = list(leaves)
    for share in (0.3, 0.7):
        real = torch.rand(leaves[index].shape, generator=draw, dtype=torch.float32, device="cpu") < share
        real[:, 0] = True
        given[index] = real.to(leaves[index].dtype)
        for mask in program(*given):
            if not _hides(mask, real):
                raise NotRaggedError("the mask of its attention hides something else than padding")


def _hides(mask: Any, real: Tensor) -> bool:
    """Tell whether a mask of attention hides the keys that are not real, from all queries of a sequence alike."""
    sequences, length = real.shape
    if not isinstance(mask, Tensor) or mask.ndim > 4:
        return False
    try:
        wide = mask.expand(sequences, mask.shape[-3] if mask.ndim > 2 else 1, length, length)
    except RuntimeError:
        return False
    seen = real[:, None, None].expand(wide.shape)
    if wide.dtype is torch.bool:
        return torch.equal(wide, seen)
    return bool((wide[seen] == 0).all() and (wide[~seen] <= HIDDEN).all())


def _require_agreement(
    program: RaggedProgram, padded: Executor, found: Ragged, leaves: Sequence[Any], allowed: Agreement
) -> None:
    """Compare packed and padded answers at real tokens: of sequences padded behind, and with padding at any place.

    Raises:
        NotRaggedError: They differ; or packed answers differ in any bit by what stands at padding behind the packed
            part, of which agreement to the rounding of a type does not tell, nor where a maximum happens to be real.
    """
    draw = torch.Generator().manual_seed(1)
    mask, others = leaves[found.mask], [Program(filled(found, number)) for number in FILLS]
    holes = torch.rand(mask.shape, generator=draw, dtype=torch.float32, device="cpu") < 0.5
    holes[:, 0] = True
    for real in (mask != 0, holes):
        given = list(leaves)
        given[found.mask] = real.to(mask.dtype)
        try:
            ours = program.program.python(*program.packed(given, int(real.sum())))
        except Exception as error:  # operators meet sizes that the graph was not captured with
            raise NotRaggedError(f"packed it raises {type(error).__name__}: {error}") from error

        def of_real(answer: Sequence[Any], real: Tensor = real) -> list[Any]:
            return [one[real] if by_token else one for one, by_token in zip(answer, found.by_token, strict=True)]

        def anew(given: Sequence[Any] = given, real: Tensor = real, run: Any = of_real) -> list[Any]:
            return run(program.program.python(*program.packed(given, int(real.sum()))))

        def padded_anew(given: Sequence[Any] = given, run: Any = of_real) -> list[Any]:
            return run(padded.python(*given))

        error = distance(of_real(ours), padded_anew())
        if not allowed.judged(error, anew, padded_anew) <= allowed.allowed:
            raise NotRaggedError(f"packed it differs by {error:.1e} at real tokens: its answer depends on padding")
        for other in others:
            moved = other(*program.packed(given, int(real.sum())))
            if distance(of_real(moved), of_real(ours)) != 0:
                raise NotRaggedError("its answer depends on what stands at padding")


def _times(
    program: RaggedProgram, padded: Executor, leaves: Sequence[Any], terms: Terms, held: Sequence[str]
) -> dict[str, float]:
    """Race both forms of a batch of sequences of many lengths."""
    packed = program.packed(leaves, real_tokens(leaves[program.mask]))
    program.program.prepare(packed)
    padded.prepare(leaves)
    sizes = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves if isinstance(leaf, Tensor)]
    facts = repr((program.program.python.text, held_by_program(program.program.python), sizes, *held))
    case = terms.cache.key(f"ragged/{hashlib.sha256(facts.encode()).hexdigest()[:16]}")
    return terms.cache.times(case, FORMS, lambda: _raced(program, padded, leaves, packed))


def _raced(
    program: RaggedProgram, padded: Executor, leaves: Sequence[Any], packed: Sequence[Any]
) -> tuple[dict[str, float], float]:
    calls: dict[str, Callable[[], object]] = {
        "padded": lambda: padded(*leaves),
        "packed": lambda: program.program(*packed),
    }
    return race(calls, repeats=9, seconds=0.5)
