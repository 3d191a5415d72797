"""Which statistics reach which weight: block by block, in passes, shared, and what is put back afterwards."""

import pytest
import torch
from torch import nn

from twofour.calibration import Batch, Statistics, calibrate
from twofour.calibration.blocks import find, survey
from twofour.calibration.passes import calibrating
from twofour.calibration.statistics import SAMPLED_ROWS
from twofour.errors import DataError
from twofour.layers import walk

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int, inplace: bool = False) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.out, self.inplace = nn.Linear(width, width), inplace

    def forward(self, x, scale=1.0):
        if self.inplace:
            x.mul_(0.5)
        return x + scale * self.out(torch.relu(self.query(x)) * torch.sigmoid(self.key(x))), None


class Model(nn.Module):
    def __init__(self, blocks: int = 3, inplace: bool = False, scales=(1.0, 1.0, 1.0)) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.unused, self.scales = nn.Linear(16, 16), scales
        self.blocks = nn.ModuleList(Block(16, inplace) for _ in range(blocks))

    def forward(self, x):
        x = self.stem(x)
        for block, scale in zip(self.blocks, self.scales, strict=False):
            x, _ = block(x, scale=scale)
        return self.head(x)


def batches(seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [Batch(torch.randn(size, 5, 8, generator=generator)) for size in (4, 3)]


def run(model: nn.Module, need="hessian", visit=None, data=None, **options):
    """Return the statistics by name, and what was refused."""
    found: dict[str, Statistics] = {}

    def keep(weight, statistics) -> None:
        found[weight.name] = statistics
        if visit is not None:
            visit(weight, statistics)

    weights = walk(model, eligibility="any").weights
    return found, calibrate(model, weights, data or batches(), need, keep, **options)


def inputs(model: nn.Module, layer: str, data=None) -> torch.Tensor:
    """All inputs of a layer as rows, found with a hook of the test's own."""
    seen = []
    handle = model.get_submodule(layer).register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        for batch in data or batches():
            model(batch.inputs)
    handle.remove()
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in seen])


def test_statistics_are_those_of_the_inputs() -> None:
    torch.manual_seed(0)
    model = Model()
    found, refused = run(model)
    assert refused == {"unused.weight": "the calibration data never reach it"}
    order = [f"blocks.{n}.{name}.weight" for n in range(3) for name in ("query", "key", "out")]
    assert list(found) == ["stem.weight", *order, "head.weight"]
    for name, statistics in found.items():
        x = inputs(model, name.removesuffix(".weight")).double()
        assert statistics.rows == 35 and statistics.hessian is not None
        torch.testing.assert_close(statistics.hessian[0].double(), x.T @ x, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(statistics.norms[0], x.norm(dim=0), rtol=1e-6, atol=1e-6)


def test_layers_with_one_input_share_their_statistics() -> None:
    found, _ = run(Model())
    assert found["blocks.0.query.weight"] is found["blocks.0.key.weight"]
    assert found["blocks.0.query.weight"] is not found["blocks.0.out.weight"]


def test_sharing_is_given_up_where_a_later_call_differs() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.a(x) + self.b(x if len(x) == 4 else 2 * x)

    model = Fickle()
    found, _ = run(model)
    for name in ("a", "b"):
        x = inputs(model, name)
        torch.testing.assert_close(found[f"{name}.weight"].hessian[0], x.T @ x)


def test_blocks_are_found_and_run_once_each() -> None:
    model = Model()
    weights = walk(model, eligibility="any").weights
    seen = survey(model, weights, batches(), CPU)
    assert seen.chain is not None and (seen.chain.name, seen.chain.slot) == ("blocks", 0)
    assert seen.before == {"stem.weight"}
    calls = {"head": 0, "block": 0}
    model.head.register_forward_hook(lambda *_: calls.__setitem__("head", calls["head"] + 1))
    model.blocks[1].register_forward_hook(lambda *_: calls.__setitem__("block", calls["block"] + 1))
    run(model)
    # The survey runs both batches, the second in search of `unused`, the head's own pass two; a block is run for its
    # statistics and for its outputs.
    assert calls == {"head": 4, "block": 2 + 2 + 2 + 2}


@pytest.mark.parametrize("budget", [1, 1 << 30])
@pytest.mark.parametrize("blocks", [True, False])
def test_later_weights_see_the_pruned_ones(blocks: bool, budget: int) -> None:
    torch.manual_seed(0)
    model = Model(scales=(1.0, 1.0, 1.0) if blocks else (1.0, 0.5, 1.0))

    def halve(weight, _) -> None:
        weight.parameter.mul_(0.5)

    found, _ = run(model, visit=halve, budget=budget)
    assert (survey(model, walk(model, eligibility="any").weights, batches(), CPU).chain is not None) == blocks
    if blocks or budget == 1:
        x = inputs(model, "blocks.2.query")
        torch.testing.assert_close(found["blocks.2.query.weight"].hessian[0], x.T @ x, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Model(inplace=True), "a block changes its input in place"),
        (Model(scales=(1.0, 0.5, 1.0)), "its blocks are called with different arguments"),
        (Model(scales=(1.0, 1.0)), "only 2 of its 3 blocks were called"),
    ],
)
def test_what_is_no_chain_is_run_as_a_whole(model: nn.Module, reason: str, caplog) -> None:
    caplog.set_level("INFO", "twofour.calibration")
    data = [Batch(batch.inputs) for batch in batches()]
    found, _ = run(model, data=data)
    assert reason in caplog.text
    x = inputs(model, "blocks.1.out", data)
    torch.testing.assert_close(found["blocks.1.out.weight"].hessian[0], x.T @ x, rtol=1e-4, atol=1e-4)


