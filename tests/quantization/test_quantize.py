"""Models of low bits: usable at once, exact in whole numbers, trained by any loop, zeros kept; bad input is refused."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import twofour
from tests.quantization.small import convnet, error_of, mlp
from tests.turns import in_turn
from twofour import masks, quantization
from twofour.engines import onnxruntime

WEIGHTS = ("w1", "w1.58", "w2", "w3", "w4", "w8", "b2", "b3", "ternary5")

INPUTS = ("a1", "a2", "a3", "a8", "s2", "s4", "b1", "b2")


PAIRS = sorted({(w, a) for w in WEIGHTS for a in INPUTS if w in ("w1", "w2") or a in ("a2", "b1")})


@in_turn(("weights", "activations"), PAIRS)
def test_the_answer_is_that_of_whole_numbers(weights: str, activations: str) -> None:
    x = torch.randn(3, 1, 8, 8)
    for data in (None, [torch.randn(8, 1, 8, 8)]):
        model = twofour.quantize(convnet(), weights, activations, data=data)
        assert {held.static for held in quantization.of(model).values()} == {data is not None}
        with quantization.in_whole_numbers(model):
            whole = model(x)
        assert torch.equal(model(x), whole) and torch.isfinite(whole).all()
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), whole)
        assert torch.equal(copy.deepcopy(model)(x), whole)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_whole_numbers_lie_in_memory_as_floats_do(layout: torch.memory_format) -> None:
    """A mean over places adds them up in the order of memory, and rounds accordingly."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)).to(memory_format=layout)  # pyright: ignore
    x = torch.randn(2, 3, 9, 9).contiguous(memory_format=layout)
    twofour.quantize(model.eval(), "w2", "a2")
    floats = model(x)
    with quantization.in_whole_numbers(model):
        whole = model(x)
    assert whole.stride() == floats.stride() and torch.equal(whole.mean((2, 3)), floats.mean((2, 3)))


