"""A compiled layer by itself: every shape and order of its input, with and without a second operand."""

import copy
import pickle

import pytest
import torch

from tests.turns import in_turn
from twofour import patterns
from twofour.compiler.layer import CompiledLinear, PreparedWeights
from twofour.errors import KernelError
from twofour.kernels import available
from twofour.kernels.dispatch import DispatchTable
from twofour.kernels.epilogue import PLAIN_EPILOGUE, Epilogue
from twofour.kernels.problem import Problem
from twofour.packing import pack

ROWS, COLUMNS = 37, 64
SPARSE = next(kernel for kernel in available("nm_matmul") if kernel.layout == "rows")
DENSE = next(kernel for kernel in available("dense_matmul") if kernel.layout == "dense" and kernel.dtype == "float32")


def _weight() -> torch.Tensor:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    return weight * patterns.parse("2:4").project(weight, absolute=True)


def _layer(epilogue: Epilogue = PLAIN_EPILOGUE, *, bias: bool = True, sparse: bool = True) -> CompiledLinear:
    kernel = SPARSE if sparse else DENSE
    prepared = PreparedWeights([kernel.prepare(pack(_weight(), "2:4") if sparse else _weight())])
    added = torch.linspace(-1, 1, ROWS) if bias else None
    return CompiledLinear("small", COLUMNS, Problem(ROWS, epilogue), DispatchTable((), (kernel.name,)), prepared, added)


INPUTS = {
    "one token": lambda: torch.randn(1, COLUMNS),
    "one axis": lambda: torch.randn(COLUMNS),
    "three axes": lambda: torch.randn(2, 3, COLUMNS),
    "four axes": lambda: torch.randn(2, 1, 3, COLUMNS),
    "no tokens": lambda: torch.randn(2, 0, COLUMNS),
    "rows apart": lambda: torch.randn(5, COLUMNS + 3)[:, 1:-2],
    "transposed": lambda: torch.randn(COLUMNS, 5).T,
    "three axes, transposed": lambda: torch.randn(3, 2, COLUMNS).transpose(0, 1),
    "three axes, inputs apart": lambda: torch.randn(2, COLUMNS, 3).transpose(1, 2),
}


@in_turn("combine", ["none", "add", "multiply"])
@in_turn("given", INPUTS)
@in_turn("sparse", [True, False])
def test_every_shape_and_order_of_inputs(given: str, combine: str, sparse: bool):
    x = INPUTS[given]()
    layer = _layer(Epilogue("relu", combine), sparse=sparse)
    shape = (*x.shape[:-1], ROWS)
    others = [None] if combine == "none" else [torch.randn(shape), torch.randn(*shape, 2)[..., 0]]
    for other in others:
        y = layer(x, other)
        want = torch.relu(x.double() @ _weight().double().T + torch.linspace(-1, 1, ROWS).double())
        if other is not None:
            want = want + other.double() if combine == "add" else want * other.double()
        assert y.shape == shape and y.is_contiguous()
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


def test_the_bias_is_a_parameter_that_may_be_missing_replaced_and_copied():
    x = torch.randn(2, 2, COLUMNS)
    without, layer = _layer(bias=False), _layer()
    assert without.bias is None and "bias" not in without.state_dict()
    assert list(layer.state_dict()) == ["bias"]
    added = torch.linspace(-1, 1, ROWS)
    torch.testing.assert_close(layer(x), without(x) + added)
    layer.load_state_dict({"bias": 2 * added})
    for same in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(same(x), without(x) + 2 * added)
    layer.register_parameter("bias", None)
    torch.testing.assert_close(layer(x), without(x))


@pytest.mark.parametrize("shape", [(), (COLUMNS + 4,), (2, 3, COLUMNS - 4)])
def test_an_input_of_another_width_is_refused(shape: tuple[int, ...]):
    with pytest.raises(KernelError, match=f"whose last size is {COLUMNS}"):
        _layer()(torch.randn(shape))


def test_an_other_of_another_shape_is_refused():
    for x, other in ((torch.randn(2, 3, COLUMNS), torch.randn(6, ROWS + 1)), (torch.randn(6, COLUMNS), None)):
        with pytest.raises(KernelError, match="second operand"):
            _layer(Epilogue("none", "add"))(x, other)
