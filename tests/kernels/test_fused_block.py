"""Fused blocks against torch in float64: every step, random programs, odd shapes, strides, dtypes, poison, threads."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import threads
from tests.turns import in_turn
from twofour import native
from twofour.errors import KernelError
from twofour.kernels.fused_block import Expression, Value, fused_block, fused_block_reference, program, steps

SHAPES = [(1,), (7,), (1, 1), (3, 5), (64, 16), (2, 3, 50), (5, 1024), (2, 2049), (1, 5000), (4, 1, 3, 7), (130, 9)]
SHAPES += [(37, 64), (3, 4096)]  # rows of whole vectors: steps run together up to a reduction
ARITIES = {"unary": 1, "binary": 2, "ternary": 3, "reduce": 1}
ROWS = [row for row in native.rows("fused_block") if native.supports(row.isa)]


def operands(*shapes: tuple[int, ...], seed: int = 0, positive: bool = False) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator) for shape in shapes]
    return [tensor.abs() + 0.1 for tensor in found] if positive else found


def run(row: native.NativeRow, expression: Expression, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    program(expression).run(row.index, inputs, outputs, native.threads())
    return outputs


def poisoned(expression: Expression, inputs: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in inputs))
    sizes = [(*shape[:-1], 1) if value.of_row else shape for value in expression.stores]
    return [torch.full(size, torch.nan, dtype=dtype) for size in sizes]


def assert_block(row: native.NativeRow, expression: Expression, inputs: list[Tensor], tolerance: float = 1e-5) -> None:
    found = run(row, expression, inputs, poisoned(expression, inputs))
    for got, want in zip(found, fused_block_reference(expression, inputs, torch.float64), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("step", [name for name, kind in steps().items() if kind in ARITIES])
def test_every_step_on_every_row(row: native.NativeRow, step: str) -> None:
    for shape, team in itertools.product(SHAPES, (1, 2)):
        expression = Expression()
        values = [expression.load() for _ in range(ARITIES[steps()[step]])]
        expression.store(expression.apply(step, *values))
        positive = step in ("sqrt", "rsqrt", "log", "log1p", "pow")
        with threads(team):
            assert_block(row, expression, operands(*[shape] * len(values), positive=positive), 1e-4)


SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 3e38, -3e38, 88.8, -103.9, 1e6, -1e6, 0.5, -2.5]
NEAR = ("gelu", "gelu_tanh", "silu")
"""Whose answers far below zero are less exact."""
SIGNED_AT_ZERO = (
    "abs",
    "neg",
    "tanh",
    "expm1",
    "sin",
    "erf",
    "log1p",
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "sqrt",
    "trunc",
)


@in_turn("row", ROWS, ids=lambda row: row.name)
@in_turn("step", [n for n, kind in steps().items() if kind in ("unary", "binary", "reduce")])
def test_special_numbers_are_torchs(row: native.NativeRow, step: str) -> None:
    x = torch.tensor(SPECIAL)
    x = x[x.abs() < 1e38] if step == "gelu" else x  # above, oneDNN's formula overflows
    expression = Expression()
    values = [expression.load() for _ in range(ARITIES[steps()[step]])]
    expression.store(expression.apply(step, *values))
    inputs = [x, x.unsqueeze(1)] if len(values) == 2 else [x.unsqueeze(1)] if steps()[step] == "reduce" else [x]
    (found,) = run(row, expression, inputs, poisoned(expression, inputs))
    (want,) = fused_block_reference(expression, inputs)
    rtol, atol = (1e-5, 1e-36) if step in NEAR else (2e-6, 1e-37)
    torch.testing.assert_close(found, want, rtol=rtol, atol=atol, equal_nan=True)


@in_turn("row", ROWS, ids=lambda row: row.name)
@in_turn("step", SIGNED_AT_ZERO)
def test_a_zero_keeps_its_sign_as_torchs_does(row: native.NativeRow, step: str) -> None:
    x = torch.tensor([0.0, -0.0] * 9)
    expression = Expression()
    expression.store(expression.apply(step, expression.load()))
    (found,) = run(row, expression, [x], poisoned(expression, [x]))
    (want,) = fused_block_reference(expression, [x])
    assert torch.equal(found, want) and torch.equal(found.signbit(), want.signbit())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_gelu_at_infinity_is_its_formula(row: native.NativeRow) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan] * 7)
    expression = Expression()
    expression.store(expression.apply("gelu", expression.load()))
    (found,) = run(row, expression, [x], poisoned(expression, [x]))
    torch.testing.assert_close(found, x / 2 * (1 + torch.erf(x / 2**0.5)), rtol=0, atol=0, equal_nan=True)


def softmax(expression: Expression, x: Value) -> Value:
    exponentials = expression.apply("exp", expression.apply("sub", x, expression.apply("amax", x)))
    return expression.apply("div", exponentials, expression.apply("sum", exponentials))


def layer_norm(expression: Expression, x: Value, weight: Value, bias: Value) -> Value:
    centred = expression.apply("sub", x, mean(expression, x))
    variance = mean(expression, expression.apply("square", centred))
    scaled = expression.apply("mul", centred, expression.apply("rsqrt", expression.apply("add", variance, 1e-5)))
    return expression.apply("add", expression.apply("mul", scaled, weight), bias)


def mean(expression: Expression, x: Value) -> Value:
    return expression.apply("over_width", expression.apply("sum", x))


@in_turn("row", ROWS, ids=lambda row: row.name)
@in_turn("shape", SHAPES)
def test_softmax_and_layer_norm(row: native.NativeRow, shape: tuple[int, ...]) -> None:
    expression = Expression()
    x, weight, bias = (expression.load() for _ in range(3))
    expression.store(softmax(expression, x))
    expression.store(layer_norm(expression, x, weight, bias))
    inputs = operands(shape, shape[-1:], shape[-1:])
    found = run(row, expression, inputs, poisoned(expression, inputs))
    torch.testing.assert_close(found[0], inputs[0].softmax(-1), rtol=1e-5, atol=1e-6)
    want = torch.nn.functional.layer_norm(inputs[0], shape[-1:], inputs[1], inputs[2])
    torch.testing.assert_close(found[1], want, rtol=1e-4, atol=1e-4)


@pytest.fixture
def streaming() -> Iterator[None]:
    """Blocks of any size write past the caches, and ask ahead for what they read."""
    before = native.extension().block_streams_from(-1)
    yield
    native.extension().block_streams_from(before)


@in_turn("row", ROWS, ids=lambda row: row.name)
@in_turn("shape", SHAPES)
@in_turn("dtype", [torch.float32, torch.bfloat16])
def test_writing_past_the_caches_changes_no_bit(
    row: native.NativeRow, shape: tuple[int, ...], dtype: torch.dtype, streaming: None
) -> None:
    expression = Expression()
    x, weight, bias = (expression.load() for _ in range(3))
    moved = expression.apply("add", expression.apply("mul", x, 2.0), bias)
    for value in (softmax(expression, moved), layer_norm(expression, moved, weight, bias), moved):
        expression.store(value)
    expression.store(expression.apply("amax", moved))
    inputs = [tensor.to(dtype) for tensor in operands(shape, shape[-1:], shape)]
    streamed = run(row, expression, inputs, poisoned(expression, inputs, dtype))
    native.extension().block_streams_from(1 << 40)
    kept = run(row, expression, inputs, poisoned(expression, inputs, dtype))
    assert all(torch.equal(a, b) for a, b in zip(streamed, kept, strict=True))


@in_turn("row", ROWS, ids=lambda row: row.name)
@in_turn("width", [4, 16, 32, 48, 64, 128, 1024, 2064, 4096])
@in_turn("reduction", ["sum", "amax", "amin", "prod"])
def test_a_reduction_ends_a_chain_whose_values_are_read_again(
    row: native.NativeRow, width: int, reduction: str
) -> None:
    expression = Expression()
    x, y = expression.load(), expression.load()
    first = expression.apply("mul", expression.apply("add", x, y), 0.5)  # kept for the next loop
    second = expression.apply("abs", first)  # read twice
    of_rows = expression.apply(reduction, expression.apply("maximum", second, 0.9))
    expression.store(second)
    expression.store(expression.apply("sub", expression.apply("mul", first, of_rows), second))
    expression.store(of_rows)
    assert_block(row, expression, operands((19, width), (19, width)), 1e-4)


@in_turn("row", ROWS, ids=lambda row: row.name)
@in_turn("width", [8, 16, 32, 48, 64, 80])
def test_short_rows_that_share_a_pass_keep_their_own_values(row: native.NativeRow, width: int, streaming: None) -> None:
    """Row values, weights that every tile reads, and sums of several rows at once; two tiles of rows and a part."""
    expression = Expression()
    x, weight, scale = expression.load(), expression.load(), expression.load(of_row=True)
    scaled = expression.apply("add", expression.apply("mul", expression.apply("mul", x, scale), weight), weight)
    expression.store(scaled)
    expression.store(expression.apply("amax", expression.apply("sub", scaled, scale)))
    expression.store(expression.apply("mul", scaled, expression.apply("sum", expression.apply("abs", scaled))))
    rows = 2 * (2048 // width) + 3
    assert_block(row, expression, operands((rows, width), (width,), (rows, 1)), 1e-4)
    low = [*operands((rows, width)), torch.randn(width).bfloat16(), *operands((rows, 1))]
    assert_block(row, expression, low, 1e-4)


CALM = ["neg", "abs", "tanh", "sigmoid", "sin", "relu", "erf", "cos", "floor", "sign", "isnan", "logical_not"]
PAIRS = ["add", "sub", "mul", "maximum", "minimum", "lt", "ge", "eq", "rsub"]


def grown(seed: int) -> tuple[Expression, list[Tensor]]:
    """A random expression of 10 to 60 steps whose numbers stay small; operands are broadcast, strided, of any dtype."""
    choice = random.Random(seed)
    sizes = [choice.choice((1, 2, 3, 5, 8, 17)) for _ in range(choice.randint(0, 2))]
    sizes.insert(choice.randint(0, len(sizes)), choice.choice((1, 4, 33, 300, 1100)))
    expression, inputs = Expression(), []
    for index in range(choice.randint(1, 4)):
        shape = [size if index == 0 or choice.random() < 0.7 else 1 for size in sizes]
        tensor = operands(tuple(shape), seed=seed + index)[0]
        kind = choice.random()
        if kind < 0.2 and len(shape) > 1:
            tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
        elif kind < 0.3:
            tensor = torch.stack((tensor, tensor), -1)[..., 1]
        elif kind < 0.4:
            tensor = tensor.bfloat16()
        elif kind < 0.5:
            tensor = tensor > 0
        inputs.append(tensor)
    values = [expression.load() for _ in inputs]
    for _ in range(choice.randint(10, 60)):
        kind = choice.random()
        if kind < 0.4:
            made = expression.apply(choice.choice(CALM), choice.choice(values))
        elif kind < 0.8:
            a, b = choice.choice(values), choice.choice([*values, choice.uniform(-2, 2)])
            made = expression.apply(choice.choice(PAIRS), *choice.sample([a, b], 2))
        elif kind < 0.9:
            made = expression.apply("where", *(choice.choice([*values, 0.5]) for _ in range(2)), choice.choice(values))
        else:
            tiles = [value for value in values if not value.of_row]
            made = expression.apply(choice.choice(("sum", "amax", "amin")), choice.choice(tiles))
            made = expression.apply("over_width", made)
        values.append(expression.apply("sin", made))
    for value in choice.sample(values, choice.randint(1, 3)):
        expression.store(value)
    return expression, inputs


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.sampled_from(ROWS), st.sampled_from((1, 2)))
def test_random_programs_are_what_torch_computes(seed: int, row: native.NativeRow, team: int) -> None:
    expression, inputs = grown(seed)
    with threads(team):
        found = run(row, expression, inputs, poisoned(expression, inputs))
    single = fused_block_reference(expression, inputs)
    exact = fused_block_reference(expression, inputs, torch.float64)
    for got, want, wide in zip(found, single, exact, strict=True):
        near = (got.double() - wide).abs() <= 1e-4 + 10 * (want.double() - wide).abs()
        # A comparison or a floor of numbers that differ in their last bits may jump; nearly none does.
        assert near.double().mean() > 0.97 and not got.isnan().any(), seed


def test_dtypes_of_outputs(row: native.NativeRow = ROWS[-1]) -> None:
    expression = Expression()
    x = expression.load()
    expression.store(expression.apply("mul", x, 2.0))
    expression.store(expression.apply("gt", x, 0.0))
    (given,) = operands((5, 33))
    low, truth = torch.empty(5, 33, dtype=torch.bfloat16), torch.empty(33, 5, dtype=torch.bool).T
    run(row, expression, [given], [low, truth])
    assert torch.equal(low, (given * 2).bfloat16()) and torch.equal(truth, given > 0)


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ([(3, 4), (5,)], [(3, 4)], "a shape that is broadcast"),
        ([(3, 4), (4,)], [(4,)], "a number of its own for each place"),
        ([(3, 4)], [(3, 4)], "another number of operands"),
        ([(1,) * 17, (1,)], [(1,)], "at most 16 axes"),
    ],
)
def test_operands_that_do_not_fit_are_refused(inputs: list, outputs: list, message: str) -> None:
    expression = Expression()
    expression.store(expression.apply("add", expression.load(), expression.load()))
    made = program(expression)
    with pytest.raises(KernelError, match=message):
        fused_block(made, operands(*inputs), [torch.empty(shape) for shape in outputs])
    wide = torch.empty(3, 1).expand(3, 4)
    with pytest.raises(KernelError, match="a number of its own"):
        fused_block(made, operands((3, 4), (3, 4)), [wide])
    with pytest.raises(KernelError, match=r"torch.float32"):
        fused_block(made, [torch.ones(4), torch.ones(4).double()], [torch.empty(4)])


def test_nothing_behind_an_input_is_read() -> None:
    """Its last number is the last of a page, and the next page may not be read: a child ends where it is."""
    code = f"""
