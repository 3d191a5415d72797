"""Programs replayed by native code: the same bits as the Python program, whatever stood in their memory before."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import twofour
from tests.graph.executor.straight import PRODUCT, SCALE, SHIFT, WIDTH, Straight, agree, heads, product, same, simple
from tests.turns import in_turn
from twofour import native
from twofour.graph import Executor
from twofour.graph.executor.memory import ALIGNMENT, Lifetime, offsets
from twofour.kernels.fused_block import Expression, fused_block
from twofour.kernels.fused_block import program as block_program
from twofour.kernels.norm import norm, norm_in_place


def softened() -> Any:
    """A block of two inputs: exp(a) / sum(exp(a)) + b."""
    block = Expression()
    a, b = block.load(), block.load()
    raised = block.apply("exp", a)
    block.store(block.apply("add", block.apply("div", raised, block.apply("sum", raised)), b))
    return block_program(block)


BLOCK = softened()


def block(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    fused_block(BLOCK, [x, y], [out])
    return out


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "norm": lambda x, y: norm(x, SCALE, SHIFT, 1e-5),
    "product": lambda x, y: product(x),
    "attention": lambda x, y: heads(x),
    "in place": lambda x, y: norm_in_place(product(x), SCALE, None, 1e-5),
    "block": block,
    "add": lambda x, y: x + y,
    "add in place": lambda x, y: product(x).add_(y),
    "cat": lambda x, y: torch.cat([x[: len(x) // 2], y[len(x) // 2 :]]),
    "turned": lambda x, y: norm(x.t().contiguous().t(), SCALE, None, 1e-5),
    "split": lambda x, y: product(torch.cat(x.split(8, 1)[::-1], 1)),
    "sort": lambda x, y: torch.sort(y, 1)[0],
}


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)), min_size=1),
    rows=st.integers(2, 9),
    kept=st.lists(st.integers(0, 9), min_size=1, max_size=3),
)
def test_random_programs(steps: list[tuple[str, int, int]], rows: int, kept: list[int]) -> None:
    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        values = list(leaves)
        for name, a, b in steps:
            values.append(STEPS[name](values[-1 - a % len(values)], values[-1 - b % len(values)]))
        return tuple(values[-1 - index % len(values)] for index in kept)

    agree(Executor(Straight(run, a=SCALE, b=SHIFT, c=PRODUCT)), torch.randn(rows, WIDTH), torch.randn(rows, WIDTH))  # type: ignore[arg-type]


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 30), st.integers(0, 9)), max_size=40))
def test_lifetimes_that_overlap_never_share_memory(drawn: list[tuple[int, int, int]]) -> None:
    lifetimes = [Lifetime(nbytes, first, first + more) for nbytes, first, more in drawn]
    begins, whole = offsets(lifetimes)
    for i, one in enumerate(lifetimes):
        assert begins[i] % ALIGNMENT == 0 and begins[i] + one.nbytes <= whole
        for j, other in enumerate(lifetimes[:i]):
            apart = one.last < other.first or other.last < one.first
            assert apart or begins[i] + one.nbytes <= begins[j] or begins[j] + other.nbytes <= begins[i]
    assert whole <= sum(-(-one.nbytes // ALIGNMENT) * ALIGNMENT for one in lifetimes)


def test_a_native_program_allocates_only_its_outputs() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        for _ in range(6):
            x = norm(product(x), SCALE, SHIFT, 1e-5)
        return (x.view(-1, 4, WIDTH)[:, 1],)

    x = torch.randn(32, WIDTH)
    calls = agree(Executor(Straight(run, a=SCALE, b=SHIFT, c=PRODUCT)), x)  # type: ignore[arg-type]
    assert (calls.native, calls.torch, calls.python, calls.allocated_bytes) == (12, 0, 1, 0)
    assert calls.intermediate_bytes == 11 * x.nbytes and calls.arena_bytes == 2 * x.nbytes


def test_inputs_and_their_views_are_outputs() -> None:
    executor, x = Executor(Straight(simple, a=SCALE)), torch.randn(4, WIDTH)  # type: ignore[arg-type]
    agree(executor, x)
    again = torch.randn(4, WIDTH)
    _, same_one, view, nothing = executor(again)
    assert same_one is again and view.data_ptr() == again[1:].data_ptr() and nothing is None


BYTES = (0, 4, [4], [1])
"""float32 (4,)."""


@in_turn(
    ("buffers", "places", "calls", "wrong"),
    [
        ([(0, BYTES)], [(0, 4, BYTES)], [], "a place outside its buffer"),
        ([(0, BYTES)], [(0, -4, BYTES)], [], "a place outside its buffer"),
        ([(0, BYTES)], [(0, 0, (0, 4, [2, 2], [3, 1]))], [], "a place outside its buffer"),
        ([], [(0, 0, BYTES)], [], "a place outside its buffer"),
        ([(1, BYTES)], [], [], "no such value"),
        ([(0, (0, 4, [4], [1, 1]))], [], [], "no such tensor"),
        ([(0, (0, 4, [4], [-1]))], [(0, 0, BYTES)], [], "no such tensor"),
        ([], [], [(print, [1], None, [], [])], "no such value"),
        ([], [], [(print, [0], None, [7], [])], "no such value"),
        ([], [], [(print, [0], None, [], [-1])], "no such value"),
        ([], [], [(print, [0] * 25, None, [], [])], "too many arguments"),
        ([], [], [(print, [0], ("a", "b"), [], [])], "no such names"),
    ],
)
def test_a_program_that_reaches_outside_is_none(buffers: Any, places: Any, calls: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        native.extension().Executor(buffers, places, calls, 1, 1)


def test_an_error_is_that_of_the_python_program() -> None:
    table = torch.randn(5, WIDTH)
    executor = Executor(Straight(lambda i: (table[i] + 1,), table=table))  # type: ignore[arg-type]
    executor.prepare([torch.tensor([1, 2])])
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        executor(torch.tensor([1, 9]))
    assert executor(torch.tensor([1, 4]))[0].shape == (2, WIDTH)


def test_what_no_input_has_a_part_in_is_kept() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        places = torch.arange(len(x), device="cpu").cumsum(0).unsqueeze(1)
        return norm(x, SCALE, None, 1e-5) + places.cos(), x

    executor = Executor(Straight(run, a=SCALE))  # type: ignore[arg-type]
    calls = agree(executor, torch.randn(4, WIDTH))
    assert (calls.native, calls.torch, calls.folded) == (1, 1, 3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (norm_in_place(SHIFT * torch.ones(3, WIDTH), SCALE, None, 1e-5) + x,),
        lambda x: ((SHIFT * 2).add_(1) + x,),
        lambda x: (torch.arange(4), x + 1),
    ],
)
def test_constants_that_are_written_or_answered_are_made_in_each_run(function: Any) -> None:
    executor, x = Executor(Straight(function, a=SCALE, b=SHIFT)), torch.randn(3, WIDTH)  # type: ignore[arg-type]
    calls = agree(executor, x)
    assert calls.folded == 0
    executor(x)[0].zero_()
    assert all(same(a, b) for a, b in zip(executor(x), function(x), strict=True))


def test_threads_at_once_have_memory_of_their_own() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        y = norm(product(x), SCALE, SHIFT, 1e-5)
        return (product(norm(product(y), None, None, 1e-5)) + y,)

    executor = Executor(Straight(run, a=SCALE, b=SHIFT, c=PRODUCT))  # type: ignore[arg-type]
    inputs = [torch.randn(64, WIDTH) for _ in range(4)]
    agree(executor, inputs[0])
    wrong: list[int] = []

    def call(index: int) -> None:
        want = run(inputs[index])[0]
        wrong.extend(index for _ in range(200) if not torch.equal(executor(inputs[index])[0], want))

    callers = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    [caller.start() for caller in callers]
    [caller.join() for caller in callers]
    assert not wrong and 1 <= len(executor._arenas) <= 4


def test_a_call_inside_a_call() -> None:
    inner = Executor(Straight(lambda x: (norm(product(x), SCALE, None, 1e-5) + 1,), a=SCALE, b=SHIFT, c=PRODUCT))  # type: ignore[arg-type]
    x = torch.randn(4, WIDTH)
    agree(inner, x)
    got = inner(inner(x)[0])[0]
    assert torch.equal(got, inner.python(inner.python(x)[0])[0])


def test_copies_and_pickles_record_anew() -> None:
    model = twofour.prune(
        torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)), "2:4"
    )
    fast = twofour.compile(model.eval(), torch.randn(4, 64), tokens=(4,), graph=True)
    assert fast.plan.calls is not None and fast.plan.calls.native > 0
    assert str(fast.plan.calls) in str(fast.plan) and fast.plan.to_dict()["account"]["calls"]["native"] > 0
    x = torch.randn(4, 64)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        program = getattr(other.forward, "program", None)
        for _ in range(3):
            torch.testing.assert_close(other(x), fast(x))
        assert program is None or not program.prepare([x]).reason


SETTING = {"scale": 1.0}


@torch.library.custom_op("twofour_tests::setting", mutates_args=())
def setting() -> Tensor:
    return torch.full((1,), SETTING["scale"], dtype=torch.float32, device="cpu")


@setting.register_fake
def _() -> Tensor:
    return torch.empty(1, dtype=torch.float32, device="cpu")


class Reads(torch.nn.Module):
    """Layers around an operator of a foreign library, which answers as it was set."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)) * torch.ops.twofour_tests.setting())


