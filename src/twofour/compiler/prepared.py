"""A weight in each layout that its kernels read; one that no call has wanted yet is made by the first that does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C import _is_tracing, _len_torch_dispatch_stack

from twofour.capture import outside_tracing
from twofour.kernels.base import Prepared
from twofour.kernels.dense_matmul import PLAIN
from twofour.kernels.dispatch import read_dispatch
from twofour.kernels.problem import Problem
from twofour.packing import Packed

logger = logging.getLogger("twofour.compiler")

Step = tuple[Callable[[Tensor, Any, Tensor | None, Any, Tensor | None], Tensor], Any, bool]
"""A kernel's `run`, the weight in its layout, and whether it takes contiguous inputs of more than two axes."""


HEADERS = 1 << 20
"""Bytes more than the dense ones' that are not worth a word, of small models."""


class Origin(Protocol):
    """What a weight can be made of again, to the bit."""

    @property
    def nbytes(self) -> int:
        """Bytes that are kept for it alone."""
        ...

    def source(self) -> Packed | Tensor:
        """Return it as `PreparedWeights.source` does."""
        ...

    def stored(self) -> Packed | Tensor:
        """Return it as `PreparedWeights.stored` does."""
        ...

    def layout(self, name: str) -> Prepared | None:
        """Return it in a layout that is there, None where none is."""
        ...


class Ledger:
    """The bytes of weights that a compiled model keeps, and whether it was said that they pass the dense ones'.

    Args:
        dense: Bytes of the dense weights.
        kept: Bytes that are kept now.
        memory: What the model was compiled for.
    """

    def __init__(self, dense: int, kept: int, memory: str = "fast") -> None:
        self.dense, self.kept, self.memory, self.said = dense, kept, memory, too_many(kept, dense)

    def add(self, nbytes: int) -> None:
        """Note that a layout is made now; the first that passes the dense bytes is a warning."""
        self.kept += nbytes
        if not self.said and too_many(self.kept, self.dense):
            self.said = True
            logger.warning("%s", self.text)

    @property
    def text(self) -> str:
        """What is said of them."""
        return more_than_dense(self.kept, self.dense, self.memory)


def too_many(kept: int, dense: int) -> bool:
    """Tell whether weights take more than the dense ones: headers of layouts do not count."""
    return kept > 1.005 * dense + HEADERS


def more_than_dense(kept: int, dense: int, memory: str) -> str:
    """Say that weights are kept in more bytes than the dense ones, and the way out."""
    why = 'for speed some are kept in several forms; memory="small" keeps one of each'
    if memory == "small":
        why = (
            "some are read in another form than the model has them in, and kept in both; graph=False keeps one of each"
        )
    return f"weights take {kept / 1e6:.2f} MB, and the dense ones {dense / 1e6:.2f} MB: {why}"


def on_own(made: Prepared, own: Tensor, *, turned: bool = False) -> Prepared:
    """Return a prepared weight on the model's own tensor where it is a copy of that, `turned` or not: kept once."""
    copied, tensor = made.tensor, own.detach().t() if turned else own.detach()
    plain = made.kernel.layout == PLAIN.layout and type(tensor) is Tensor and own.is_contiguous()
    alike = plain and (copied.dtype, copied.shape, copied.device) == (tensor.dtype, tensor.shape, tensor.device)
    return replace(made, tensor=tensor) if alike else made


