"""Every row of every table that runs on a CPU, against its family's reference: shapes, tails, poison, threads.

A row is swept by the driver of its operation, in `sweeps`; one of an operation without a driver fails, so that no row
is untested. Inputs stand in memory full of NaN and outputs between guards, where the operation takes such operands.
Every weight meets a third of the numbers of tokens and the next weight the next third, so that those of an operation
meet all of them together, and blocks in each of their shapes; `make test-long` has every weight meet all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.sweeps import products
from tests.kernels.sweeps.convolutions import (
    bits_convolution,
    block_convolution,
    convolution,
    hybrid_convolution,
    whole_convolution,
)
from tests.kernels.sweeps.gradients import attention_gradient, nm_conv_gradient, nm_gradient, nm_sddmm, nm_unbiased
from tests.kernels.sweeps.layers import (
    activation,
    attention,
    column_sums,
    fused_block,
    norm,
    recurrent,
    rotation,
    squeeze_excite,
)
from tests.kernels.sweeps.masks import nm_compress, nm_mask, nm_nonzero, nm_stripes, nm_ties, nm_tiles
from tests.kernels.sweeps.operands import THREADS
from tests.kernels.sweeps.products import (
    SHARE,
    TOKENS,
    bits_product,
    block_product,
    hybrid_product,
    product,
    product_of_floats,
)
from twofour import native
from twofour.kernels.base import Kernel
from twofour.kernels.conv import ConvKernel
from twofour.kernels.problem import Problem
from twofour.kernels.table import convolutions, listing, rows
from twofour.packing import Packed

DRIVERS: dict[str, Callable] = {
    **{drive.__name__: drive for drive in (nm_mask, nm_tiles, nm_nonzero, nm_ties, nm_stripes, nm_compress)},
    **{drive.__name__: drive for drive in (nm_unbiased, nm_gradient, nm_conv_gradient, nm_sddmm)},
    **{drive.__name__: drive for drive in (norm, fused_block, squeeze_excite, attention)},
    **{drive.__name__: drive for drive in (attention_gradient, activation, column_sums, rotation)},
    "recurrent": recurrent,
    **{
        "nm_matmul": product,
        "hybrid_matmul": hybrid_product,
        "block_matmul": block_product,
        "bits_matmul": bits_product,
        "bits_conv": bits_convolution,
        "dense_matmul": product,
        "nm_conv": convolution,
        "hybrid_conv": hybrid_convolution,
        "block_conv": block_convolution,
        "dense_conv": convolution,
    },
    **{"depthwise_conv": convolution, "window_conv": whole_convolution},
}
"""Operation -> the sweep of one of its rows: with so many threads, or with each number of them."""

TABLE = {row.name: row for table in native.tables().values() for row in table}
TABLE |= {row.name: row for row in (*rows(), *convolutions()) if row.device == "cpu"}
"""Every row on a CPU; of products and convolutions the kernel that calls it."""


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, row in TABLE.items() if isinstance(row, Kernel | ConvKernel)])
def test_every_row_is_right_with_every_number_of_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SHARE", 1)
    test_every_row_is_right(name)


class Watched:
    """A row of float32 that is right, and what it was called with."""

    dtype, sparse = "float32", True

    def __init__(self) -> None:
        self.met: set[tuple[tuple[int, ...], int, int]] = set()

    def prepare(self, packed: Packed) -> Packed:
        return packed

    def run(self, x: Tensor, prepared: Packed, bias: Tensor | None, problem: Problem) -> Tensor:
        weight = prepared.unpack()
        self.met.add((tuple(weight.shape), len(x), torch.get_num_threads()))
        return torch.nn.functional.linear(x, weight, bias)


@pytest.mark.parametrize("share", [SHARE, 1])
def test_blocks_meet_every_number_of_tokens_in_every_shape(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "SHARE", share)
    row: Any = Watched()
    block_product(row)
    for shape in ((48, 128), (39, 77), (3, 5)):
        assert {tokens for out, tokens, _ in row.met if out == shape} == {count for count in TOKENS if count <= 65}
        assert (shape, 33, 2) in row.met


def test_products_meet_every_number_of_tokens_and_two_threads_few_and_many() -> None:
    row: Any = Watched()
    product_of_floats(row)
    assert {tokens for _, tokens, _ in row.met} == set(TOKENS)
    assert {tokens for _, tokens, count in row.met if count == 2} == {7, 8, 9, 33, 65, 130}


@pytest.mark.parametrize("name", TABLE)
def test_every_row_is_right(name: str) -> None:
    row = TABLE[name]
    assert row.operation in DRIVERS, f"{name}: no driver sweeps rows of {row.operation}; write one here"
    reason = row.unavailable() if isinstance(row, Kernel | ConvKernel) else native.unavailable(row.isa)
    if reason:
        pytest.skip(reason)
    if isinstance(row, Kernel | ConvKernel):
        DRIVERS[row.operation](row)
    else:
        for count in THREADS:
            DRIVERS[row.operation](row, count)


def test_every_operation_that_is_listed_is_swept() -> None:
    assert {one.operation for one in listing() if one.device == "cpu"} == set(DRIVERS)
    assert {one.name for one in listing() if one.device == "cpu"} == set(TABLE)