import ctypes, mmap, torch
from twofour.kernels.fused_block import Expression, program
memory = mmap.mmap(-1, 8192)
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + 4096), 4096, 0) == 0
for rows, width in ((8, 6), (16, 3), (2, 24), (1, 48), (3, 16), (4, 1), (5, 7)):
    for step in ("sub", "mul"):
        expression = Expression()
        x = expression.load()
        expression.store(expression.apply("exp", expression.apply(step, x, expression.apply("amax", x))))
        expression.store(expression.apply(step, x, expression.apply("sum", x)))
        size = rows * width
        given = torch.frombuffer(memory, dtype=torch.float32, count=size, offset=4096 - 4 * size).view(rows, width)
        given.copy_(torch.randn(rows, width))
        answers = [torch.empty(rows, width), torch.empty(rows, width)]
        for row in {[row.index for row in ROWS]}:
            print(row, rows, width, step, flush=True)
            program(expression).run(row, [given], answers, 1)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, f"row, rows, width and step last run: {child.stdout[-40:]}\n{child.stderr}"


def test_rows_alone_are_written_whole_and_rows_of_nothing_are_refused() -> None:
    expression = Expression()
    expression.store(expression.apply("mul", expression.load(of_row=True), 2.0))
    x, y = torch.randn(5, 7, 1), torch.full((5, 7, 1), torch.nan)
    fused_block(program(expression), [x], [y])
    assert torch.equal(y, 2 * x)
    expression = Expression()
    expression.store(expression.apply("sum", expression.load()))
    with pytest.raises(KernelError, match=r"rows without values(.|\n)*one by one"):
        fused_block(program(expression), [torch.empty(4, 0)], [torch.empty(4, 1)])