@given(st.sampled_from(WEIGHTS), st.sampled_from(INPUTS), st.integers(1, 130), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_a_linear_is_its_formula(weights: str, activations: str, columns: int, seed: int) -> None:
    """By hand in float64, of the encodings alone: the layer's sums are sum(v w), v = s (a u + b - z)."""
    torch.manual_seed(seed)
    layer, x = nn.Linear(columns, 5), torch.randn(4, columns)
    twofour.quantize(layer, weights, activations)
    held = quantization.held_by(layer)
    assert held is not None and held.widths.inputs is not None
    whole, scales = held.whole_weight(layer)
    assert torch.equal(whole, held.widths.weights.read(held.widths.weights.store(whole), columns))  # all are levels
    levels, steps = held.input(layer, x)
    inputs = held.widths.inputs
    least, most = inputs.bounds
    if inputs.levels == "unsigned":
        low, high = x.amin(1, keepdim=True).clamp(max=0), x.amax(1, keepdim=True).clamp(min=0)
        torch.testing.assert_close(steps, (high - low) / most)
        zero = (-low / steps).round()
        assert (levels + zero == (x * (1 / steps)).round().clamp(-zero, most - zero) + zero).all()
    else:
        torch.testing.assert_close(steps, x.abs().amax(1, keepdim=True) / most)
        assert (levels.abs() <= max(-least, most)).all()
        assert inputs.levels == "twos" or (levels % 2 != 0).all()
    want = (levels.double() @ whole.double().T) * steps.double() * scales.double() + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("data", [False, True])
def test_more_bits_are_nearer_and_usable_untrained(data: bool) -> None:
    model, x = mlp(), torch.randn(256, 32)
    errors = [
        error_of(twofour.quantize(mlp(), f"w{b}", f"a{b}", data=[x] if data else None), model, x) for b in range(2, 9)
    ]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.02 and errors[0] < 0.6
    assert error_of(twofour.quantize(mlp(), "w8"), model, x) < 0.01


def test_steps_are_those_of_the_least_squared_error() -> None:
    weight = torch.randn(3, 400, generator=torch.Generator().manual_seed(0))
    layer = nn.Linear(400, 3)
    layer.weight.data.copy_(weight)
    twofour.quantize(layer, "w3")
    steps = layer.weight_step.detach()  # type: ignore[union-attr]

    def error(factor: float) -> torch.Tensor:
        step = (steps * factor).unsqueeze(1)
        return ((weight / step).round().clamp(-4, 3) * step - weight).square().sum(1)

    assert all((error(1.0) <= error(factor)).all() for factor in (0.5, 0.8, 1.3, 2.0))
    twofour.quantization.remove(layer)
    layer.weight.data.copy_(weight)
    tensor = twofour.quantize(layer, "w3", scales="tensor")
    steps = tensor.weight_step.detach().clone()  # type: ignore[operator, union-attr]
    assert steps.shape == (1,)
    assert all((error(1.0).sum() <= error(factor).sum()).all() for factor in (0.5, 0.8, 1.3, 2.0))


@pytest.mark.parametrize(("weights", "symmetric"), [("w1", True), ("w1.58", True), ("w4", True), ("w4", False)])
def test_one_scale_of_a_weight_stays_one(tmp_path, weights: str, symmetric: bool) -> None:
    """In every encoding, through training, files and kernels; its gradient is that of the whole weight."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(96, 12), nn.ReLU(), nn.Conv2d(1, 4, 3)), torch.randn(5, 1, 6, 96)
    own: nn.Linear = model[0]  # type: ignore[assignment]
    own.weight.data.mul_(torch.linspace(0.1, 1, 12)[:, None])
    want = {"w1": own.weight.abs().mean(), "w1.58": own.weight.abs().mean()}.get(weights)
    twofour.quantize(model, weights, "a8", scales="tensor", symmetric=symmetric, ends=None)
    held = quantization.of(model)["0"]
    _, scales = held.whole_weight(own)
    assert scales.shape == (12,) and len(scales.unique()) == 1
    assert want is None or scales[0] == want
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model(x).square().mean().backward()
    if held.learned and symmetric:  # 1 / sqrt(n q), n weights a step: not those of a row
        step: torch.Tensor = own.weight_step  # type: ignore[assignment]
        values = own.weight.detach() / step.detach()
        (found,) = torch.autograd.grad(own(torch.eye(96)).sum(), step)
        inner = values.clamp(-8, 7).round() - torch.where((values >= -8) & (values <= 7), values, 0)
        torch.testing.assert_close(found, inner.sum().view(1) / (12 * 96 * 7) ** 0.5, rtol=0.02, atol=0.02)
    optimizer.step()
    assert len(held.whole_weight(own)[1].unique()) == 1
    twofour.save(model.eval(), tmp_path / "m")
    again = twofour.load(tmp_path / "m", copy.deepcopy(model), masked=True).eval()
    assert torch.equal(again(x), model(x)) and quantization.of(again) == quantization.of(model)
    fast = twofour.compile(model, x, tokens=(30,), graph=False)
    assert torch.equal(fast(x), model(x))
    twofour.save(fast, tmp_path / "n")
    assert torch.equal(twofour.load(tmp_path / "n", copy.deepcopy(model), graph=False)(x), model(x))


def test_the_gradient_of_a_learned_step_is_that_of_the_paper() -> None:
    """Esser et al. 2020, equation 3: -w/s + round(w/s) between the levels, else the level; times 1 / sqrt(n q)."""
    layer = nn.Linear(3, 1, bias=False)
    layer.weight.data.copy_(torch.tensor([[0.3, -5.0, 5.0]]))
    twofour.quantize(layer, "w3")
    layer.weight_step.data.fill_(0.5)  # type: ignore[union-attr]
    layer(torch.eye(3)).sum().backward()
    want = (-0.6 + 1) + -4 + 3
    torch.testing.assert_close(layer.weight_step.grad, torch.tensor([want / (3 * 3) ** 0.5]))  # type: ignore[union-attr]
    assert layer.weight.grad.tolist() == [[1, 0, 0]]  # type: ignore[union-attr]


def test_the_gradient_of_a_clipping_level_is_that_of_pact() -> None:
    """Choi et al. 2018, equation 3: what lies above the levels moves them, what lies between passes."""
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data.copy_(torch.tensor([[1.0, 1.0]]))
    twofour.quantize(layer, "w8", "a2", data=[torch.rand(64, 2)])
    layer.input_step.data.fill_(0.5)  # type: ignore[union-attr]
    x = torch.tensor([[0.5, 9.0]], requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and x.grad[0, 1] == 0 and abs(x.grad[0, 0].item() - 1) < 0.02
    torch.testing.assert_close(layer.input_step.grad * (2 * 3) ** 0.5, torch.tensor(3.0), atol=0.05, rtol=0)  # type: ignore[union-attr,operator]


@in_turn("inputs", INPUTS)
@in_turn("positive", [False, True])
def test_ranges_that_are_found_cut_no_gradient(inputs: str, positive: bool) -> None:
    """The greatest input may round above the levels by half a level or a bit of float32: it is not clipped."""
    torch.manual_seed(0)
    layer, conv = nn.Linear(24, 1, bias=False), nn.Conv2d(3, 1, 1, bias=False)
    twofour.quantize(layer, "w8", inputs)
    twofour.quantize(conv, "w8", inputs)
    x, images = torch.randn(400, 24), torch.randn(50, 3, 4, 4)
    for module, values in ((layer, x), (conv, images)):
        values = (values.abs() if positive else values).requires_grad_()
        (found,) = torch.autograd.grad(module(values).sum(), values)
        held = quantization.held_by(module)
        assert held is not None
        whole, scales = held.whole_weight(module)
        torch.testing.assert_close(found, (whole[0] * scales.detach()).expand_as(values), rtol=1e-5, atol=1e-7)


def test_signs_have_the_gradient_of_their_mean() -> None:
    """Rastegari et al. 2016, section 3.1: dC/dw = dC/dq (1/n sum + s 1(|w| <= 1))."""
    layer = nn.Linear(2, 1, bias=False)
    layer.weight.data.copy_(torch.tensor([[0.5, -2.0]]))
    twofour.quantize(layer, "w1")
    assert torch.equal(layer(torch.eye(2)).detach().flatten(), torch.tensor([1.25, -1.25]))
    layer(torch.tensor([[1.0, 0.0]])).sum().backward()
    torch.testing.assert_close(layer.weight.grad, torch.tensor([[0.5 + 1.25, -0.5]]))


@pytest.mark.parametrize(("weights", "activations"), [("w1", "a2"), ("w1.58", "a8"), ("w2", "a2"), ("w4", None)])
def test_training_lowers_the_loss_and_removing_leaves_floats(weights: str, activations: str | None) -> None:
    model, keys = convnet(), list(convnet().state_dict())
    x, y = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    twofour.quantize(model, weights, activations, data=[x])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    model.eval()
    with quantization.in_whole_numbers(model):
        whole = model(x)
    assert torch.equal(model(x), whole)
    again = twofour.quantize(convnet(1), weights, activations, data=[x])
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), whole)
    quantization.remove(model)
    assert list(model.state_dict()) == keys and type(model[0]) is nn.Conv2d


@pytest.mark.parametrize("weights", ["w1.58", "w2", "w4"])
def test_pruned_values_stay_exactly_zero(weights: str) -> None:
    model = twofour.prune(mlp(), "2:4", eligibility="any")
    twofour.quantize(model, weights, "a4")
    assert set(masks.of(model)) == {"0.weight", "2.weight", "4.weight"}
    x, y = torch.randn(16, 32), torch.randint(4, (16,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert twofour.check(model).ok
    for mask in masks.of(model).values():
        held = quantization.held_by(mask.module)
        assert held is not None
        whole, _ = held.whole_weight(mask.module)
        assert (whole[~mask.keep] == 0).all() and (whole != 0).any()


def test_the_ends_of_a_model_have_eight_bits_and_rules_stand_above() -> None:
    def names(*args: object, **options: object) -> list[str]:
        return [held.widths.name for held in quantization.of(twofour.quantize(mlp(), *args, **options)).values()]  # type: ignore[arg-type]

    assert names("w2", "a2") == ["w8a8", "w2a2", "w8a8"]
    assert names("w1", "a2", ends=4) == ["w4a4", "w1a2", "w4a4"]
    assert names("w2", "a2", ends=None) == ["w2a2"] * 3
    assert names({"0": "w3", "*": "w1.58"}, "a8") == ["w3a8", "w1.58a8", "w8a8"]
    assert names({"2": "float", "*": "w2"}, {"4": "a4", "*": "a1"}) == ["w2a1", "w2a4"]
    assert names("b3", "s4", skip=["0"]) == ["b3s4", "b3s4"]
    assert names("ternary", None) == ["w8", "w1.58", "w8"]


@pytest.mark.parametrize(("weights", "inputs"), [("w4", "a8"), ("w1", "a2")])
def test_onnx_runtime_is_given_the_roundings(weights: str, inputs: str) -> None:
    model, x = twofour.quantize(mlp(), weights, inputs), torch.randn(3, 32)
    answer = onnxruntime(SimpleNamespace(model=model, inputs=(x,)), "float32", 1)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.from_numpy(answer()), model(x).detach(), rtol=1e-4, atol=1e-4)


def test_a_layer_says_its_widths() -> None:
    model = twofour.quantize(mlp(), {"0": "w4"}, "a8", group=16, symmetric=False)
    assert "bias=True, widths=w4a8, group=16, symmetric=False)" in str(model[0])  # type: ignore[index]
    model = twofour.quantize(convnet(), "w2", "a2", data=[torch.randn(2, 1, 8, 8)], scales="tensor", ends=None)
    assert str(model[0]).endswith(", widths=w2a2, scales='tensor', learned input step)")  # type: ignore[index]


def test_finetune_trains_it_with_and_without_a_teacher() -> None:
    teacher = mlp()
    x = torch.randn(24, 32)
    loader = [(x, teacher(x).argmax(1))]
    model = twofour.quantize(mlp(), "w2", "a2", data=loader)
    taught = twofour.training.Taught(loader, teacher)
    result = twofour.finetune(
        model, taught, loss=twofour.training.distilled(F.cross_entropy), epochs=8, progress=False,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.003),
        evaluate=lambda found: F.cross_entropy(found(x), loader[0][1]).item(),
    )  # fmt: skip
    assert result.sparse.evaluation < result.sparse.before  # type: ignore[operator]


@pytest.mark.parametrize("data", [False, True])
def test_a_nan_is_that_tokens_alone(data: bool) -> None:
    layer, x = nn.Linear(32, 8), torch.randn(5, 32)
    twofour.quantize(layer, "w2", "a4", data=[torch.randn(64, 32)] if data else None)
    want = layer(x)
    x[2, 7] = torch.nan
    with quantization.in_whole_numbers(layer):
        whole = layer(x)
    for found in (layer(x), whole):
        assert found[2].isnan().all() and torch.equal(found[[0, 1, 3, 4]], want[[0, 1, 3, 4]])
    if not data:  # a range that ends nowhere has no steps
        x[2, 7] = torch.inf
        assert layer(x)[2].isnan().all() and torch.equal(layer(x)[[0, 1, 3, 4]], want[[0, 1, 3, 4]])
        x[2] = torch.tensor([3e38, -3e38] * 16)  # nor has one whose difference float32 does not hold
        assert layer(x)[2].isnan().all() and torch.equal(layer(x)[[0, 1, 3, 4]], want[[0, 1, 3, 4]])


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_nan_of_an_image_is_where_whole_numbers_have_it(data: bool, groups: int) -> None:
    layer, x = nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=groups), torch.randn(2, 4, 9, 9)
    twofour.quantize(layer, "w2", "a4", data=[torch.randn(8, 4, 9, 9)] if data else None)
    x[1, 2, 4, 4] = torch.nan
    with torch.no_grad(), quantization.in_whole_numbers(layer):
        whole = layer(x)
    assert torch.equal(layer(x).isnan(), whole.isnan()) and whole[1].isnan().any() and not whole[0].isnan().any()
    assert torch.equal(layer(x).nan_to_num(0), whole.nan_to_num(0))
    assert bool(whole[1].isnan().all()) != data  # of a static range the windows alone that meet it


def test_bfloat16_models_answer_in_bfloat16() -> None:
    model = twofour.quantize(mlp().bfloat16(), "w4", "a8")
    assert model(torch.randn(3, 32).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(("weights", "activations"), [("w1", "a2"), ("w2", "a2"), ("w1.58", "a8")])
def test_every_image_of_a_test_set_is_answered_as_by_whole_numbers(weights: str, activations: str) -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn holds the images")
    pixels, target = datasets.load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(target)
    model = twofour.quantize(convnet(), weights, activations, data=[x[:64]])
    optimizer = torch.optim.Adam(model.train().parameters(), lr=0.005)
    for chosen in torch.arange(1400).split(100):
        optimizer.zero_grad()
        F.cross_entropy(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        answer = model(x[1400:])
    with quantization.in_whole_numbers(model):
        whole = model(x[1400:])
    assert torch.equal(answer, whole) and len(whole) == 397


def test_estimate_runs_it_on_shapes_alone_and_autocast_does_not_round_its_sums() -> None:
    model, x = twofour.quantize(convnet(), "w2", "a2"), torch.randn(2, 1, 8, 8)
    assert "a100" in str(twofour.estimate(model, x, machine="a100-sxm")).lower()
    want = model[0](x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model[0](x), want)


def test_convolutions_are_exact_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """NNPACK takes 3 x 3 of 16 images and more, by Winograd's algorithm."""
    torch.manual_seed(0)
    model, x = nn.Conv2d(32, 32, 3, padding=1).eval(), torch.randn(16, 32, 16, 16)
    twofour.quantize(model, "w4", "a4", data=[x])
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    answer = model(x)
    with quantization.in_whole_numbers(model):
        assert torch.equal(answer, model(x))
