"""Convolutions in a row in one call: any geometries and strips against float64, and what a call must leave alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import assert_undisturbed, threads
from tests.kernels.sweeps.operands import Guarded
from twofour import native
from twofour.errors import KernelError
from twofour.kernels.conv import ConvKernel, ConvProblem, Geometry, Images, channels_last
from twofour.kernels.conv_chain import ConvChain, Link
from twofour.kernels.table import convolutions
from twofour.packing import pack

ROWS = [row for row in convolutions() if row.device == "cpu" and row.native_convolution is not None and not row.close]
SETS = sorted({row.isa for row in ROWS})


def draw(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def link(row: ConvKernel, geometry: Geometry, activation: str = "none", bias: bool = True, seed: int = 1) -> Link:
    """A convolution with a weight that is 2:4 where the row needs that."""
    weight = draw(geometry.out_channels, geometry.in_channels // geometry.groups, *geometry.kernel, seed=seed)
    weight /= geometry.columns**0.5
    if row.sparse:
        weight[:, 1::4] = weight[:, 2::4] = 0
    shift = draw(geometry.out_channels, seed=seed + 1) if bias else None
    given = pack(weight, "2:4+25%", axis=1) if row.pattern == "hybrid" else weight
    return Link(row, row.prepare(given, geometry), shift, ConvProblem.of(geometry, activation))


def rows_of(isa: str) -> list[ConvKernel]:
    rows = [row for row in ROWS if row.isa == isa]
    if any(row.unavailable() for row in rows):
        pytest.skip(str(rows[0].unavailable()))
    return rows


def assert_right(y: Tensor, chain: ConvChain, x: Tensor, others: list[Tensor | None]) -> None:
    want = chain.reference(x.double(), [None if other is None else other.double() for other in others])
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("isa", SETS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_any_convolutions_in_a_row(isa: str, data: st.DataObject) -> None:
    rows = rows_of(isa)

    def number(least: int, most: int) -> int:
        return data.draw(st.integers(least, most))

    images, height, width = start = number(0, 3), number(1, 20), number(1, 14)
    channels, links, others = data.draw(st.sampled_from([4, 8, 20])), [], []
    x = draw(images, channels, height, width)
    for step in range(number(1, 4)):
        row = data.draw(st.sampled_from(rows))
        kernel, dilation, stride = [(number(1, 3), number(1, 3)) for _ in range(3)]
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        before, after = ((number(0, reach[0]), number(0, reach[1])) for _ in range(2))
        depthwise = row.operation == "depthwise_conv"
        out = channels if depthwise else data.draw(st.sampled_from([4, 12, 36]))
        geometry = Geometry(channels, out, kernel, stride, before, after, dilation, channels if depthwise else 1)
        if min(geometry.sizes(height, width)) < 1 or row.refuses(geometry):
            continue
        activation = data.draw(st.sampled_from(["none", "relu", "relu6", "silu", "gelu"]))
        links.append(link(row, geometry, activation, data.draw(st.booleans()), step))
        height, width = geometry.output(height, width)
        channels = out
        more = not depthwise and data.draw(st.booleans())
        others.append(draw(images, out, height, width, seed=step) if more else None)
    chain = ConvChain(tuple(links))
    if not links or chain.refuses(start):
        return
    with threads(number(1, 3)):
        for strip in (data.draw(st.integers(1, 5)), None):
            assert_right(chain.run(x, others, strip), chain, x, others)


def bottleneck(isa: str) -> ConvChain:
    """The 1x1, 3x3 of stride 2 and 1x1 of a residual network."""
    dense = next(row for row in rows_of(isa) if "direct" in row.layout)
    down, middle = Geometry(20, 8, (1, 1)), Geometry(8, 8, (3, 3), (2, 2), (1, 1), (1, 1))
    geometries = down, middle, Geometry(8, 20, (1, 1))
    return ConvChain(tuple(link(dense, geometry, "relu") for geometry in geometries))


@pytest.mark.parametrize("isa", SETS)
def test_the_first_of_a_chain_reads_a_contiguous_image(isa: str) -> None:
    dense = next(row for row in rows_of(isa) if "direct" in row.layout)
    first, second = Geometry(3, 8, (3, 3), (2, 2), (1, 1), (1, 1)), Geometry(8, 20, (1, 1))
    chain = ConvChain((link(dense, first, "relu6"), link(dense, second)))
    x = draw(2, 3, 23, 30)
    for strip in (1, 3, 99):
        y = chain.run(x, (), strip)
        assert_right(y, chain, x, [None, None])
        assert torch.equal(y, chain.run(channels_last(x), (), strip))
    one, y = link(dense, Geometry(20, 8, (1, 1))), channels_last(torch.empty(1, 8, 4, 4))
    operands = draw(1, 20, 4, 4), [one.weight.tensor], [None], [None], y, [chain._numbers(one, (1, 4, 4))]
    with pytest.raises(KernelError, match="channels_last"):  # 20 channels may not stand apart
        native.extension().conv_chain([dense.native_convolution], *operands, 4, 1)


@pytest.mark.parametrize("isa", SETS)
def test_nothing_is_written_around_the_answer_nor_kept_from_a_call_before(isa: str) -> None:
    chain = bottleneck(isa)
    x, other = draw(2, 20, 9, 7), draw(2, 20, 5, 4)
    image, added = (one.contiguous(memory_format=torch.channels_last) for one in (x, other))
    numbers = [chain._numbers(one, size) for one, size in zip(chain.links, chain.sizes((2, 9, 7))[1:], strict=True)]
    out = Guarded((2, 5, 4, 20), torch.float32)
    weights, biases = [one.weight.tensor for one in chain.links], [one.bias for one in chain.links]
    kernels = [one.kernel.native_convolution for one in chain.links]
    chain.run(torch.full_like(x, torch.nan), [None, None, other], 2)  # leaves NaN in the memory of the lines
    for strip in (1, 2, 3, 5, 99):
        out.view.fill_(torch.nan)
        y = out.view.permute(0, 3, 1, 2)
        native.extension().conv_chain(kernels, image, weights, biases, [None, None, added], y, numbers, strip, 1)
        assert_right(out.checked().permute(0, 3, 1, 2), chain, x, [None, None, other])


@pytest.mark.parametrize("isa", SETS)
def test_strips_give_the_bits_of_whole_images(isa: str) -> None:
    chain = bottleneck(isa)
    x = draw(1, 20, 30, 11)
    assert torch.equal(chain.run(x, rows=4), chain.run(x))
    parts = x
    for one in chain.links:
        parts = one.kernel.run(parts, one.weight, one.bias, one.problem)
    assert torch.equal(chain.run(x), parts)


@pytest.mark.parametrize("isa", SETS)
def test_what_is_no_number_stays_with_those_that_read_it(isa: str) -> None:
    chain = bottleneck(isa)
    x = draw(1, 20, 16, 9)
    clean = chain.run(x, rows=2)
    x[0, 3, 8, 4] = torch.nan
    y = chain.run(x, rows=2)
    reached = torch.zeros(8, 5, dtype=torch.bool)
    reached[4, 2] = True  # the one whose window has row 8 and column 4 in its middle; stride 2
    assert torch.equal(y[..., ~reached], clean[..., ~reached]) and y[..., reached].isnan().all()


def test_the_rows_of_a_strip_fit_in_a_cache() -> None:
    chain = bottleneck("scalar")
    each = 4 * (20 * 112 * 112 + 8 * 112 * 112 + 8 * 56 * 56 + 20 * 56 * 56)
    rows = chain.strip_rows((1, 112, 112))
    assert 1 < rows < 56 and rows * each / 56 < 600 << 10
    assert chain.strip_rows((1, 8, 8)) == 4  # all of them
    assert chain.strip_rows((1, 2, 1 << 20)) == 1


def test_rows_that_read_zeros_alone_are_refused() -> None:
    row = next(row for row in ROWS if "direct" in row.layout and row.isa == "scalar")
    above, below = Geometry(4, 4, (1, 1), before=(1, 0)), Geometry(4, 4, (1, 1), after=(1, 0))
    for geometry in (above, below, Geometry(4, 4, (1, 1), (9, 1), after=(8, 0))):
        chain = ConvChain((link(row, geometry),))
        assert chain.refuses((1, 3, 3)) == "rows of an answer read zeros alone"
        with pytest.raises(ValueError, match="read no row"):
            chain.run(draw(1, 4, 3, 3))
    assert chain.refuses((1, 10, 3)) is None


def test_what_does_not_fit_is_refused() -> None:
    chain, x = bottleneck("scalar"), draw(1, 20, 9, 7)
    none = [None, None]
    for wrong in (draw(1, 20, 5, 5), draw(1, 20, 5, 4).double(), draw(20, 5, 4)):
        with pytest.raises(KernelError, match="operands of a convolution"):
            chain.run(x, [*none, wrong])
    for image in (draw(1, 19, 9, 7), x.double(), x[0]):
        with pytest.raises(KernelError, match="operands of a convolution"):
            chain.run(image)
    with pytest.raises(KernelError, match="weight"):
        ConvChain((chain.links[0], chain.links[0])).run(x)
    y = torch.empty(1, 20, 5, 4).contiguous(memory_format=torch.channels_last)
    image = x.contiguous(memory_format=torch.channels_last)
    sizes: list[Images] = chain.sizes((1, 9, 7))[1:]
    numbers = [chain._numbers(one, size) for one, size in zip(chain.links, sizes, strict=True)]
    given = [[one.kernel.native_convolution for one in chain.links], image, [one.weight.tensor for one in chain.links]]
    given += [[None] * 3, [None] * 3, y, numbers, 2, 1]
    native.extension().conv_chain(*given)
    changes = [(0, [0]), (0, []), (2, given[2][:2]), (3, []), (6, numbers[:2]), (7, 0)]
    changes += [
        (6, [*numbers[:2], [*numbers[2][:at], bad, *numbers[2][at + 1 :]]])
        for at, bad in ((0, 0), (0, 3), (1, 6), (1, -1), (2, 0), (2, 1 << 40), (3, 1 << 40), (5, 65), (7, -1))
    ]
    for place, bad in changes:
        with pytest.raises((ValueError, KernelError)):
            native.extension().conv_chain(*[bad if i == place else one for i, one in enumerate(given)])
    with pytest.raises(IndexError):
        native.extension().conv_chain([999, 0, 0], *given[1:])


def test_calls_from_several_threads_do_not_disturb_each_other() -> None:
    chain = bottleneck("scalar")
    inputs = [draw(n, 20, 4 + n, 9) for n in (1, 2, 3)]
    assert_undisturbed(lambda x: chain.run(x, rows=2), inputs, [chain.run(x) for x in inputs])
