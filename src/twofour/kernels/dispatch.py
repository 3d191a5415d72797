"""Which kernel serves which token count: the outcome of measuring one layer, as a value and as text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice

import torch
from torch import Tensor

from twofour.errors import KernelError
from twofour.kernels.base import Prepared, Row
from twofour.kernels.table import find

_REMEDY = "compile the model again, or load its file with twofour.load"


@dataclass(frozen=True)
class DispatchTable:
    """Kernels by token count: step i serves up to `limits[i]` tokens, the last step every count above.

    Attributes:
        limits: Ascending token counts, one less than there are kernels.
        names: Names of the kernels.
    """

    limits: tuple[int, ...]
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.limits) + 1, (self.limits, self.names)
        assert list(self.limits) == sorted(set(self.limits)), self.limits

    @cached_property
    def kernels(self) -> tuple[Row, ...]:
        """The kernels, in the order of `names`.

        Raises:
            KernelError: One of them cannot run here: the dispatch table comes from another machine.
        """
        found = tuple(find(name, Row) for name in self.names)
        for kernel in found:
            if reason := kernel.unavailable():
                raise KernelError(
                    "a compiled layer asks for a kernel that cannot run here",
                    got=f"{kernel.name}: {reason}",
                    wanted="a model compiled on this machine",
                    remedy=_REMEDY,
                )
        return found

    @cached_property
    def layouts(self) -> tuple[str, ...]:
        """The layouts these kernels need, each once, in order of first use."""
        return tuple(dict.fromkeys(kernel.layout for kernel in self.kernels))

    @cached_property
    def by_layout(self) -> dict[str, Row]:
        """One kernel of each layout, in the order of `layouts`."""
        return {layout: next(k for k in self.kernels if k.layout == layout) for layout in self.layouts}

    @cached_property
    def steps(self) -> tuple[tuple[Row, int], ...]:
        """Each kernel with the index of its layout in `layouts`."""
        return tuple((kernel, self.layouts.index(kernel.layout)) for kernel in self.kernels)

    def at(self, tokens: int) -> tuple[Row, int]:
        """Return the kernel for `tokens` and the index of its layout."""
        return self.steps[bisect_left(self.limits, tokens) if self.limits else 0]

    def gather(self, tensors: Sequence[Tensor], sizes: tuple[int, int]) -> tuple[Prepared, ...]:
        """Return the weight (out, in) of these `sizes` in each of `layouts`, of the flat list an operator carries.

        Raises:
            KernelError: There are too few tensors, too many or too small ones.
        """
        needed = {
            kernel: (kernel.least_bytes(*sizes), *kernel.beside_bytes(*sizes)) for kernel in self.by_layout.values()
        }
        least = [size for part in needed.values() for size in part]
        held = [tensor.numel() * tensor.element_size() for tensor in tensors]
        if len(held) != len(least) or any(size < wanted for size, wanted in zip(held, least, strict=True)):
            raise KernelError(
                "the weights of twofour::linear do not fit its dispatch table",
                got=f"{len(held)} weights of {held} bytes",
                wanted=f"layouts {', '.join(self.layouts)} of at least {least} bytes",
                remedy="pass the weights and the dispatch table of one compiled layer, and inputs of its width",
            )
        left = iter(tensors)
        return tuple(
            Prepared(kernel, next(left), tuple(islice(left, len(part) - 1))) for kernel, part in needed.items()
        )

    @cached_property
    def reads(self) -> tuple[torch.dtype, ...]:
        """What the input may be: what every step reads and answers in."""
        first, *others = self.kernels
        return tuple(dtype for dtype in first.reads if all(dtype in kernel.reads for kernel in others))

    @cached_property
    def device(self) -> str:
        """Where the kernels run: "cpu" or "cuda"."""
        return self.kernels[0].device

    @property
    def sparse(self) -> bool:
        """Whether any step is a sparse kernel."""
        return any(kernel.sparse for kernel in self.kernels)

    def to_text(self) -> str:
        """Return the dispatch table as text, for example "16=a;*=b": what the registered operator carries."""
        return ";".join(f"{limit}={name}" for limit, name in zip([*self.limits, "*"], self.names, strict=True))


def build_dispatch(best: dict[int, str], exact: dict[int, str] | None = None) -> DispatchTable:
    """Build the dispatch table from the best kernel at each measured token count.

    A count between two measured ones with different winners goes to the upper one from their geometric mean on.

    Args:
        best: Token count -> kernel, for that count and its neighbourhood.
        exact: Token count -> kernel that serves that count alone.
    """
    limits: list[int] = []
    names: list[str] = []
    tokens = sorted(best)
    for index, count in enumerate(tokens):
        if names and best[count] == names[-1]:
            continue
        if names:
            limits.append(int((tokens[index - 1] * count) ** 0.5))
        names.append(best[count])
    for count, name in sorted((exact or {}).items()):
        # Cut the step (low, high] around `count` in three: (low, count - 1] as before, count alone, (count, high] as
        # before; high is None in the last step. "*=a" with {8: b} becomes "7=a;8=b;*=a".
        at = bisect_left(limits, count)
        low, high = limits[at - 1] if at else 0, limits[at] if at < len(limits) else None
        steps = [(count - 1, names[at]), (count, name), (high, names[at])]
        # Empty parts go: the first where low is count - 1, the last where high is count, which then is twice there.
        steps = [step for step in steps if step[0] is None or (step[0] > low and (step[1] == name or step[0] != count))]
        names[at : at + 1] = [serving for _, serving in steps]
        limits[at : at + 1] = [limit for limit, _ in steps if limit is not None]
    return DispatchTable(tuple(limits), tuple(names))


@cache
def read_dispatch(text: str, kind: type[Row] = Row) -> DispatchTable:
    """Read what `DispatchTable.to_text` wrote, of rows of a kind: see `find`.

    Raises:
        KernelError: The text is no dispatch table, or names a kernel that does not exist or is of another kind.
    """
    try:
        pairs = [step.split("=") for step in text.split(";")]
        *limits, last = [limit for limit, _ in pairs]
        counts = tuple(int(limit) for limit in limits)
        names = tuple(name for _, name in pairs)
        if last != "*" or list(counts) != sorted(set(counts)):
            raise ValueError(text)
    except ValueError:
        raise KernelError(
            "the text is no dispatch table", got=repr(text), wanted='"16=kernel;*=kernel"', remedy=_REMEDY
        ) from None
    for name in names:
        find(name, kind)
    return DispatchTable(counts, names)
