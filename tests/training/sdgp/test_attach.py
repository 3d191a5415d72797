"""Whole models: which layers, what stays, what it works together with, and how good the gradients are."""

import copy
import faulthandler
import os
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import twofour
from twofour.errors import LayerError, TrainingError
from twofour.layers import CARRIED
from twofour.training import both_ways, sdgp


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def grads(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def batch() -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def test_attach_and_remove_leave_the_model_as_it_was() -> None:
    model, x = network(), batch()
    before = copy.deepcopy(model.state_dict())
    exact, y, classes = grads(model, x), model(x), [type(m) for m in model]
    parameters = list(model.parameters())
    handle = sdgp.attach(model, "2:4", mode="magnitude")
    assert handle.layers == ("2", "6", "8")
    assert handle.skipped == {"0": "3 inputs"}
    assert "2:4, magnitude: 3 layers" in str(handle) and "0: exact, 3 inputs" in str(handle)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before.values(), strict=True))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert isinstance(model[2], nn.Conv2d) and isinstance(model[6], nn.Linear)
    assert torch.equal(model(x), y)
    pruned = grads(model, x)
    torch.testing.assert_close(pruned[-2:], exact[-2:])  # the last layer's own gradients
    assert not torch.allclose(pruned[0], exact[0], rtol=1e-2)
    assert handle.remove() is model
    assert [type(m) for m in model] == classes
    assert all(torch.equal(a, b) for a, b in zip(grads(model, x), exact, strict=True))
    with pytest.raises(TrainingError, match=r"pruned gradients \(SDGP\) is over"):
        handle.remove()


def test_an_activation_in_place_may_follow() -> None:
    def run(in_place: bool) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=in_place), nn.Linear(16, 8))
        sdgp.attach(model, product="dense")
        x = torch.randn(3, 5, 8, requires_grad=True)
        model(x).square().sum().backward()
        return x.grad  # type: ignore[return-value]

    assert torch.equal(run(True), run(False))


def test_layers_that_stay_exact_have_a_reason() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Plain(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "own": Own(8, 8),
            "plain": Plain(8, 8),
            "small": nn.Linear(8, 3),
            "few": nn.Linear(3, 8),
            "depthwise": nn.Conv2d(8, 8, 3, groups=8),
            "conv3d": nn.Conv3d(8, 8, 3),
            "attention": nn.MultiheadAttention(8, 2),
            "named": nn.Linear(8, 8),
        }
    )
    handle = sdgp.attach(model, "2:4", skip=["nam*"])
    assert handle.layers == ("plain",)
    assert isinstance(model["plain"], Plain)
    assert handle.skipped == {
        "own": "Own has a forward of its own",
        "small": "3 output channels: no whole group of 4",
        "few": "3 inputs",
        "depthwise": "1 output channels per group: no whole group of 4",
        "conv3d": "conv3d: no Linear, Conv1d or Conv2d",
        "attention": "attention_in: no Linear, Conv1d or Conv2d",
        "attention.out_proj": "attention reads its weight without calling it",
        "named": "named in `skip`",
    }
    handle.remove()
    assert type(model["plain"]) is Plain


def test_refusals() -> None:
    with pytest.raises(LayerError, match="`skip` matches no layer"):
        sdgp.attach(network(), skip="head")
    with pytest.raises(TrainingError, match=r"no layer can have its gradient pruned[\s\S]*2 inputs"):
        sdgp.attach(nn.Sequential(nn.Linear(2, 8)))
    model = network()
    handle = sdgp.attach(model)
    with pytest.raises(TrainingError, match="SDGP is attached already") as error:
        sdgp.attach(model)
    assert error.value.layer == "2"
    with pytest.raises(TrainingError, match="of other layers"):
        handle.load_state_dict({"2": 0})


def test_a_parametrisation_on_top_goes_first() -> None:
    model = network()
    handle = sdgp.attach(model, "2:4")
    parametrize.register_parametrization(model[6], "weight", nn.Identity())
    grads(model, batch())
    with pytest.raises(TrainingError, match="cannot get its own class back"):
        handle.remove()
    parametrize.remove_parametrizations(model[6], "weight")
    handle.remove()
    assert type(model[6]) is nn.Linear


def test_another_class_over_an_activation_goes_first() -> None:
    model = network()
    classes = [type(module) for module in model]
    handle = sdgp.attach(model)
    ours = type(model[1])
    model[1].__class__ = type("Over", (ours,), {"__module__": "elsewhere"})
    with pytest.raises(TrainingError, match=r"cannot get its own class back[\s\S]*Over"):
        handle.remove()
    assert (
        handle.attached and isinstance(model[6], nn.Linear) and type(model[6]) is not nn.Linear
    )  # nothing was taken off
    grads(model, batch())
    model[1].__class__ = ours
    handle.remove()
    assert [type(module) for module in model] == classes