@pytest.mark.parametrize("step", ["sin", "cos"])
def test_a_number_does_not_depend_on_its_neighbours(step: str) -> None:
    expression = Expression()
    expression.store(expression.apply(step, expression.load()))
    x = torch.randn(64) * 5
    alone, among = torch.empty(64), torch.empty(128)
    fused_block(program(expression), [x], [alone])
    mixed = torch.stack([x, torch.full((64,), 1e9)], 1).flatten()
    fused_block(program(expression), [mixed], [among])
    assert torch.equal(among[::2], alone)


def test_a_view_that_torch_negates_on_reading_is_read_so() -> None:
    expression = Expression()
    expression.store(expression.apply("exp", expression.load()))
    x, y = torch._neg_view(torch.randn(16)), torch.empty(16)
    fused_block(program(expression), [x], [y])
    torch.testing.assert_close(y, x.exp())


def test_programs_that_read_what_no_step_wrote_are_refused() -> None:
    """Their scratch holds numbers of other calls."""
    ext = native.extension()
    row = ext.block_row_register
    load, store, total = ("load", 0, 0, 0, 0, 0.0), ("store", 0, 0, 0, 0, 0.0), ("sum", row, 0, 0, 0, 0.0)
    late, last = ("add", 1, 0, row, 0, 0.0), ("store", 0, 1, 0, 0, 0.0)
    bad = [
        ([store], [(0, 1, False)]),
        ([("neg", 0, 0, 0, 0, 0.0), store], [(0, 2, False)]),
        ([("add", 0, 0, 1, 0, 0.0), store], [(0, 2, False)]),
        ([load, late, last], [(0, 3, False)]),
        ([load, total, late, last], [(0, 4, False)]),  # the sum is whole when its loop has ended
        ([load, total, late, last], [(0, 2, False), (2, 4, False)]),  # register 0 is not kept for the second loop
        ([load, total, ("store", 0, row + 1, 0, 0, 0.0)], [(0, 2, False), (2, 3, True)]),
    ]
    for lines, loops in bad:
        with pytest.raises(KernelError, match="reads a register that it has not written"):
            ext.BlockProgram(lines, loops, [False, False], 2, 1, 1, [])
    ext.BlockProgram([load, total, late, last], [(0, 2, False), (2, 4, False)], [True, False], 2, 1, 1, [])
    ext.BlockProgram([load, total, load, late, last], [(0, 2, False), (2, 5, False)], [False, False], 2, 1, 1, [])


