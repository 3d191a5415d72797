"""Programs replayed by native code: the same bits as the Python program, whatever stood in their memory before."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import twofour
from tests.turns import in_turn
from twofour import native
from twofour.graph import Calls, Executor
from twofour.graph.executor.kept import KEPT, MOST_COUNTED, Recordings
from twofour.graph.executor.memory import ALIGNMENT, Lifetime, offsets
from twofour.kernels.attention import attention
from twofour.kernels.fused_block import Expression, fused_block
from twofour.kernels.fused_block import program as block_program
from twofour.kernels.norm import norm, norm_in_place
from twofour.kernels.problem import Problem
from twofour.kernels.table import available
from twofour.packing import pack

WIDTH = 16


@pytest.fixture(autouse=True)
def poisoned_empty() -> None:
    """Leave torch.empty as it is: these tests poison the memory of a replay themselves."""


class Straight:
    """A stand-in for a Python program: a function, and what it refers to."""

    def __init__(self, function: Callable[..., tuple[Any, ...]], **names: Any) -> None:
        self.function, self.names, self.labels = function, names, ["one"] * 3

    def __call__(self, *leaves: Any) -> tuple[Any, ...]:
        return self.function(*leaves)


def poisoned(executor: Executor) -> Executor:
    """Fill the memory between runs with NaN."""
    for arena in executor._arenas:
        arena.buffer.fill_(255)
    return executor


def same(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return a == b
    return a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)


def agree(executor: Executor, *leaves: Any) -> Calls:
    """Run both programs on inputs; return what the native one calls."""
    with torch.inference_mode():
        calls = executor.prepare(leaves)
        assert not calls.reason, calls.reason
        others = [torch.randn_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for given_leaves in (others, leaves):
            got, want = poisoned(executor)(*given_leaves), executor.python(*given_leaves)
            assert all(same(a, b) for a, b in zip(got, want, strict=True))
            arenas = {arena.buffer.untyped_storage().data_ptr() for arena in executor._arenas}
            assert not any(isinstance(y, Tensor) and y.untyped_storage().data_ptr() in arenas for y in got)
    return calls


SCALE, SHIFT = torch.randn(WIDTH), torch.randn(WIDTH)
ROW = next(row for row in available("nm_matmul") if row.dtype == "float32" and row.pattern == "2:4")
PRODUCT = ROW.prepare(pack(twofour.prune(torch.nn.Linear(WIDTH, WIDTH), "2:4").weight.detach(), "2:4", "float32"))


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


def product(x: Tensor) -> Tensor:
    return ROW.run(x.reshape(-1, WIDTH), PRODUCT, SHIFT, Problem(WIDTH)).view(x.shape)


def heads(x: Tensor) -> Tensor:
    split = x.reshape(1, -1, 2, WIDTH // 2).transpose(1, 2)
    return attention(split, split, split).transpose(1, 2).reshape(x.shape)


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


def simple(x: Tensor) -> tuple[Tensor, ...]:
    return norm(x, SCALE, None, 1e-5), x, x[1:], None  # type: ignore[return-value]


def test_inputs_and_their_views_are_outputs() -> None:
    executor, x = Executor(Straight(simple, a=SCALE)), torch.randn(4, WIDTH)  # type: ignore[arg-type]
    agree(executor, x)
    again = torch.randn(4, WIDTH)
    _, same_one, view, nothing = executor(again)
    assert same_one is again and view.data_ptr() == again[1:].data_ptr() and nothing is None


def test_sizes_are_recorded_when_they_come_again() -> None:
    executor, calls = Executor(Straight(lambda x: ran.append(1) or simple(x), a=SCALE)), []  # type: ignore[arg-type]
    ran: list[int] = calls
    for rows, times in ((3, 1), (5, 2), (3, 3), (5, 4), (3, 4), (5, 4)):
        executor(torch.randn(rows, WIDTH))
        assert len(ran) == times


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: (x * x.sum().item(),), "`item` asks for values of a tensor"),
        (lambda x: (x if x.sum() > 0 else -x,), "`__bool__` asks for values of a tensor"),
        (lambda x: (x.add_(1),), "`add_` writes into an input or a constant"),
        (lambda x: (x + SHIFT,), "a tensor comes from outside of the graph"),
        (lambda x: (x[:0] + 1,), "a tensor is empty, not on the CPU, or negated when it is read"),
    ],
)
def test_what_cannot_be_recorded_runs_in_python_and_says_why(function: Any, reason: str) -> None:
    executor, x = Executor(Straight(function)), torch.randn(3, WIDTH)  # type: ignore[arg-type]
    assert executor.prepare([x]).reason == reason
    assert same(executor(x.clone())[0], function(x.clone())[0])


@pytest.mark.parametrize("later", [lambda y: y, lambda y: y + 1, lambda y: norm(y, None, None, 1e-5)])
def test_memory_written_by_what_nobody_saw_is_not_replayed(later: Any) -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.empty(x.shape, dtype=x.dtype, device="cpu")
        with torch._C.DisableTorchFunction():
            y.copy_(x)
        return (later(y),)

    reason = Executor(Straight(run)).prepare([torch.randn(3, WIDTH)]).reason  # type: ignore[arg-type]
    assert reason == "memory is read that was written by a call that was not seen"


def test_a_size_that_depends_on_values_falls_back(caplog: pytest.LogCaptureFixture) -> None:
    executor = Executor(Straight(lambda x: (torch.nonzero(x > 0),)))  # type: ignore[arg-type]
    x = torch.ones(3, WIDTH)
    assert not executor.prepare([x]).reason
    x[0] = -1
    with caplog.at_level("INFO", "twofour.graph"):
        assert executor(x)[0].shape == (2 * WIDTH, 2)
    assert "another size" in caplog.text


def test_quantized_tensors_between_functions_of_torch_are_replayed() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        whole = torch.quantize_per_tensor(norm(x, None, None, 1e-5), 0.05, 128, torch.quint8)
        return (norm(whole.dequantize(), SCALE, SHIFT, 1e-5),)

    executor, x = Executor(Straight(run, a=SCALE, b=SHIFT)), torch.randn(3, WIDTH)  # type: ignore[arg-type]
    with warnings.catch_warnings():  # torch says once that they are deprecated
        warnings.simplefilter("ignore")
        calls = executor.prepare([x])
    assert not calls.reason and calls.native == 2 and calls.torch == 2
    agree(executor, torch.randn(3, WIDTH))


@torch.inference_mode()
def test_sizes_that_never_come_again_push_out_no_recording() -> None:
    executor, x = Executor(Straight(simple, a=SCALE)), torch.randn(2, WIDTH)  # type: ignore[arg-type]
    agree(executor, x)
    for rows in range(3, 36 + KEPT):
        executor(torch.randn(rows, WIDTH))
    assert executor.met([x]) is not None and len(executor._recordings) == 1
    for rows in range(3, 36 + KEPT):
        executor.prepare([torch.randn(rows, WIDTH)])
    assert executor.met([x]) is None and len(executor._recordings) == KEPT
    assert all(len(arena._values) <= KEPT for arena in executor._arenas)


@torch.inference_mode()
def test_recordings_of_given_up_tensors_go() -> None:
    executor = Executor(Straight(simple, a=SCALE))  # type: ignore[arg-type]
    few, many = torch.randn(2, WIDTH), torch.randn(600, WIDTH)
    for x in (few, many):
        executor.prepare([x])
    replays = executor._recordings.replays()
    executor.forget({id(few)})
    assert len(executor._recordings) == 2
    replays[1].values.append(gone := torch.ones(3))
    executor.forget({id(gone)})
    assert executor.met([few]) is not None and executor.met([many]) is None
    assert executor._arenas == []
    agree(executor, many)


def test_more_kinds_of_calls_than_are_kept_are_not_recorded_again_and_again() -> None:
    recordings, recorded, rounds = Recordings(), 0, 40
    for _ in range(rounds):
        for key in range(KEPT + 36):  # in turns: what is dropped as the oldest would come next
            if recordings.used(key) is None and recordings.is_due(key):
                recorded += 1
                recordings.put(key, Calls())
    assert len(recordings) == KEPT and recorded < KEPT + 36 * (2 + 2 * rounds / MOST_COUNTED)
    for _ in range(MOST_COUNTED + 2):  # a new kind that comes often gets a place, and keeps it
        if recordings.used("new") is None and recordings.is_due("new"):
            recordings.put("new", Calls())
    assert recordings.get("new") is not None


@torch.inference_mode()
def test_two_threads_and_one_have_recordings_of_their_own() -> None:
    def run(x: Tensor) -> tuple[Tensor, ...]:
        return (product(norm(product(x), SCALE, SHIFT, 1e-5)), heads(x))

    executor, x = Executor(Straight(run, a=SCALE, b=SHIFT, c=PRODUCT)), torch.randn(512, WIDTH)  # type: ignore[arg-type]
    before = torch.get_num_threads()
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            assert (executor.met([x]) is None) == (len(executor._recordings) < count)
            agree(executor, x)
    finally:
        torch.set_num_threads(before)


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


def test_weights_that_recordings_alone_keep_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[str, Any] = {}

    def run(x: Tensor) -> tuple[Tensor, ...]:
        if held.get("size") != len(x):  # as oneDNN's weight for another size
            held.update(size=len(x), weight=torch.ones(1000))
        return (x + held["weight"],)

    monkeypatch.setattr("twofour.graph.executor.MOST_WEIGHTS", 9000)
    executor = Executor(Straight(run, a=held))  # type: ignore[arg-type]
    for size in range(1, 9):
        for _ in range(3):
            assert torch.equal(executor(torch.ones(size, 1000))[0], torch.full((size, 1000), 2.0))
    assert 1 <= len(executor._recordings.replays()) <= 4


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
