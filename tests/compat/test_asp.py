"""apex's own scenarios (contrib/sparsity/test), shortened, through the shim: prune, checkpoint, resume in parts."""

import copy
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import twofour
from twofour import importing, masks
from twofour.compat.asp import ASP
from twofour.errors import LayerError, MaskError, PatternError
from twofour.patterns import parse

BATCH, STEPS = 8, 4


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ASP, "_session", None)


def build(features: tuple[int, ...]) -> nn.Sequential:
    """apex's toy model: Linear and LayerNorm in turn."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (into, out) in enumerate(pairwise(features), 1):
        layers[f"linear_layer_{i}"], layers[f"layer_norm_{i}"] = nn.Linear(into, out), nn.LayerNorm([BATCH, out])
    return nn.Sequential(layers)


TOY = (16, 40, 40, 40, 8)  # toy_problem.py
CHECKPOINT = (8, 32, 32, 32, 8)  # checkpointing_test_*.py: the first layer's 8 inputs are refused


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    into, out = model[0].in_features, model[-1].normalized_shape[-1]  # type: ignore[index]
    for _ in range(steps):
        ((model(torch.randn(BATCH, into)) - torch.randn(BATCH, out)) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters() if value.ndim == 2}


def sparse(model: nn.Module) -> bool:
    return all(parse(m.pattern).check(m.module.weight.detach()).ok for m in masks.of(model).values()) and bool(
        masks.of(model)
    )


def test_the_toy_problem() -> None:
    """Dense, sparse, masks anew, dense again."""
    torch.manual_seed(0)
    model = build(TOY)
    optimizer = torch.optim.Adam(model.parameters())
    ASP.init_model_for_pruning(
        model, "m4n2_1d", whitelist=[nn.Linear], allow_recompute_mask=True, allow_permutation=False
    )
    ASP.init_optimizer_for_pruning(optimizer)
    train(model, optimizer)
    assert not ASP.is_sparsity_enabled() and not masks.of(model)
    dense = weights(model)
    ASP.compute_sparse_masks()
    assert ASP.is_sparsity_enabled() and sparse(model)
    train(model, optimizer)
    assert sparse(model)
    pruned = {name: mask.keep.clone() for name, mask in masks.of(model).items()}
    assert set(pruned) == {"linear_layer_1.weight"}  # 40 inputs are no multiple of 16
    trained = weights(model)
    ASP.compute_sparse_masks()
    assert sparse(model)
    train(model, optimizer)
    ASP.restore_pruned_weights()
    assert not ASP.is_sparsity_enabled() and not masks.of(model)
    name = next(iter(pruned))
    restored = weights(model)[name]
    assert bool(restored.ne(0).all())
    train(model, optimizer)
    assert not torch.equal(weights(model)[name], restored)
    assert not torch.equal(trained[name], dense[name])


def part1(path: Path, pattern: str, permuted: bool, recompute: bool = True) -> None:
    """checkpointing_test_part1.py: train dense, compute masks, train sparse, save."""
    torch.manual_seed(4873)
    model = build(CHECKPOINT)
    optimizer = torch.optim.Adam(model.parameters())
    ASP.init_model_for_pruning(
        model,
        pattern,
        verbosity=3,
        whitelist=[nn.Linear],
        allow_recompute_mask=recompute,
        allow_permutation=permuted,
        example=torch.randn(BATCH, 8) if permuted else None,
    )
    ASP.init_optimizer_for_pruning(optimizer)
    train(model, optimizer)
    ASP.compute_sparse_masks()
    train(model, optimizer)
    content: dict[str, Any] = {"pattern": pattern, "whitelist": [nn.Linear], "allow_recompute_mask": recompute}
    torch.save(
        {**content, "model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, path
    )


def part2(path: Path) -> nn.Module:
    """checkpointing_test_part2.py: a new model, initialised, loaded, trained on."""
    with torch.serialization.safe_globals([nn.Linear]):
        content = torch.load(path, weights_only=True)
    model = build(CHECKPOINT)
    optimizer = torch.optim.Adam(model.parameters())
    ASP.init_model_for_pruning(
        model, content["pattern"], whitelist=content["whitelist"], allow_recompute_mask=content["allow_recompute_mask"]
    )
    ASP.init_optimizer_for_pruning(optimizer)
    torch.manual_seed(99875)
    model.load_state_dict(content["model_state_dict"])
    optimizer.load_state_dict(content["optimizer_state_dict"])
    assert ASP.is_sparsity_enabled() and sparse(model)
    train(model, optimizer)
    return model


def reference(pattern: str, permuted: bool) -> nn.Module:
    """checkpointing_test_reference.py: the same without the break."""
    torch.manual_seed(4873)
    model = build(CHECKPOINT)
    optimizer = torch.optim.Adam(model.parameters())
    options = {"allow_permutation": permuted, "example": torch.randn(BATCH, 8) if permuted else None}
    ASP.init_model_for_pruning(model, pattern, whitelist=[nn.Linear], allow_recompute_mask=True, **options)
    ASP.init_optimizer_for_pruning(optimizer)
    train(model, optimizer)
    ASP.compute_sparse_masks()
    train(model, optimizer)
    torch.manual_seed(99875)
    train(model, optimizer)
    return model


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("pattern", ["m4n2_1d", "m4n2_2d_best"])
def test_resuming_in_parts_gives_the_same_bits(tmp_path: Path, pattern: str, permuted: bool) -> None:
    part1(tmp_path / "part1.chkp", pattern, permuted)
    resumed, whole = part2(tmp_path / "part1.chkp"), reference(pattern, permuted)
    assert resumed.state_dict().keys() == whole.state_dict().keys()
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in resumed.state_dict().items())
    assert sparse(resumed) and len(masks.of(resumed)) == 3  # the layer with 8 inputs is left dense


def test_the_state_dict_has_apexs_buffers_and_ours_are_not_in_it(tmp_path: Path) -> None:
    part1(tmp_path / "part1.chkp", "m4n2_1d", permuted=False)
    with torch.serialization.safe_globals([nn.Linear]):
        state = torch.load(tmp_path / "part1.chkp", weights_only=True)["model_state_dict"]
    added = set(state) - set(build(CHECKPOINT).state_dict())
    names = [f"linear_layer_{i}.__weight_mma_{kind}" for i in (2, 3, 4) for kind in ("mask", "pruned_p")]
    assert added == set(names)
    for i in (2, 3, 4):
        keep, stowed = (state[f"linear_layer_{i}.__weight_mma_{kind}"] for kind in ("mask", "pruned_p"))
        assert keep.dtype == torch.bool and int(keep.sum()) * 2 == keep.numel()
        assert not bool((stowed.ne(0) & keep).any()) and bool(stowed.ne(0).any())


def test_a_checkpoint_of_the_shim_is_one_that_read_takes(tmp_path: Path) -> None:
    part1(tmp_path / "part1.chkp", "m4n2_1d", permuted=False)
    found = importing.decode(tmp_path / "part1.chkp")
    assert found.format == "asp" and len(found.sparse) == 3
    assert twofour.check(twofour.read(tmp_path / "part1.chkp", build(CHECKPOINT))).ok


def test_permuting_changes_what_is_stored_and_not_what_is_computed() -> None:
    torch.manual_seed(1)
    x = torch.randn(BATCH, 16)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))
    with torch.no_grad():
        model[2].weight.mul_(torch.rand(64) ** 4)
    before = copy.deepcopy(model)
    ASP.init_model_for_pruning(model, allow_recompute_mask=True, example=x)
    ASP.compute_sparse_masks()
    assert sparse(model)
    ASP.restore_pruned_weights()
    torch.testing.assert_close(model(x), before(x))
    assert not torch.equal(model[2].weight, before[2].weight)
    kept = model[2].weight.detach().abs()
    other = before[2].weight.detach().abs()
    rule = parse("2:4")
    assert float((kept * rule.project(kept)).sum()) >= float((other * rule.project(other)).sum())


def test_prune_trained_model_is_the_three_calls_in_one() -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Flatten(), nn.Linear(32 * 4, 16), nn.Conv1d(16, 16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ASP.prune_trained_model(model, optimizer)
    assert set(masks.of(model)) == {"0.weight", "2.weight"}  # Conv1d is not on that list
    assert ASP.already_init_asp_model() and ASP.is_sparsity_enabled()
    with pytest.raises(MaskError, match="allow_recompute_mask"):
        ASP.compute_sparse_masks()
    with pytest.raises(MaskError, match="cannot be restored"):
        ASP.restore_pruned_weights()


def test_names_types_and_calculators_choose_what_is_pruned() -> None:
    def first_two(weight: Tensor) -> Tensor:
        return torch.tensor([1, 1, 0, 0]).repeat(weight.numel() // 4).view(weight.shape)

    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), nn.Conv2d(16, 16, 1))
    options: dict[str, Any] = {"allow_permutation": False, "whitelist": [nn.Linear]}
    ASP.init_model_for_pruning(
        model, first_two, allowed_layer_names=["0", "1"], disallowed_layer_names=["1"], **options
    )
    ASP.compute_sparse_masks()
    assert set(masks.of(model)) == {"0.weight"}
    assert bool(model[0].weight.view(-1, 4)[:, :2].ne(0).all()) and not bool(model[0].weight.view(-1, 4)[:, 2:].any())


def test_a_mask_that_is_not_sparse_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    before = model[0].weight.detach().clone()
    ASP.init_model_for_pruning(model, lambda weight: torch.ones_like(weight), allow_permutation=False)
    with pytest.raises(MaskError, match="not 2:4"):
        ASP.compute_sparse_masks()
    assert torch.equal(model[0].weight, before) and not ASP.is_sparsity_enabled()


def test_loading_a_dense_checkpoint_turns_sparsity_off() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    ASP.init_model_for_pruning(model, allow_permutation=False)
    dense = copy.deepcopy(model.state_dict())
    ASP.compute_sparse_masks()
    pruned = copy.deepcopy(model.state_dict())
    model.load_state_dict(dense)
    assert not ASP.is_sparsity_enabled() and not masks.of(model)
    model.load_state_dict(pruned)
    assert ASP.is_sparsity_enabled() and sparse(model)
    one = model[0]  # a layer that is loaded by itself
    one.load_state_dict({name.removeprefix("0."): tensor for name, tensor in dense.items()})
    assert not masks.of(model)


def test_a_second_model_takes_the_place_of_the_first() -> None:
    one, other = nn.Sequential(nn.Linear(16, 16)), nn.Sequential(nn.Linear(16, 16))
    ASP.prune_trained_model(one, torch.optim.SGD(one.parameters(), lr=0.1))
    ASP.prune_trained_model(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert sparse(one) and sparse(other)
    with pytest.raises(LayerError, match="already"):
        ASP.init_model_for_pruning(other)


def test_calls_out_of_order_and_unknown_names_are_refused() -> None:
    assert not ASP.is_sparsity_enabled()  # as apex answers of no masks
    for call in (ASP.compute_sparse_masks, ASP.restore_pruned_weights):
        with pytest.raises(MaskError, match=r"before ASP\.init_model_for_pruning"):
            call()
    assert not ASP.already_init_asp_model()
    model = nn.Sequential(nn.Linear(16, 16))
    with pytest.raises(LayerError, match="there is no model"):
        ASP.init_model_for_pruning(3)  # type: ignore[arg-type]
    with pytest.raises(PatternError, match="m4n2_1d"):
        ASP.init_model_for_pruning(model, "m8n4_1d")
    with pytest.raises(LayerError, match="no layer"):
        ASP.init_model_for_pruning(nn.Sequential(nn.Linear(15, 16)))
    ASP.init_model_for_pruning(model, allow_permutation=False)
    with pytest.raises(MaskError, match="hooks"):
        ASP.init_optimizer_for_pruning(object())  # type: ignore[arg-type]
    with pytest.raises(LayerError, match="not written"):
        ASP.set_permutation_saving_params(save_permutation_graph=True)
    ASP.set_permutation_saving_params(allow_permutation=False)


def test_without_an_example_the_order_stays_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    ASP.init_model_for_pruning(model)
    ASP.compute_sparse_masks()
    assert sparse(model) and "stay in their order" in caplog.text