class PreparedWeights:
    """A weight in each layout a dispatch table needs; copies of a model share it.

    Its values never change. A layout may be left out (`keep`): it is made again of the others, or of the weight of a
    product that has its rows too.

    Args:
        weights: The weight in each layout.

    Attributes:
        kernels: A kernel of each layout.
        layouts: Their names.
        steps: Dispatch tables that were looked up: limits, and each step's kernel call with its weight.
        ledger: What counts the layouts that are made later.
    """

    def __init__(self, weights: Iterable[Prepared]) -> None:
        self._held: list[Prepared | None] = list(weights)
        self._blank: dict[int, Prepared] = {}
        self._origin: Origin | None = None
        self._tensors: list[Tensor] = [tensor for one in self._held if one for tensor in one.tensors]
        self.kernels: tuple[Any, ...] = tuple(one.kernel for one in self._held if one)
        self.layouts: tuple[str, ...] = tuple(kernel.layout for kernel in self.kernels)
        self.device = self._tensors[0].device if self._tensors else torch.device("cpu")
        self.steps: dict[str, tuple[tuple[int, ...], tuple[Step, ...]]] = {}
        self.ledger: Ledger | None = None

    @property
    def weights(self) -> tuple[Prepared, ...]:
        """The weight in each layout; what was left out is made."""
        return tuple(self.at(index) for index in range(len(self._held)))

    @property
    def tensors(self) -> list[Tensor]:
        """All their tensors in one list, as a registered operator takes them."""
        self._made_whole()
        return self._tensors

    def at(self, index: int) -> Prepared:
        """Return the weight in one layout, which is made where it was left out."""
        held = self._held[index]
        if held is None:
            held = None if self._origin is None else self._origin.layout(self.layouts[index])
            if held is None:
                with _apart():
                    held = self._blank[index].again(self.stored())
                if self.ledger is not None:
                    self.ledger.add(held.nbytes)
            self._held[index] = held
            self.steps = {}
        return held

    def layout(self, name: str) -> Prepared | None:
        """Return the weight in a layout that is there, None where it is not."""
        return self._held[self.layouts.index(name)] if name in self.layouts else None

    def bound(self, dispatch: str) -> tuple[tuple[int, ...], tuple[Step, ...]]:
        """Return the dispatch table's limits, and each step's kernel call with its weight; looked up once per table."""
        if dispatch not in self.steps:
            found = read_dispatch(dispatch)
            self.steps[dispatch] = found.limits, tuple(self._step(kernel, layout) for kernel, layout in found.steps)
        return self.steps[dispatch]

    def _step(self, kernel: Any, layout: int) -> Step:
        held = self._held[layout]
        return (kernel.run, held, kernel.any_axes) if held else (_First(self, kernel), layout, kernel.any_axes)

    def _made_whole(self) -> bool:
        """Make what was left out; torch.compile calls this while it traces, and sees nothing of it."""
        if not all(self._held) or len(self._tensors) < len(self._held):
            self._tensors = [tensor for one in self.weights for tensor in one.tensors]
        return True

    # What torch.compiler.assume_constant_result does; that imports all of torch.compile, a second or two.
    vars(_made_whole)["_dynamo_marked_constant"] = True

    @property
    def held(self) -> list[Prepared]:
        """The weight in the layouts that are there."""
        return [one for one in self._held if one is not None]

    def keep(self, indices: Collection[int], origin: Origin | None = None) -> None:
        """Leave out all layouts but these.

        Args:
            indices: Places in `layouts`; at least one, unless there is an `origin`.
            origin: What has the weight too, to the bit.
        """
        assert indices or origin is not None
        for index, held in enumerate(self._held):
            if held is not None and index not in indices:
                nothing = torch.empty(0, dtype=torch.uint8, device=held.tensor.device)
                self._blank[index], self._held[index] = replace(held, tensor=nothing, beside=()), None
        self._origin, self._tensors, self.steps = origin, [], {}

    def first(self) -> int:
        """Return the place of the layout that `stored` reads: one that leaves out zeros, where one does."""
        return next((index for index, kernel in enumerate(self.kernels) if kernel.sparse), 0)

    def like(self, index: int, other: PreparedWeights | None = None) -> bool:
        """Tell whether a layout holds the weight as the one does that `stored` reads, of `other` if that is given.

        They are then made of each other without loss.
        """
        one, first = self.kernels[index], (other or self).kernels[(other or self).first()]
        return (one.sparse, one.dtype, one.pattern) == (first.sparse, first.dtype, first.pattern)

    def size(self, index: int) -> int:
        """Return the bytes of one layout that is held, 0 of one that is not."""
        held = self._held[index]
        return 0 if held is None else held.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all layouts that are there, and of what stands beside them."""
        return sum(one.nbytes for one in self.held)

    def source(self) -> Packed | Tensor:
        """Return the weight in its canonical packed form, or dense (out, in) where no layout is packed."""
        found = _sparse_first([one.restore() for one in self.held])
        return self._from_origin().source() if found is None else found

    def stored(self) -> Packed | Tensor:
        """Return the weight as a file holds it: as `source` does, a dense one of int8 packed in whole numbers."""
        found = _sparse_first([one.stored() for one in self.held])
        return self._from_origin().stored() if found is None else found

    def _from_origin(self) -> Origin:
        assert self._origin is not None
        return self._origin

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedWeights:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "steps": {}, "_tensors": []}


class _First:
    """The call of a kernel whose layout was left out: it is made, and the next call finds it."""

    def __init__(self, held: PreparedWeights, kernel: Any) -> None:
        self.held, self.kernel = held, kernel

    def __call__(
        self, x: Tensor, layout: int, bias: Tensor | None, problem: Problem, other: Tensor | None = None
    ) -> Tensor:
        return self.kernel.run(x, self.held.at(layout), bias, problem, other)


@contextmanager
def _apart() -> Iterator[None]:
    """Compute on real tensors whatever mode a call is in, for one that outlives the call."""
    with torch.inference_mode(False), torch.no_grad():
        if _len_torch_dispatch_stack() or _is_tracing():
            with outside_tracing():
                yield
        else:
            yield


def _sparse_first(weights: Sequence[Packed | Tensor]) -> Packed | Tensor | None:
    """Return the weight that leaves out its zeros, where one does: it is the model's, and others are copies of it."""
    first = weights[0] if weights else None
    return next((one for one in weights if isinstance(one, Packed) and one.header.sparse), first)


@dataclass(frozen=True)
class RowsOf:
    """Rows of the weight of a product of a graph, which are a layer's.

    Attributes:
        product: The product's weight.
        begin: The first of the rows.
        end: The row behind the last.
        whole: Whether these are all of its rows.
        scales: The scales of the layer, where the product has others.
    """

    product: PreparedWeights
    begin: int
    end: int
    whole: bool = False
    scales: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the scales."""
        return 0 if self.scales is None else self.scales.nbytes

    def source(self) -> Packed | Tensor:
        """Return the rows as `PreparedWeights.source` does."""
        return self._of(self.product.source())

    def stored(self) -> Packed | Tensor:
        """Return the rows as `PreparedWeights.stored` does."""
        return self._of(self.product.stored())

    def layout(self, name: str) -> Prepared | None:
        """Return the product's own layout where it has no other rows, and the same scales."""
        return self.product.layout(name) if self.whole and self.scales is None else None

    def _of(self, whole: Packed | Tensor) -> Packed | Tensor:
        rows = slice(self.begin, self.end)
        if isinstance(whole, Tensor):
            return whole[rows].contiguous()
        header = replace(whole.header, shape=(self.end - self.begin, *whole.header.shape[1:]))
        parts = {name: getattr(whole, name) for name in ("values", "indices", "scales", "zeros")}
        cut = {name: None if part is None else part[rows].contiguous() for name, part in parts.items()}
        cut |= {} if self.scales is None else {"scales": self.scales}
        return replace(whole, header=header, **cut)
