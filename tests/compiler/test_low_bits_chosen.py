"""Which kernels of low bits are measured and chosen, and what the plan, or an error, says of the others."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.of_bits import of_bits, run
from twofour import native, quantization
from twofour.compiler import low_bits
from twofour.compiler.choose import candidates
from twofour.compiler.computing import Computing
from twofour.compiler.terms import Terms
from twofour.errors import KernelError, LayerError
from twofour.kernels.bits_matmul import BitWeight, twos

pytestmark = pytest.mark.usefixtures("codes_win")


def test_a_dtype_that_changes_no_quantised_layer_is_told_of(caplog, no_measuring) -> None:
    """It was passed over in silence."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.randn(4, 64)
    both, one = "the 2 layers that were", "the one layer that was"
    for skip, which, rest in (
        ((), both, "no other layer takes it"),
        (("2",), one, "it is that of the one other layer"),
    ):
        low = quantization.quantize(copy.deepcopy(model), "w8", "a8", data=[x], skip=skip)
        plan: Any = twofour.compile(low, x, "int8", graph=False, progress=False).plan
        (said,) = (note for note in plan.notes if note.startswith('dtype="int8" does not change'))
        assert f"{which} quantised, to widths of their own (w8a8); {rest}" in said and said in caplog.text
    plan = twofour.compile(low, x, graph=False, progress=False).plan  # pyright: ignore[reportAttributeAccessIssue]
    assert not any("does not change" in note for note in plan.notes)
    assert "of the answer's norm" in str(plan)


def test_a_compiled_model_is_refused_as_that_where_it_is_to_be_pruned() -> None:
    fast = twofour.compile(of_bits("w2", "a2"), tokens=(3,), graph=False)
    assert "widths=w2a2" in str(fast)
    with pytest.raises(LayerError, match="a compiled model cannot be pruned"):
        twofour.prune(fast, "2:4")


def test_the_plan_says_what_kernels_of_codes_do_not_do(monkeypatch) -> None:
    """Zeros of blocks, and of groups, are multiplied, and on a GPU there is no such kernel."""
    recipe = {"0": "block:4x4@0.5", "2": "2:4"}
    model = twofour.prune(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)).eval(), recipe)
    x = torch.randn(3, 64)
    plan: Any = twofour.compile(
        twofour.quantize(model, "w2", "a2", ends=None, group=32), x, tokens=(3,), graph=False
    ).plan
    for layer, pattern in zip(plan.layers, ("block:4x4@0.5", "2:4"), strict=True):
        assert layer.reason.endswith(f"; no kernel of codes skips its zeros of {pattern}"), plan
    on_gpu = low_bits.run_low_bits(model, plan, {}, Terms(Computing(device="cuda"), "fast", (3,)))
    said = "dense: w2a2: no kernel of codes on a GPU; it computes in floats"
    assert all(layer.reason.startswith(said) for layer in on_gpu.layers) and not any(run(model))


def test_a_kernel_that_refuses_while_it_is_measured_is_an_error_not_a_layer_in_floats(monkeypatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise KernelError("on purpose")

    monkeypatch.setattr(Terms, "choose", refuse)
    with pytest.raises(KernelError, match="on purpose"):
        twofour.compile(of_bits("w2", "a2"), torch.randn(3, 71), tokens=(3,), graph=False)
    weight = BitWeight(torch.zeros(4, 70_000, dtype=torch.uint8), twos(8), torch.ones(4))
    with pytest.raises(KernelError, match="by 8 bits here: it has sums of 70000 inputs, which may exceed int32"):
        candidates(weight)


@pytest.mark.parametrize("isa", ["avx2", "avx_vnni", "avx512_vnni"])
def test_without_all_of_avx512_the_rows_of_the_highest_level_of_each_layout_are_measured(isa: str, monkeypatch) -> None:
    if isa not in native.instruction_sets() or native.unavailable(isa):
        pytest.skip(f"needs {isa}")
    monkeypatch.setenv("TWOFOUR_ISA", isa)
    weight = BitWeight(torch.zeros(4, 64, dtype=torch.uint8), twos(4), torch.ones(4))
    found = {kernel.name for kernel in candidates(weight)}
    assert found == {
        f"bits_matmul_{name}" for name in (f"bytes__{isa}", f"packed__{isa}", "planes__avx2", "fours__avx2")
    }


@pytest.mark.parametrize(("at_one", "kept"), [(4.0, True), (1.1, False)])
def test_without_an_example_few_tokens_count_as_much_as_many(at_one: float, kept: bool, monkeypatch) -> None:
    """Kernels that are 4 times as fast for one token stay where floats are twice as fast for many."""
    counts: list[int] = []

    def raced(calls: Any, **_: Any) -> tuple[dict[str, float], float]:
        tokens = len(calls["floats"].args[0])
        counts.append(tokens)
        return {"kernels": 1.0, "floats": at_one if tokens == 1 else 0.5}, 0.0

    monkeypatch.setattr(low_bits, "race", raced)
    fast = twofour.compile(of_bits("w2", "a2"), tokens=(1, 3, 6))
    assert run(fast) == [kept, kept] and counts == [1, 6, 1, 6]
