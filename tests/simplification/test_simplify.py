"""simplify merges the weights of a dense model; what comes out prunes, trains, compiles, copies and loads."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import twofour
from twofour.errors import CompileError, LayerError, RecipeError
from twofour.layers import walk
from twofour.simplification import Simplified, simplify


class Adapted(nn.Module):
    """A linear layer beside an adapter with dropout, as peft writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64)
        self.down, self.up = nn.Linear(64, 8, bias=False), nn.Linear(8, 64, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.dropout(x))) * 2.0


class Model(nn.Module):
    """Adapters, layers in a row, attention, a convolution, tied and frozen weights, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 64)
        self.adapted = Adapted()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.norm = nn.LayerNorm(64)
        self.conv = nn.Conv1d(64, 64, 3, padding=1, groups=2)
        self.first, self.second = nn.Linear(64, 256), nn.Linear(256, 32, bias=False)
        self.norm.weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, ids: Tensor, *, shift: Tensor | None = None) -> dict[str, Tensor]:
        x = self.adapted(self.words(ids))
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = functional.gelu(self.conv(x.transpose(1, 2)).transpose(1, 2)) * self.scale
        x = x if shift is None else x + shift
        return {"out": self.second(self.first(x)), "hidden": x}


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(0, 20, (3, 7))


def assert_same(one: nn.Module, other: nn.Module, *args: Tensor, **kwargs: Tensor) -> None:
    one, other = copy.deepcopy(one).eval(), copy.deepcopy(other).eval()
    found, want = one(*args, **kwargs), other(*args, **kwargs)
    assert list(found) == list(want)
    for name in want:
        torch.testing.assert_close(found[name], want[name], rtol=1e-4, atol=1e-5)


def test_a_model_keeps_its_names_and_answers(model: Model, ids: Tensor) -> None:
    before = copy.deepcopy(model.state_dict())
    made = simplify(model, ids)
    assert isinstance(made, Simplified) and made.training
    assert made.simplification.counts["low rank into a weight"] == 1
    assert made.simplification.counts["linear layers in a row"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    names = set(made.state_dict())
    assert names - set(before) == {"attention.in_proj.weight", "attention.in_proj.bias", "second.bias"}
    assert not {"adapted.down.weight", "first.weight", "first.bias"} & names
    for size in (ids, ids[:1], torch.randint(0, 20, (5, 11))):
        assert_same(made, model, size)
    assert not made.get_parameter("norm.weight").requires_grad
    assert made.get_submodule("conv").groups == 2  # type: ignore[union-attr]
    assert "in_features=64, out_features=32" in str(made.get_submodule("second"))


def test_prune_sees_its_layers_and_compile_and_load_take_it(model: Model, ids: Tensor, tmp_path: Path) -> None:
    made = twofour.prune(model, "2:4", simplify=True, example=ids, skip="conv")
    assert not twofour.masks.of(model)
    assert set(twofour.masks.of(made)) == {
        "adapted.base.weight",
        "attention.in_proj.weight",
        "attention.out_proj.weight",
        "second.weight",
    }
    fast = twofour.compile(made.eval(), ids, tokens=(1,))
    assert_same(fast, made, ids)
    twofour.save(fast, tmp_path / "m.safetensors")
    again = twofour.load(tmp_path / "m.safetensors", twofour.simplify(model, ids))
    assert_same(again, made, ids)


def test_it_copies_pickles_and_trains(model: Model, ids: Tensor) -> None:
    made = simplify(model, ids)
    assert_same(pickle.loads(pickle.dumps(made)), model, ids)
    copied = copy.deepcopy(made)
    with torch.no_grad():
        copied.get_parameter("second.weight").zero_()
        copied.get_parameter("second.bias").zero_()
    assert copied.eval()(ids)["out"].abs().max() == 0
    assert_same(made, model, ids)
    made(ids)["out"].sum().backward()
    assert made.get_parameter("adapted.base.weight").grad is not None
    assert made.get_parameter("norm.weight").grad is None


def test_keywords_and_calls_it_does_not_hold_for(model: Model, ids: Tensor) -> None:
    shift = torch.ones(64)
    made = simplify(model, {"ids": ids, "shift": shift})
    assert_same(made, model, ids, shift=shift)
    with pytest.raises(LayerError, match="does not hold for this call"):
        made(ids)
    with pytest.raises(TypeError):
        made(ids, other=shift)


def test_a_model_with_nothing_to_merge_stays_as_it_is(ids: Tensor) -> None:
    plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    assert simplify(plain, torch.randn(2, 64)) is plain
    assert twofour.prune(plain, "2:4", simplify=True, example=torch.randn(2, 64)) is plain


def test_tied_and_shared_weights_stay_shared() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.adapted = nn.Embedding(20, 64), Adapted()
            self.shared = nn.Linear(64, 64)
            self.head = nn.Linear(64, 20, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: Tensor) -> dict[str, Tensor]:
            x = self.shared(functional.relu(self.shared(self.adapted(self.words(ids)))))
            return {"out": self.head(x.tanh())}

    tied = Tied()
    made = simplify(tied, torch.randint(0, 20, (2, 5)))
    assert_same(made, tied, torch.randint(0, 20, (3, 4)))
    sizes = [tuple(parameter.shape) for parameter in made.parameters()]
    assert sizes.count((20, 64)) == 1
    assert sizes.count((64, 64)) == 2
    state = made.state_dict()
    assert state["words.weight"].data_ptr() == state["head.weight"].data_ptr()
    assert set(twofour.masks.of(twofour.prune(made, "2:4"))) == {"shared_merged.weight", "shared.weight"}


class Paired(nn.Module):
    """Two layers in a row, which become one, before what a test is about."""

    def __init__(self, then: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.then = nn.Linear(64, 128), nn.Linear(128, 64), then

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.then(self.second(self.first(x)))}


class Repeated(nn.Module):
    """One block run three times, as ALBERT does, between two layers that share a weight but no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
        self.again = self.up
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(torch.tanh(x))
        for layer in (self.up, self.again, self.up):
            x = x + self.down(torch.relu(layer(x)))
        return self.other(x)