def test_programs_that_leave_their_registers_are_refused() -> None:
    ext = native.extension()
    row = ext.block_row_register
    bad = [
        ("load", 1, 0, 0, 0), ("load", 0, 1, 0, 0), ("store", 1, 0, 0, 0), ("nothing", 0, 0, 0, 0),
        ("neg", 0, row, 0, 0), ("sum", 0, 0, 0, 0), ("add", 0, 0, row, 0), ("add", 0, 0, -2, 0),
        ("sum", row + 1, 0, 0, 0), ("where", 0, 0, 0, 9), ("fill", -1, 0, 0, 0),
    ]  # fmt: skip
    for line in bad:
        lines = [(*line, 0.0), ("store", 0, 0, 0, 0, 0.0)]
        with pytest.raises(KernelError, match="fused block's program"):
            ext.BlockProgram(lines, [(0, len(lines), False)], [False], 1, 1, 1, [])
    with pytest.raises(KernelError, match="loops that do not follow"):
        ext.BlockProgram([("store", 0, 0, 0, 0, 0.0)], [(1, 1, False)], [False], 0, 1, 1, [])
    with pytest.raises(KernelError, match="number of registers"):
        ext.BlockProgram([], [], [False] * 65, 0, 0, 0, [])
    nothing = ext.BlockProgram([], [], [], 0, 1, 0, [])
    repeated = torch.zeros(1).expand(1 << 30, 1 << 11, 1)
    with pytest.raises(KernelError, match="too many places"):
        nothing.run(ROWS[0].index, [repeated], [], 1)


