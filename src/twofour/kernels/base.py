"""The protocol of a kernel: one row of the table, which says where it runs, prepares a weight and multiplies by it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from twofour import native
from twofour.errors import KernelError
from twofour.kernels.problem import MaybeTensor, Problem
from twofour.native import pages
from twofour.packing import Packed
from twofour.packing.encodings import Encoding
from twofour.patterns import Pattern, parse

FLOATS = (torch.float32, torch.bfloat16)
"""What rows of 16 bits and fewer read on a CPU."""

EVERY = 1 << 30
"""More tokens than there are."""


@dataclass(frozen=True)
class Row(ABC):
    """What is said of every implementation of every operation.

    Attributes:
        name: `<operation>_<pattern>_<dtype>_<design>__<hardware>`; hardware stands after the double underscore.
        operation: What it computes: "nm_matmul", "hybrid_matmul", "block_matmul", "dense_matmul", "nm_conv",
            "hybrid_conv", "block_conv", "dense_conv".
        pattern: Of the weights it takes, "any" for every N:M, "block" for blocks of every size, "hybrid" for 2:4 and
            any share of dense groups, "dense" for none.
        dtype: Computing type.
        device: "cpu" or "cuda".
        isa: Instruction set it needs (`native.supports`), "any" when torch chooses; of the GPU its least architecture.
        layout: Order of the weight's bytes; kernels of one layout share a prepared weight.
        any_axes: Whether it takes contiguous inputs of more than two axes as they are.
        whole_rows: Whether its call takes in the norms and products beside it.
        looks_up: Whether `rows` returns rows of a prepared weight.
    """

    name: str
    operation: str
    pattern: str
    dtype: str
    device: str
    isa: str
    layout: str
    any_axes: ClassVar[bool] = False
    whole_rows: ClassVar[bool] = False
    looks_up: ClassVar[bool] = False

    @property
    def sparse(self) -> bool:
        """Whether it leaves out the weights that the pattern prunes."""
        return self.pattern != "dense"

    @property
    def form(self) -> Pattern | None:
        """The pattern whose packed form it reads; None for a dense row, and for one that reads the forms of many."""
        return parse(self.pattern) if ":" in self.pattern else None

    def unavailable(self) -> str | None:
        """Return why this kernel cannot run here and now, or None when it can."""
        return None if self.isa == "any" else native.unavailable(self.isa)

    @property
    def reads(self) -> tuple[torch.dtype, ...]:
        """What an input may be: float32, of rows that compute in fewer bits bfloat16 too."""
        return FLOATS[:1] if self.dtype == "float32" else FLOATS

    @property
    def native_product(self) -> int | None:
        """Its place among the products that other native calls run inside; None where torch or a GPU runs it."""
        return native.products().get(self.name)

    def is_own(self, dtype: torch.dtype) -> bool:
        """Whether it is what torch runs anyway for a Linear of this dtype."""
        return False

    def remark(self, in_features: int) -> str:
        """Return what this kernel does differently for a weight of this width, for the plan; "" where nothing."""
        return ""

    def least_bytes(self, out_features: int, in_features: int) -> int:
        """Return how many bytes the first tensor of a prepared weight of this size has at least."""
        return 4 * out_features * in_features

    def beside_bytes(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Return the same of each tensor beside it."""
        return ()

    @abstractmethod
    def run(self, x: Tensor, weight: Any, bias: MaybeTensor, problem: Any, other: MaybeTensor = None) -> Tensor:
        """Return the answer of a problem; see `Kernel.run` and `ConvKernel.run`."""

    def stored(self, prepared: Prepared) -> Packed | Tensor:
        """Return a weight as a file holds it.

        That is what `Prepared.restore` returns, but for rows that hold a dense weight in int8: its whole numbers and
        scales packed as "dense", from which `prepare` makes the same bytes again.
        """
        return prepared.restore()

    @property
    def level(self) -> int:
        """Rank of its instruction set among those of this processor; 0 where torch chooses, and on a GPU."""
        return native.level(self.isa) if self.isa in native.instruction_sets() else 0


R = TypeVar("R", bound=Row)


def row_numbers(places: Tensor) -> Tensor:
    """Return which rows are asked for as int64.

    Raises:
        KernelError: They are of a type that no embedding takes; a conversion would cut fractions off.
    """
    if places.dtype not in (torch.int64, torch.int32):
        raise KernelError(
            "rows of a weight are looked up by whole numbers",
            got=str(places.dtype),
            wanted="int64 or int32",
            remedy="convert them: ids.long()",
        )
    return places.long()


def rows_of(kind: Callable[..., R], operation: str, *layouts: str, counted: bool = False) -> list[R]:
    """Return the native rows of an operation in their order, of some layouts alone where these are given.

    A `kind` is made of the fields of `Row`, a row's place in its table and, `counted`, the tokens worth measuring.
    """
    return [
        kind(
            *(row.name, row.operation, row.pattern, row.dtype, "cpu", row.isa, row.layout, row.index),
            **({"tokens_least": row.least, "tokens_most": row.most} if counted else {}),
        )
        for row in native.rows(operation)
        if not layouts or row.layout in layouts
    ]