def test_a_scheme_underneath_and_masks_go_together_with_it() -> None:
    model = network()
    scheme = twofour.training.sr_ste.attach(model, "2:4", eligibility="any")
    handle = sdgp.attach(model, "2:4")
    assert handle.layers == ("2", "6", "8")
    grads(model, batch())
    handle.remove()
    scheme.finish()
    handle = sdgp.attach(model, "2:4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        grads(model, batch())
        optimizer.step()
    assert twofour.check(model).ok
    assert len(twofour.masks.of(handle.remove())) > 0


@pytest.mark.parametrize("mode", ["random", "unbiased"])
def test_the_same_seed_draws_the_same(mode: str) -> None:
    def run(seed: int, steps: int = 2) -> list[Tensor]:
        model = network()
        sdgp.attach(model, "2:4", mode=mode, seed=seed)
        return [g for _ in range(steps) for g in grads(model, batch())]

    one, same, other = run(5), run(5), run(6)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0])
    count = len(one) // 2
    assert not torch.equal(one[0], one[count])  # each step draws anew


def test_a_resumed_run_goes_on_with_the_same_draws() -> None:
    model, other = network(), network()
    handle, resumed = (sdgp.attach(m, "2:4", mode="random") for m in (model, other))
    grads(model, batch())
    resumed.load_state_dict(handle.state_dict())
    assert handle.state_dict()["draws"] == {"2": 1, "6": 1, "8": 1}
    assert torch.equal(grads(model, batch())[0], grads(other, batch())[0])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"pattern": "1:4"}, r"\{'pattern': '2:4'\}\n  wanted +\{'pattern': '1:4'\}"),
        ({"mode": "magnitude"}, "'mode': 'unbiased'"),
        ({"seed": 4}, r"\{'seed': 3\}\n  wanted +\{'seed': 4\}"),
    ],
)
def test_a_state_of_other_arguments_is_refused(other: dict[str, object], said: str) -> None:
    options = {"mode": "unbiased", "seed": 3}
    handle = sdgp.attach(first := network(), **options)
    grads(first, batch())
    state, resumed = handle.state_dict(), sdgp.attach(network(), **{**options, **other})
    with pytest.raises(TrainingError, match=f"other arguments(?s:.*){said}"):
        resumed.load_state_dict(state)
    assert not any(resumed.state_dict()["draws"].values()), "nothing of it was taken"
    with pytest.raises(TrainingError, match=r"other arguments\n  got +None"):
        resumed.load_state_dict({**state, "arguments": None})
    resumed.load_state_dict(state["draws"])  # as older states were
    with pytest.raises(TrainingError, match=r"other layers\n  got +draws"):
        resumed.load_state_dict({**state, "draws": dict.fromkeys(state["draws"], "1")})


def test_eps_and_seed_count_where_they_are_used() -> None:
    state = sdgp.attach(network(), mode="rescaled", seed=1).state_dict()
    sdgp.attach(network(), mode="rescaled", seed=2).load_state_dict(state)
    with pytest.raises(TrainingError, match="'eps'"):
        sdgp.attach(network(), mode="rescaled", eps=0.5).load_state_dict(state)


def test_weights_that_are_sparse_both_ways_are_named_or_skipped() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 12))
    ways = both_ways.attach(model, torch.randn(8, 16), kernels="sparse")
    with pytest.raises(TrainingError, match=r"`0`: 2:4 both ways is attached already(?s:.*)`skip`"):
        sdgp.attach(model, "2:4")
    assert not model[2].__dict__.get(CARRIED), "the layer that is left is as it was"
    handle = sdgp.attach(model, "2:4", skip="0")
    assert handle.layers == ("2",) and handle.skipped == {"0": "named in `skip`"}
    handle.remove()
    ways.remove()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", ["rescaled", "random"])