@in_turn("row", ROWS, ids=lambda row: row.name)
@in_turn("shape", SHAPES[2:])
def test_inputs_of_row_values(row: native.NativeRow, shape: tuple[int, ...]) -> None:
    """What is known of a row before any loop: computed once a row, a choice and a number with it."""
    expression = Expression()
    x, scale = expression.load(), expression.load(of_row=True)
    root = expression.apply("where", expression.apply("gt", scale, 0.5), expression.apply("sqrt", scale), 2.0)
    expression.store(expression.apply("mul", expression.apply("exp", x), root))
    expression.store(root)
    inputs = [*operands(shape), torch.rand(*shape[:-1], 1)]
    assert_block(row, expression, inputs)
    if shape[-1] > 1:
        with pytest.raises(KernelError, match="one number a row"):
            program(expression).run(row.index, [inputs[0], inputs[0]], [inputs[0].clone(), inputs[1].clone()], 1)


@in_turn("row", ROWS, ids=lambda row: row.name)
@in_turn("count", [1, 2, 3])
def test_one_number_for_all_is_gathered_for_whole_tiles(row: native.NativeRow, count: int) -> None:
    """A thread may begin at the last piece of a row, which is shorter than those it reads afterwards."""
    expression = Expression()
    x, gain = expression.load(), expression.load()
    expression.store(expression.apply("mul", x, gain))
    x, gain = torch.randn(21, 5000), torch.full((), 3.0).expand(21, 5000)
    with threads(count):
        (found,) = run(row, expression, [x, gain], poisoned(expression, [x, gain]))
    assert torch.equal(found, x * gain)
