"""torchao 0.18's calls through the shim; its own choices in tests/data/compat."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import twofour
from twofour import masks
from twofour.compat import torchao_sparsity as ao
from twofour.errors import LayerError, MaskError, PatternError
from twofour.patterns import parse

GOLDEN = load_file(Path(__file__).parent.parent / "data" / "compat" / "torchao.safetensors")


@pytest.fixture(autouse=True)
def shared_cache(times_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOUR_CACHE", str(times_cache))


def golden() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(32, 16, bias=False))
    model[0].weight.data.copy_(GOLDEN["weight"])
    return model


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Sequential(nn.Linear(64, 64)), nn.Linear(64, 10))


def test_fake_sparsity_chooses_as_torchao_does() -> None:
    model = golden()
    ao.apply_fake_sparsity(model)
    assert torch.equal(model[0].weight.ne(0), GOLDEN["magnitude"].bool())
    assert twofour.check(model).ok


def test_fake_sparsity_takes_a_filter() -> None:
    model = net()
    ao.apply_fake_sparsity(model, filter_fn=lambda module, name: name == "2.0")
    assert set(masks.of(model)) == {"2.0.weight"}


def wanda(batches: Tensor) -> nn.Sequential:
    model = golden()
    sparsifier = ao.WandaSparsifier(semi_structured_block_size=4)
    sparsifier.prepare(model, config=None)
    for batch in batches:
        model(batch)
    sparsifier.step()
    sparsifier.squash_mask()
    assert not model[0]._forward_pre_hooks
    return model


def test_wanda_ranks_by_the_papers_score_and_torchao_by_its_square() -> None:
    norms = GOLDEN["inputs"].double().flatten(0, 1).square().sum(0).sqrt()
    size, rule = GOLDEN["weight"].double().abs(), parse("2:4")
    assert torch.equal(wanda(GOLDEN["inputs"])[0].weight.ne(0), rule.project(size * norms))
    assert torch.equal(GOLDEN["wanda"].bool(), rule.project(size * norms**2))


def test_wanda_stays_sparse_while_it_trains() -> None:
    model = wanda(GOLDEN["inputs"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(GOLDEN["inputs"][0]).sum().backward()
    optimizer.step()
    assert twofour.check(model).ok


def test_wanda_refuses_what_it_cannot_do() -> None:
    for given in ({}, {"sparsity_level": 0.6}):
        with pytest.raises(PatternError, match=r"unstructured(.|\n)*WandaSparsifier\(semi_structured_block_size=4\)"):
            ao.WandaSparsifier(**given)
    for given in ({"sparsity_level": 0.7, "semi_structured_block_size": 4}, {"semi_structured_block_size": 5}):
        with pytest.raises(PatternError, match="half of each block"):
            ao.WandaSparsifier(**given)
    sparsifier = ao.WandaSparsifier(semi_structured_block_size=4)
    with pytest.raises(MaskError, match="no model"):
        sparsifier.step()
    with pytest.raises(LayerError, match="no such weight"):
        sparsifier.prepare(golden(), [{"tensor_fqn": "1.weight"}])
    sparsifier.prepare(golden(), [{"tensor_fqn": "0.weight"}])
    with pytest.raises(MaskError, match="seen no inputs"):
        sparsifier.step()


def test_sparsify_runs_on_the_cpu_and_computes_the_same() -> None:
    model = net().eval()
    ao.apply_fake_sparsity(model, filter_fn=lambda module, name: name != "3")
    x = torch.randn(5, 32)
    want = model(x).detach()
    config = ao.semi_sparse_weight(tokens=(5,), memory="small")
    back = ao.sparsify_(model, config, lambda module, name: isinstance(module, nn.Linear) and name != "3")
    assert back is model and type(model[3]) is nn.Linear and not isinstance(model[0], nn.Linear)
    torch.testing.assert_close(model(x).detach(), want, atol=1e-5, rtol=1e-5)


def test_sparsify_refuses_dense_weights_and_changes_nothing() -> None:
    model = net()
    ao.apply_fake_sparsity(model, filter_fn=lambda module, name: name == "0")
    with pytest.raises(MaskError, match=r"`2.0`(.|\n)*drop values"):
        ao.sparsify_(model, ao.semi_sparse_weight())
    assert isinstance(model[0], nn.Linear)
    with pytest.raises(LayerError, match="no Linear"):
        ao.sparsify_(model, ao.semi_sparse_weight(), lambda module, name: False)
    with pytest.raises(LayerError, match="alg_id"):
        ao.semi_sparse_weight(alg_id=3)
    with pytest.raises(PatternError, match=r"not converted(.|\n)*block:64x64@0.9"):
        ao.block_sparse_weight(64)


def test_semi_sparse_linear_prunes_in_the_product_and_trains_the_dense_weight() -> None:
    model = net()
    dense = model[0].weight
    ao.swap_linear_with_semi_sparse_linear(model, {"0": ao.SemiSparseLinear, "2.0": ao.SemiSparseActivationLinear})
    assert type(model[0]) is ao.SemiSparseLinear and model[0].weight is dense
    x = torch.randn(8, 32)
    keep = parse("2:4-transposable").project(dense.detach(), absolute=True)
    torch.testing.assert_close(model[0](x), nn.functional.linear(x, dense * keep, model[0].bias))
    out = model[0](x)
    grad = torch.randn_like(out)
    (out * grad).sum().backward()
    assert dense.grad is not None
    torch.testing.assert_close(dense.grad, grad.T @ x)  # straight through: pruned values get a gradient too
    ao.swap_semi_sparse_linear_with_linear(model)
    assert type(model[0]) is nn.Linear and model[0].weight is dense and type(model[2][0]) is nn.Linear


def test_semi_sparse_activations_are_pruned_both_ways() -> None:
    layer = ao.SemiSparseActivationLinear.from_dense(nn.Linear(16, 8))
    x = torch.randn(2, 4, 16, requires_grad=True)
    flat = x.detach().flatten(0, 1)
    pruned = flat * parse("2:4-transposable").project(flat, absolute=True)
    torch.testing.assert_close(layer(x), nn.functional.linear(pruned, layer.weight, layer.bias).view(2, 4, 8))
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(2, 4, 16).detach())


def test_swapped_layers_are_traced_as_one_graph() -> None:
    model = net()
    ao.swap_linear_with_semi_sparse_linear(model, {"0": ao.SemiSparseLinear, "2.0": ao.SemiSparseActivationLinear})
    x = torch.randn(8, 32)
    grads = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        out = call(x)
        out.square().sum().backward()
        grads.append((out, *(parameter.grad for parameter in model.parameters())))
    for got, want in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(got, want)


def test_swapping_a_layer_that_is_not_there_is_refused() -> None:
    with pytest.raises(LayerError, match="no such layer"):
        ao.swap_linear_with_semi_sparse_linear(net(), {"1": ao.SemiSparseLinear})


def test_mask_creator_keeps_the_largest() -> None:
    weight = torch.randn(8, 16)
    assert torch.equal(ao.mask_creator(weight), parse("2:4").project(weight, absolute=True).float())
    assert torch.equal(ao.mask_creator(weight, 1, 4).sum(-1), torch.full((8,), 4.0))


@pytest.mark.parametrize("tensor", [torch.ones(3, 3), torch.tensor(1.0)])
def test_a_mask_of_values_that_do_not_divide_is_refused(tensor: Tensor) -> None:
    with pytest.raises(PatternError, match="does not divide"):
        ao.mask_creator(tensor)