def test_an_operator_of_others_is_called_each_time() -> None:
    model, x = Reads().eval(), torch.randn(4, 64)
    fast = twofour.compile(model, x, tokens=(4,), graph=True)
    try:
        for SETTING["scale"] in (1.0, 1.0, 5.0, 5.0):
            torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    finally:
        SETTING["scale"] = 1.0


def test_samples_are_drawn_each_time() -> None:
    rates = torch.ones(64)
    executor = Executor(Straight(lambda x: (x + torch.ops.aten._standard_gamma.default(rates),), a=rates))  # type: ignore[arg-type]
    found = [executor(torch.zeros(64))[0] for _ in range(4)]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found, 2))


def test_each_call_gets_its_own_view_of_a_constant() -> None:
    executor = Executor(Straight(lambda x: (x + 1, SCALE.view(4, 4)), a=SCALE))  # type: ignore[arg-type]
    x = torch.randn(4, WIDTH)
    for _ in range(4):
        view = executor(x)[1]
        assert view.shape == (4, 4)
        view.unsqueeze_(0)


def test_a_program_that_its_own_callable_reaches_is_collected() -> None:
    class Owner:
        def step(self, x: Tensor) -> Tensor:
            return x

    owner = Owner()
    owner.program = native.extension().Executor([], [], [(owner.step, [0], None, [1], [])], 2, 1)  # type: ignore[attr-defined]
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
