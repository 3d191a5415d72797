"""What compile is given by mistake is refused with what to do, and what it does instead of what was asked is said."""

import re

import pytest
import torch
from torch import nn

import twofour
from tests.compiler.small import mlp, quick
from tests.turns import in_turn
from twofour.errors import CompileError

pytestmark = pytest.mark.usefixtures("no_measuring")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_dtypes_of_torch_are_taken(dtype: torch.dtype) -> None:
    assert quick(twofour.prune(mlp(), "2:4"), dtype=dtype).plan.dtype == str(dtype).removeprefix("torch.")


@in_turn(
    ("given", "nearest"),
    [
        ("bf16", "bfloat16"),
        ("float16", "bfloat16"),
        (torch.float16, "bfloat16"),
        ("half", "bfloat16"),
        ("fp8", "int8"),
        (torch.float8_e4m3fn, "int8"),
        ("w4a16", "int4"),
        ("fp32", "float32"),
        (torch.float64, "float32"),
        (None, "float32"),
        (["int8"], "int8"),
    ],
)
def test_the_nearest_dtype_is_offered(given: object, nearest: str) -> None:
    with pytest.raises(CompileError, match=rf"the dtype is not known[\s\S]*pass dtype='{nearest}'"):
        quick(mlp(), dtype=given)


@pytest.mark.parametrize(("given", "nearest"), [("64", 64), (48, 32), (1000, 128), ("many", 64), (float("inf"), 64)])
def test_the_nearest_group_is_offered(given: object, nearest: int) -> None:
    with pytest.raises(CompileError, match=rf"the group is not known[\s\S]*pass group={nearest}"):
        quick(mlp(), dtype="int4", group=given)


@pytest.mark.parametrize("tokens", [5, "8", (), (0,), (True,), None, 1.5])
def test_impossible_token_counts(tokens: object) -> None:
    with pytest.raises(CompileError, match=r"token counts are impossible[\s\S]*tokens=\(1, 8"):
        twofour.compile(mlp(), tokens=tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "pass the model itself"),
        (lambda x: x, r"an nn\.Module"),
        (mlp().state_dict(), "load_state_dict"),
    ],
)
def test_what_is_no_model(given: object, said: str) -> None:
    with pytest.raises(CompileError, match=rf"there is no model to compile[\s\S]*try[\s\S]*{said}"):
        twofour.compile(given, torch.randn(2, 64))  # type: ignore[arg-type]


def test_data_that_is_no_iterable() -> None:
    with pytest.raises(CompileError, match=r"cannot be read batch by batch[\s\S]*a int[\s\S]*data=\[x\]"):
        quick(mlp(), dtype="int8", data=5)


def test_no_static_range_from_zeros(caplog: pytest.LogCaptureFixture) -> None:
    model, x = twofour.prune(mlp(), "2:4"), torch.randn(5, 64)
    fast = quick(model, x, dtype="int8", data=[torch.zeros(4, 64)], memory="small")
    assert "zero throughout at `0`: no static range; each token gets its own there" in caplog.text
    assert fast[0].problem.quantization.dynamic and not fast[2].problem.quantization.dynamic
    torch.testing.assert_close(fast[0](x), model[0](x).detach(), atol=0.05, rtol=0.05)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (nn.Linear(64, 64).double(), r"convert the model first: model.float\(\)"),
        (nn.Linear(64, 64).half(), r"convert the model first: model.float\(\)"),
        (nn.Linear(64, 64).bfloat16(), r'model.float\(\), or pass dtype="bfloat16"'),
        (nn.Conv2d(16, 16, 1).double(), r"convert the model first: model.float\(\)"),
    ],
)
def test_the_plan_says_what_to_do_with_other_dtypes(model: nn.Module, said: str) -> None:
    reason = quick(nn.Sequential(model)).plan.layers[0].reason
    assert re.search(said, reason), reason


@pytest.mark.parametrize("example", [None, torch.ones(2, 64)])
def test_autocast_is_named(example: object) -> None:
    model = twofour.prune(mlp(), "2:4")
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(CompileError, match=r'inside torch\.autocast[\s\S]*dtype="bfloat16"'):
            quick(model, example)
        with torch.autocast("cpu", enabled=False):
            quick(model, example)


@pytest.mark.parametrize("given", ["no", 0, 1.0])
def test_symmetric_is_a_truth_value(given: object) -> None:
    with pytest.raises(CompileError, match="`symmetric` is neither True nor False"):
        quick(mlp(), dtype="int4", symmetric=given)