class Adapter(nn.Linear):
    """A linear layer that holds an adapter and a gain, and adds them itself."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.down, self.up = nn.Linear(64, 16), nn.Linear(16, 64)
        self.gain = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        added = self.up(functional.gelu(self.down(x))) * self.gain
        return functional.linear(x, self.weight, self.bias) + torch.tanh(added)


def test_layers_that_are_called_again_stay_layers() -> None:
    x, model = torch.randn(4, 64), Paired(Repeated())
    made = simplify(model, x)
    assert_same(made, model, torch.randn(7, 64))
    assert set(made.state_dict()) == set(model.state_dict()) - {"first.weight", "first.bias"}
    sparse, dense = twofour.prune(made, "2:4"), twofour.prune(copy.deepcopy(model), "2:4")
    assert set(twofour.masks.of(sparse)) == set(twofour.masks.of(dense)) - {"first.weight"}
    fast = twofour.compile(made.eval(), x, tokens=(4,))
    assert_same(fast, made, x)


def test_an_adapter_inside_a_layer_keeps_its_place() -> None:
    x, model = torch.randn(4, 64), Paired(Adapter())
    made = simplify(model, x)
    assert_same(made, model, torch.randn(7, 64))
    pruned = twofour.prune(made, "2:4")
    assert {"then.base_layer.weight", "then.down.weight", "then.up.weight"} < set(twofour.masks.of(pruned))
    assert_same(twofour.compile(pruned.eval(), x, tokens=(4,), graph=False), pruned, x)


def test_a_model_whose_weights_no_layer_would_hold_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = Paired(nn.ConvTranspose1d(64, 64, 3))
    model.then.register_buffer("unused", torch.zeros(1))
    x = torch.randn(64, 64)
    with caplog.at_level("INFO", logger="twofour.simplification"):
        assert simplify(model, x) is model
    assert "no layer of a simplified one would hold `then.weight`" in caplog.text
    assert "then.weight" in twofour.masks.of(twofour.prune(model, "2:4", simplify=True, example=x))


def test_a_layer_merged_into_what_no_layer_holds_stays_a_layer(caplog: pytest.LogCaptureFixture) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v, self.l = (
                nn.Parameter(torch.randn(64, 64)),
                nn.Parameter(torch.randn(64, 64)),
                nn.Linear(64, 64),
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.l(x @ self.w + x @ self.v)

    model, x = Sums(), torch.randn(6, 64)
    with caplog.at_level("INFO", logger="twofour.simplification"):
        assert simplify(model, x) is model
    assert "the model stays as it is" in caplog.text
    assert "l.weight" in twofour.masks.of(twofour.prune(model, "2:4", simplify=True, example=x))


def test_a_transposed_view_of_a_square_weight_is_another_weight() -> None:
    one, other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    other.weight = nn.Parameter(one.weight.detach().t())
    model = Paired(nn.Sequential(one, nn.ReLU(), other))
    assert_same(simplify(model, torch.randn(2, 64)), model, torch.randn(3, 64))


def test_what_cannot_be_simplified(model: Model, ids: Tensor) -> None:
    with pytest.raises(RecipeError, match="go together"):
        twofour.prune(model, "2:4", simplify=True)
    with pytest.raises(RecipeError, match="neither True nor False"):
        twofour.prune(model, "2:4", simplify="yes", example=ids)  # type: ignore[arg-type]
    with pytest.raises(LayerError, match="only a dense model"):
        simplify(twofour.prune(nn.Sequential(nn.Linear(64, 64)), "2:4"), torch.randn(2, 64))

    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(CompileError, match="cannot be captured"):
        simplify(Branching(), torch.randn(2, 64))
    for example in (None, torch.randn(3, 5), "text"):
        with pytest.raises(LayerError, match="the model does not run on the example"):
            simplify(model, example)
    with pytest.raises(CompileError, match="rules are not known"):
        simplify(model, ids, rules="everything")


def test_every_layer_of_the_model_is_prunable(model: Model, ids: Tensor) -> None:
    made = simplify(model, ids)
    found = {weight.name for weight in walk(made, eligibility="any").weights}
    assert {"adapted.base.weight", "second.weight", "conv.weight"} <= found


def test_a_merge_of_frozen_weights_alone_stays_frozen() -> None:
    x, model = torch.randn(2, 64), Paired(nn.Identity())
    model.first.requires_grad_(False)
    assert all(parameter.requires_grad for parameter in simplify(model, x).parameters())
    model.second.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in simplify(model, x).parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_not_merged(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Paired(nn.ReLU()).to(dtype), torch.randn(4, 64).to(dtype)
    with caplog.at_level("INFO", logger="twofour.simplification"):
        assert simplify(model, x) is model
    assert "merging would round it twice" in caplog.text


def test_forward_hooks_would_not_run_so_the_model_stays(caplog: pytest.LogCaptureFixture) -> None:
    model, seen = Paired(nn.ReLU()), []
    model.first.register_forward_hook(lambda module, given, found: seen.append(found))
    with caplog.at_level("INFO", logger="twofour.simplification"):
        assert simplify(model, torch.randn(4, 64)) is model
    assert "forward hooks on `first` would not run in a graph" in caplog.text and not seen