def test_activation_checkpointing_changes_nothing(reentrant: bool, mode: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner[3:](checkpoint(self.inner[1:3], self.inner[0](x), use_reentrant=reentrant))

    plain, recomputed = network(), Checkpointed()
    for model in (plain, recomputed):
        sdgp.attach(model, "2:4", mode=mode)
    for _ in range(2):
        for a, b in zip(grads(plain, batch()), grads(recomputed, batch()), strict=True):
            assert torch.equal(a, b)


def test_gradients_accumulate() -> None:
    model = network()
    sdgp.attach(model, "2:4", mode="magnitude")
    x = batch()
    one, two = grads(model, x[:2]), grads(model, x[2:])
    model.zero_grad()
    for half in (x[:2], x[2:]):
        model(half).square().mean().backward()
    for p, a, b in zip(model.parameters(), one, two, strict=True):
        torch.testing.assert_close(p.grad, a + b)


def test_autocast_casts_as_the_dense_model_does() -> None:
    model, x = network(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        exact = model(x)
    sdgp.attach(model, "4:4")
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    assert y.dtype is torch.bfloat16 and torch.equal(y, exact)
    y.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # Dynamo's own
@pytest.mark.parametrize(("mode", "product"), [("rescaled", "auto"), ("random", "sparse")])
def test_torch_compile(mode: str, product: str) -> None:
    torch._dynamo.reset()
    eager, compiled = network(), network()
    for model in (eager, compiled):
        sdgp.attach(model, "2:4", mode=mode, product=product)
    fast = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for _ in range(2):  # the draws are counted in the compiled graph too
        want, x = grads(eager, batch()), batch()
        compiled.zero_grad()
        fast(x).square().mean().backward()
        for p, exact in zip(compiled.parameters(), want, strict=True):
            torch.testing.assert_close(p.grad, exact, rtol=1e-4, atol=1e-6)


def averaged(rank: int, processes: int, folder: str) -> list[torch.Tensor | None]:
    """Gradients of this process's two samples, averaged over so many processes."""
    # A file, no port: a process that asks for a port of its own machine before the other listens can reach itself.
    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=processes, timeout=timedelta(seconds=60)
    )
    try:
        model = network()
        sdgp.attach(model, "2:4", mode="random", seed=3)
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel(batch()[2 * rank : 2 * rank + 2]).square().mean().backward()
        found = [p.grad for p in model.parameters()]
        torch.distributed.barrier()
        # A reducer that outlives the group destroys it with the interpreter's lock held, and the group's thread waits
        # for that lock: one worker of about 200 hung.
        del parallel
    finally:
        torch.distributed.destroy_process_group()
    return found


def test_a_distributed_model_of_one_process_computes_as_alone(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of one averages nothing: that wrapping changes no gradient. The long test below averages over two."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    model = network()
    sdgp.attach(model, "2:4", mode="random", seed=3)
    for got, want in zip(averaged(0, 1, str(tmp_path)), grads(model, batch()[:2]), strict=True):
        torch.testing.assert_close(got, want)


def _worker(rank: int, folder: str, path: str) -> None:
    faulthandler.dump_traceback_later(240, exit=True)  # a process that hangs says where, before the test's own limit
    torch.set_num_threads(1)
    found = averaged(rank, 2, folder)
    if rank == 0:
        torch.save(found, path)


@pytest.mark.long
def test_two_processes_average_what_each_computes(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    path = tmp_path / "gradients.pt"
    torch.multiprocessing.spawn(_worker, (str(tmp_path), str(path)), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    halves = []
    for rank in range(2):  # every process draws the same, on its own samples
        model = network()
        sdgp.attach(model, "2:4", mode="random", seed=3)
        halves.append(grads(model, batch()[2 * rank : 2 * rank + 2]))
    for got, a, b in zip(torch.load(path), *halves, strict=True):
        torch.testing.assert_close(got, (a + b) / 2)


@pytest.mark.parametrize(
    ("mode", "size", "cosine"),
    [("magnitude", (0.4, 0.95), 0.6), ("rescaled", (0.9, 2.0), 0.6), ("random", (0.0, 0.15), -1)],
)
def test_the_first_layers_gradient_after_seven_pruned_layers(mode: str, size: tuple[float, float], cosine: float):
    """The rescaling changes the size, hardly the direction; every random layer halves it. An untrained network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU())
    for _ in range(7):
        model.extend([nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()])
    for layer in list(model)[::2]:
        nn.init.kaiming_normal_(layer.weight)  # pyright: ignore[reportArgumentType]
    model.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)])
    x, target = torch.randn(16, 3, 16, 16), torch.randint(0, 10, (16,))

    def first() -> Tensor:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        return model[0].weight.grad.flatten().clone()  # type: ignore[union-attr]

    exact = first()
    handle = sdgp.attach(model, "2:4", mode=mode, skip=str(len(model) - 1))
    assert len(handle.layers) == 7
    got = first()
    ratio = (got.norm() / exact.norm()).item()
    assert size[0] <= ratio <= size[1]
    assert torch.cosine_similarity(got, exact, 0) >= cosine