def widest(rows: Sequence[R]) -> list[R]:
    """Return the rows of the highest instruction-set level among them."""
    best = max((row.level for row in rows), default=0)
    return [row for row in rows if row.level == best]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A weight as a row reads it; rows of one layout share it, and copies of a model do.

    oneDNN's and MKL's opaque tensors cannot be pickled: they go through what a file holds of them.

    Attributes:
        kernel: The row that prepared it.
        tensor: What is multiplied by.
        beside: Further tensors that the row reads: scales, or the plain weight.
        columns: Inputs of the weight where `tensor` is widened; None where it is not.
    """

    kernel: Any
    tensor: Tensor
    beside: tuple[Tensor, ...] = ()
    columns: int | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of it: what a registered operator is handed."""
        return self.tensor, *self.beside

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def restore(self) -> Packed | Tensor:
        """Return the weight that it was made of; see `Kernel.restore`."""
        return self.kernel.restore(self)

    def stored(self) -> Packed | Tensor:
        """Return what a file holds of it; see `Kernel.stored`."""
        return self.kernel.stored(self)

    def again(self, weight: Packed | Tensor) -> Prepared:
        """Return another weight, prepared as this one is."""
        return self.kernel.prepare(weight)

    def copy(self) -> Prepared:
        """Return the same weight elsewhere in memory."""
        if self.tensor.is_mkldnn:
            return self.again(self.stored())
        flat = self.tensor.is_cpu and self.tensor.ndim <= 2
        return replace(self, tensor=pages.copy(self.tensor) if flat else self.tensor.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.tensor.is_mkldnn:
            return self.kernel.prepare, (self.stored(),)
        return super().__reduce_ex__(protocol)


@dataclass(frozen=True)
class Kernel(Row):
    """One implementation of a product.

    Attributes:
        tokens_least: Tokens from which `compile` tries it; it is correct for any number.
        tokens_most: Tokens up to which it does. Equal to `tokens_least`: its weight is prepared for that count alone.
    """

    tokens_least: int = field(default=0, kw_only=True)
    tokens_most: int = field(default=EVERY, kw_only=True)

    @property
    def one_count(self) -> bool:
        """Whether its prepared weight serves one token count alone, so that it is an exception beside other rows."""
        return self.tokens_least == self.tokens_most

    def serves(self, tokens: int) -> bool:
        """Whether it is worth trying at this token count."""
        return self.tokens_least <= tokens <= self.tokens_most

    def fits(self, rows: int, columns: int) -> bool:
        """Whether it takes a weight of these sizes."""
        return True

    def takes(self, pattern: Pattern, encoding: Encoding) -> bool:
        """Whether it multiplies by weights packed by this pattern, their values in this encoding."""
        return self.form == pattern and encoding.name == self.dtype

    def refuses(self, packed: Packed) -> str | None:
        """Return why this kernel cannot multiply by `packed`, or None when it can."""
        header = packed.header
        if self.takes(header.parsed(), header.encoding):
            return self.unavailable()
        if self.pattern not in ("any", header.pattern, header.parsed().family):
            return f"takes {self.pattern} weights, not {header.pattern}"
        return f"computes in {self.dtype}, the weight is {header.dtype}"

    @abstractmethod
    def prepare(self, weight: Packed | Tensor) -> Prepared:
        """Return the weight in this kernel's layout: canonical form for sparse kernels, (out, in) for dense ones."""

    def restore(self, prepared: Prepared) -> Packed | Tensor:
        """Return the inverse of `prepare`: canonical form for sparse kernels, (out, in) for dense ones."""
        dense = prepared.tensor.to_dense() if prepared.tensor.is_mkldnn else prepared.tensor
        return dense if prepared.columns is None else dense[:, : prepared.columns]

    @abstractmethod
    def run(
        self, x: Tensor, weight: Prepared, bias: MaybeTensor, problem: Problem, other: MaybeTensor = None
    ) -> Tensor:
        """Return epilogue(x @ W.T + bias).

        Args:
            x: (tokens, in), float32 or this row's dtype.
            weight: What `prepare` or `refill` returned.
            bias: float32 (out,) or None.
            problem: What is computed.
            other: Second operand of the epilogue, (tokens, out) in x's dtype.

        Returns:
            (tokens, out) in x's dtype.
        """

    def rows(self, prepared: Prepared, places: Tensor, width: int) -> Tensor:
        """Return rows of a prepared weight as an embedding does.

        Args:
            prepared: What `prepare` returned.
            places: int64 or int32 (...), which rows.
            width: Inputs of the weight.

        Returns:
            (..., in) of this row's dtype.

        Raises:
            KernelError: A place is no row of the weight, or of another type.
        """
        raise NotImplementedError(self.name)

    def scales(self, prepared: Prepared) -> Tensor | None:
        """Return what whole numbers of `rows` are times, float32 (out, 1); None of real ones."""
        return None

    @property
    def refills(self) -> bool:
        """Whether `refill` and `run_columns` are there: for weights whose values move, in training."""
        return False

    def refill_refuses(self, rows: int, columns: int) -> str | None:
        """Return why a weight of these sizes cannot be filled again, or None."""
        return None if self.refills else f"{self.name} prepares a weight once"

    def blank(self, keep: Tensor) -> Prepared:
        """Return what `refill` fills for a mask, bool (out, in).

        It is made from the mask, never from a weight: a kept value that is 0 today may move tomorrow.
        """
        raise NotImplementedError(self.name)

    def refill(self, prepared: Prepared, values: Tensor | Packed, keep: Tensor | None = None) -> Prepared:
        """Return the prepared weight with new values: `prepared` itself, changed in place, or a new one.

        Args:
            prepared: What `blank` or an earlier call returned for this mask.
            values: (out, in), contiguous or the transpose of a contiguous one; values at pruned places are ignored. On
                the CPU also kept values alone: packed along either axis, under the same mask, float32 or bfloat16.
            keep: The mask, of the same strides.
        """
        raise NotImplementedError(self.name)

    def run_columns(self, x: Tensor, weight: Prepared, out_features: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return W @ x: both activations stand transposed.

        Args:
            x: (in, columns).
            weight: What `prepare` or `refill` returned.
            out_features: Rows of W.
            dtype: Of the answer, x's by default.

        Returns:
            (out, columns), contiguous.
        """
        raise NotImplementedError(self.name)