def test_the_list_that_cuts_smallest_is_taken() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), nn.Linear(16, 4))
    chain = find(model, walk(model, eligibility="any").weights)
    assert chain is not None and chain.name == "1"
    assert find(nn.ModuleDict({"a": nn.Linear(8, 8)}), walk(nn.Linear(8, 8), eligibility="any").weights) is None


def test_sampled_rows_are_spread_over_the_data() -> None:
    statistics = Statistics("sample")
    x = torch.arange(3000.0).view(1, -1, 1)
    for part in x.split(70, dim=1):
        statistics.add(part)
    sample = statistics.sample
    assert sample is not None and SAMPLED_ROWS / 2 < sample.shape[1] <= SAMPLED_ROWS
    steps = sample.flatten().diff()
    assert (steps == steps[0]).all() and sample[0, -1] > 2900


def test_modes_come_back_also_after_an_error() -> None:
    model = Model().train()
    model.head.eval()
    run(model)
    assert model.training and not model.head.training
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in model.modules())

    def fail(*_) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, visit=fail)
    assert model.training and torch.backends.mha.get_fastpath_enabled()
    assert all(not module._forward_pre_hooks and not module._forward_hooks for module in model.modules())


def test_errors_of_the_model_and_of_its_inputs() -> None:
    with pytest.raises(DataError, match=r"does not run on the calibration data\n  got +RuntimeError: mat1 and mat2"):
        run(Model(), data=[Batch(torch.randn(2, 7))])
    with pytest.raises(DataError, match=r"layer `stem.weight`: the calibration data make a layer's input infinite"):
        run(Model(), data=[Batch(torch.full((2, 8), 1e30))])
    bad = torch.ones(2, 8).index_fill(1, torch.tensor([3]), torch.nan)
    hold = r"layer `stem.weight`: the calibration data hold NaN\n  got +batch 2: 2 values that are NaN\n.*\n  try"
    with pytest.raises(DataError, match=hold):
        run(Model(), data=[Batch(torch.ones(2, 8)), Batch(bad)])


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_the_blocks_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra [text]")
    torch.manual_seed(0)
    small = {"num_hidden_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 30}
    if kind == "bert":
        model = transformers.BertModel(transformers.BertConfig(intermediate_size=32, **small))
    elif kind == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=30))
    else:
        config = transformers.LlamaConfig(intermediate_size=32, num_key_value_heads=1, **small)
        model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 30, (3, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[1, 4:] = 0
    data = [Batch({"input_ids": ids, "attention_mask": mask})]
    weights = walk(model, eligibility="any").weights
    with calibrating(model):
        seen = survey(model, weights, data, CPU)
    assert seen.chain is not None and len(seen.chain.blocks) == 2, seen.reason
    found, refused = run(model, data=data)
    assert not refused and len(found) == len(weights)
    name = next(weight.name for weight in reversed(weights) if ".1." in weight.name)
    given = []
    layer = model.get_submodule(name.removesuffix(".weight"))
    handle = layer.register_forward_pre_hook(lambda _, args: given.append(args[0].detach()))
    with torch.no_grad():
        model.eval()(**data[0].inputs)
    handle.remove()
    x = given[0][mask.bool()]
    assert found[name].rows == 16
    torch.testing.assert_close(found[name].hessian[0], x.T @ x, rtol=1e-3, atol=1e-4)


def test_a_layer_that_only_a_later_batch_reaches_is_calibrated() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
            self.second = nn.MultiheadAttention(8, 2)

        def forward(self, x):
            return self.last(self.first(x) if x[0, 0] > 0 else self.second(x, x, x)[0])

    torch.manual_seed(0)
    data = [Batch(torch.full((4, 8), sign) + 0.1 * torch.rand(4, 8)) for sign in (1.0, 1.0, -1.0)]
    found, refused = run(Experts(), data=data)
    assert not refused
    rows = {name: statistics.rows for name, statistics in found.items()}
    later = {"second.in_proj_weight": 4, "second.out_proj.weight": 4}
    assert rows == {"first.weight": 8, "last.weight": 12, **later}


class Chained(nn.Module):
    """A model that takes another way through its blocks where the batch's first value is negative."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.other = other

    def forward(self, x):
        blocks, other = list(self.blocks), bool(x[0, 0] < 0)
        if other:
            blocks = {"exit": blocks[:2], "order": blocks[::-1], "again": blocks * 2, "skip": blocks}[self.other]
        for block in blocks:
            x = block(x) + x if other and self.other == "skip" else block(x)
        return x


@pytest.mark.parametrize("budget", [1, 1 << 30])
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("exit", "only 2 of its 3 blocks were called (batch 2)"),
        ("order", "its blocks are not called once each, in order (batch 2)"),
        ("again", "its blocks are not called once each, in order (batch 2)"),
        ("skip", "a block's input is not the output of the one before (batch 2)"),
    ],
)
def test_a_later_batch_that_takes_another_way_is_seen(other: str, reason: str, budget: int, caplog) -> None:
    caplog.set_level("INFO", "twofour.calibration")
    torch.manual_seed(0)
    model = Chained(other)
    data = [Batch(torch.full((4, 8), sign) + 0.1 * torch.rand(4, 8)) for sign in (1.0, -1.0)]
    assert survey(model, walk(model, eligibility="any").weights, data[:1], CPU).chain is not None
    found, refused = run(model, data=data, budget=budget)
    assert not refused and reason in caplog.text
    for number in range(3):
        x = inputs(model, f"blocks.{number}.0", data)
        statistics = found[f"blocks.{number}.0.weight"]
        assert statistics.rows == len(x)
        torch.testing.assert_close(statistics.hessian[0], x.T @ x, rtol=1e-4, atol=1e-4)
