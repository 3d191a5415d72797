"""Functions between the layers of a training step: torch's numbers, its graph and its errors, by native passes."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from twofour.layers import take_off
from twofour.training import both_ways, fused, sdgp
from twofour.training.fused import functions
from twofour.training.fused.mode import MOST, Fused

WIDTH, HEADS = 32, 4


class Block(nn.Module):
    """A transformer block whose attention and activations are functions."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.act, self.down = nn.Linear(WIDTH, 64), nn.GELU("tanh"), nn.Linear(64, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).movedim(2, 0).transpose(2, 3)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.silu(self.act(self.up(x))))


def model(**options: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(**options), Block(**options), nn.Linear(WIDTH, 8))


def batch() -> torch.Tensor:
    return torch.randn(2, 11, WIDTH, generator=torch.Generator().manual_seed(1))


def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is served from now on, by name."""
    found: list[str] = []
    for kind in (functions.Activation, functions.Attention, functions.Parts):
        forward = kind.forward

        def note(ctx, *args, forward=forward, name=kind.__name__):
            found.append(name)
            return forward(ctx, *args)

        monkeypatch.setattr(kind, "forward", staticmethod(note))
    return found


def gradients(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    net.zero_grad()
    y = net(x)
    y.float().square().mean().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


def assert_near(got: list[torch.Tensor], want: list[torch.Tensor], limit: float) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype is b.dtype and (a.double() - b.double()).norm() <= limit * b.double().norm() + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_has_the_numbers_of_torch(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    found, plain = served(monkeypatch), model()
    ours = copy.deepcopy(plain)
    fused.put_on(ours, "a test", "always", 0.1)
    with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
        want, got = gradients(plain, batch()), gradients(ours, batch())
    assert_near(got, want, 1e-5 if dtype is torch.float32 else 2e-2)
    assert sorted(found) == ["Activation"] * 4 + ["Attention"] * 2 + ["Parts"] * 2
    fused.take_off(ours, "a test")
    assert vars(ours).keys() == vars(plain).keys() and not (ours._forward_hooks or ours._forward_pre_hooks)
    assert not ours._forward_hooks_always_called and len(found) == 8 and gradients(ours, batch()) and len(found) == 8


def operands(queries: int = 7, keys: int = 9) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, n, 3, 16).transpose(1, 2).requires_grad_() for n in (queries, keys, keys)]


def attention_calls() -> dict[str, dict[str, object]]:
    return {
        "plain": {},
        "causal": {"is_causal": True, "scale": 0.2},
        "hidden": {"attn_mask": torch.rand(2, 1, 1, 9) > 0.3},
        "hidden per query": {"attn_mask": torch.rand(7, 9) > 0.3},
        "added": {"attn_mask": torch.randn(1, 3, 7, 9)},
    }


@pytest.mark.parametrize("call", attention_calls())
def test_attention_and_its_second_derivative(call: str) -> None:
    options = attention_calls()[call]
    q, k, v = operands()
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    mask = options.get("attn_mask")
    double = mask.double() if isinstance(mask, torch.Tensor) and mask.dtype is torch.float32 else mask
    with Fused("always", 0.1):
        y = functional.scaled_dot_product_attention(q, k, v, **options)  # pyright: ignore[reportArgumentType]
    assert type(y.grad_fn).__name__ == "AttentionBackward"
    want = functional.scaled_dot_product_attention(*exact, **{**options, "attn_mask": double})  # pyright: ignore
    upstream = torch.randn_like(y)
    first = torch.autograd.grad(y, (q, k, v), upstream, retain_graph=True)
    again = torch.autograd.grad(y, (q, k, v), upstream, retain_graph=True)
    wanted = torch.autograd.grad(want, exact, upstream.double(), retain_graph=True)
    assert_near(list(first), [t.float() for t in wanted], 1e-5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    (one,) = torch.autograd.grad(y, k, upstream, retain_graph=True)
    assert torch.equal(one, first[1])

    def second(y: torch.Tensor, of: list[torch.Tensor], g: torch.Tensor) -> list[torch.Tensor]:
        made = torch.autograd.grad(y, of, g, create_graph=True)
        return list(torch.autograd.grad(torch.cat([t.flatten() for t in made]).square().sum(), of))

    formula = functions.reference(*exact, double, scale=options.get("scale"), causal=call == "causal")  # pyright: ignore
    wanted = second(formula, exact, upstream.double())
    assert_near(second(y, [q, k, v], upstream), [t.float() for t in wanted], 1e-4)


@pytest.mark.parametrize("key_heads", [1, 3])
def test_dropout_follows_from_the_seed_of_torch_and_key_heads_are_shared(key_heads: int) -> None:
    q, k, v = operands()
    k, v = (t.detach()[:, :key_heads].clone().requires_grad_() for t in (k, v))

    def attended(seed: int, dropout: float = 0.3) -> torch.Tensor:
        torch.manual_seed(seed)
        with Fused("always", 0.1):
            return functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, enable_gqa=True)

    y, plain = attended(3), attended(3, 0.0)
    assert type(y.grad_fn).__name__ == type(plain.grad_fn).__name__ == "AttentionBackward"
    assert torch.equal(y, attended(3)) and not torch.equal(y, attended(4))
    mean = torch.stack([attended(seed).detach() for seed in range(400)]).mean(0)
    assert (mean - plain.detach()).norm() < 0.05 * plain.detach().norm()
    torch.manual_seed(3)
    seed = int(torch.randint(1 << 32, ()))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = functions.reference(*exact, dropout=0.3, seed=seed)
    upstream = torch.randn_like(y)
    (one,) = torch.autograd.grad(y, k, upstream, create_graph=True)
    (exact_one,) = torch.autograd.grad(want, exact[1], upstream.double(), create_graph=True)
    wanted = [want, *torch.autograd.grad(want, exact, upstream.double(), retain_graph=True), exact_one]
    wanted += torch.autograd.grad(exact_one.square().sum(), exact)
    found = [y, *torch.autograd.grad(y, (q, k, v), upstream, retain_graph=True), one]
    found += torch.autograd.grad(one.square().sum(), (q, k, v))
    assert_near([t.detach() for t in found], [t.detach().float() for t in wanted], 1e-5)


def test_first_derivatives_of_a_graph_whose_operands_are_one_another() -> None:
    x = torch.randn(2, 3, 5, 8, requires_grad=True)
    found = []
    with Fused("always", 0.1):
        assert type(functional.scaled_dot_product_attention(x, x, x).grad_fn).__name__ == "AttentionBackward"
    for attention in (functional.scaled_dot_product_attention, lambda q, k, v: functions.reference(q, k, v)):
        z = x * 1.0
        for q, k, v in ((z, z, z), (z, z * 2, z.exp()), (x, x, x)):
            with Fused("always", 0.1):
                y = attention(q, k, v)
            made = torch.autograd.grad(y.square().sum(), x, create_graph=True, retain_graph=True)[0]
            found.append([made.detach(), torch.autograd.grad(made.square().sum(), x, retain_graph=True)[0]])
    for got, want in zip(found[:3], found[3:], strict=True):
        assert_near(got, want, 1e-4)


@pytest.mark.parametrize(
    "function", [functional.gelu, lambda z: functional.gelu(z, approximate="tanh"), functional.silu]
)
def test_activations_their_hooks_and_second_derivatives(function) -> None:
    z = torch.randn(5, 33, requires_grad=True)
    seen: list[torch.Tensor] = []
    inner = z * 1.0
    inner.register_hook(seen.append)
    with Fused("always", 0.1):
        y = function(inner)
    assert type(y.grad_fn).__name__ == "ActivationBackward"
    exact = z.detach().double().requires_grad_()
    made = torch.autograd.grad(y.sum(), z, create_graph=True)[0]
    want = torch.autograd.grad(function(exact).sum(), exact, create_graph=True)[0]
    assert_near(
        [y.detach(), made.detach(), seen[0].detach()], [function(exact).detach().float()] + [want.float()] * 2, 1e-5
    )
    found = torch.autograd.grad(made.square().sum(), z)
    wanted = torch.autograd.grad(want.square().sum(), exact)
    assert_near(list(found), [t.float() for t in wanted], 1e-5)
    with Fused("always", 0.1):
        inner = z * 1.0
        y = function(inner)
        y.mul_(2)  # what follows may overwrite the answer, not what the backward pass reads
        inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


CUTS = {
    "unbind": lambda t: t.unflatten(-1, (3, HEADS, -1)).movedim(2, 0).transpose(2, 3).unbind(0),
    "iterated": lambda t: tuple(t.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)),
    "split": lambda t: [p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in t.split(WIDTH, 2)],
    "sections": lambda t: [p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in t.split([WIDTH] * 3, -1)],
    "chunk": lambda t: [p.unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in torch.chunk(t, 3, -1)],
    "per head": lambda t: t.unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(3, -1),
}


@pytest.mark.parametrize("cut", CUTS)
def test_parts_of_one_product_get_one_gradient(monkeypatch: pytest.MonkeyPatch, cut: str) -> None:
    torch.manual_seed(0)
    leaf, seen, found = torch.randn(2, 7, 3 * WIDTH, requires_grad=True), [], served(monkeypatch)
    upstream = torch.randn(2, HEADS, 7, WIDTH // HEADS)

    def run(hook: bool = False) -> torch.Tensor:
        z = leaf * 1.0
        z.register_hook(seen.append)
        q, k, v = CUTS[cut](z)
        if hook:
            k.register_hook(lambda g: g * 2)
        y = functional.scaled_dot_product_attention(q, k, v, scale=0.7)
        return torch.autograd.grad(y, leaf, upstream)[0]

    wants = run(), run(hook=True)
    with Fused("always", 0.1):
        got, hooked = run(), run(hook=True)
    assert_near([got, hooked], list(wants), 1e-5)
    assert found == ["Parts", "Attention"] * 2
    assert seen[2].is_contiguous(), "the layer before is about to copy it"
    with Fused("always", 0.1):  # not all of them are used, and one by something else
        parts = CUTS[cut](leaf * 1.0)
        (one,) = torch.autograd.grad(parts[1].square().sum(), leaf)
    (want,) = torch.autograd.grad(CUTS[cut](leaf * 1.0)[1].square().sum(), leaf)
    assert torch.equal(one, want)


def test_parts_are_views_as_those_of_torch_are() -> None:
    leaf = torch.randn(2, 6, requires_grad=True)
    with Fused("always", 0.1):
        z = leaf * 1.0
        a, b = z.chunk(2, -1)
        assert a.untyped_storage().data_ptr() == z.untyped_storage().data_ptr()
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            a.mul_(2)
        made = torch.autograd.grad((a * b).sum(), leaf, create_graph=True)[0]
        (second,) = torch.autograd.grad(made.square().sum(), leaf)
        torch.testing.assert_close(second, 2 * leaf.detach())
        uneven = z.split([1, 2, 3], 1)
        assert [part.shape[1] for part in uneven] == [1, 2, 3] and [p.shape[1] for p in z.split(4, 1)] == [4, 2]
        with pytest.raises(IndexError, match="Dimension out of range"):
            z.split(2, 5)
        for sections in ([2, 2], [2, 2, 2, 2], [], [-2, -2, -2]):
            with pytest.raises(RuntimeError, match="split"):
                z.split(sections, -1)


def test_what_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = served(monkeypatch)
    q, k, v = operands(9)
    attention = functional.scaled_dot_product_attention
    z = torch.randn(4, 8, requires_grad=True)
    mask = torch.zeros(9, 9, requires_grad=True)
    with (mode := Fused("always", 0.1)):
        attention(q, k, v, dropout_p=1.0)
        attention(q, k, v, mask)
        attention(q.double(), k.double(), v.double())
        attention(q[0], k[0], v[0])
        attention(q.detach(), k.detach(), v.detach())
        with torch.no_grad():
            attention(q, k, v)
        functional.gelu(z.t())
        functional.silu(z * 1, inplace=True)
        functional.gelu(z.double())
        torch.func.grad(lambda t: functional.gelu(t).sum())(z.detach())
        with torch.autograd.graph.save_on_cpu():
            functional.gelu(z)
        with pytest.raises(TypeError):
            functional.gelu(z, wrong=True)  # pyright: ignore[reportCallIssue]
        with pytest.raises(RuntimeError):
            functional.gelu(z, approximate="no")
        assert not found
        functional.gelu(z)
    assert found == ["Activation"] and not mode.choices
    said = mode.functions()
    assert list(said) == ["attention of 3 axes"]
    assert all(why.startswith("torch: the native ") for why in said.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_the_same_anew(reentrant: bool) -> None:
    class Checkpointed(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            for block in self:
                input = checkpoint(block, input, use_reentrant=reentrant)
            return input

    plain = Checkpointed(*model())
    want = gradients(plain, batch())
    fused.put_on(plain, "a test", "always", 0.1)
    assert_near(gradients(plain, batch()), want, 1e-5)


def test_a_forward_pass_that_fails_leaves_no_mode_behind() -> None:
    net = model()
    fused.put_on(net, "a test", "always", 0.1)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            net(torch.randn(2, 3, 5))
    assert torch._C._len_torch_function_stack() == 0  # pyright: ignore[reportPrivateImportUsage]
    net.register_forward_pre_hook(lambda *_: 1 / 0, prepend=True)
    with pytest.raises(ZeroDivisionError):
        net(batch())
    assert torch._C._len_torch_function_stack() == 0  # pyright: ignore[reportPrivateImportUsage]


class Interrupted(nn.Sequential):
    """A model that a user stops."""

    stopped: type[BaseException] | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.stopped is not None:
            raise self.stopped
        return super().forward(input)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_forward_pass_that_is_interrupted_serves_nothing_after_it(
    monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    net, found, depth = Interrupted(*model()), served(monkeypatch), torch._C._len_torch_function_stack  # pyright: ignore
    fused.put_on(net, "a test", "always", 0.1)
    net.stopped = stop
    with pytest.raises(stop):
        net(batch())
    assert depth() == 0
    functional.silu(torch.randn(2, 2, requires_grad=True))
    assert not found
    net.stopped = None
    with Fused("never", 0.1) as other:  # a mode that came after it stays
        net(batch())
        assert depth() == 1 and torch._C._get_function_stack_at(0) is other  # pyright: ignore
    assert len(found) == 8 and depth() == 0
    assert type(net).__qualname__ == "Interrupted" and isinstance(net, Interrupted)
    fused.take_off(net, "a test")
    assert type(net) is Interrupted


def test_what_is_measured_is_in_the_plan_and_in_the_checkpoint() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU("tanh"), nn.Linear(256, 64))
    x = torch.randn(512, 64)
    twin = copy.deepcopy(net)
    handle = both_ways.attach(net, x, seconds=0.01)
    net(x).sum().backward()
    (said,) = handle.plan.functions.values()
    assert said.startswith(("fused (torch ", "torch (torch ")) and "times as" in said and said in str(handle.plan)
    assert list(handle.plan.functions) == ["gelu_tanh 512 x 256, float32"]
    other = both_ways.attach(twin, x, seconds=0.01)
    turned = {call: {**choice, "ours": not choice["ours"]} for call, choice in handle.state_dict()["functions"].items()}
    other.load_state_dict({**handle.state_dict(), "functions": turned})
    twin(x).sum().backward()
    assert list(other.plan.functions.values()) != [said]
    net[1] = nn.Sequential()  # the plan stays what it was
    handle.finish()
    assert list(handle.plan.functions.values()) == [said]
    assert not (net._forward_hooks or net._forward_pre_hooks)


def test_new_shapes_run_as_the_nearest_that_was_measured() -> None:
    with (mode := Fused("measured", 0.001)):
        for rows in (512, 500, 384, 700):
            functional.gelu(torch.randn(rows, 512, requires_grad=True))
        assert list(mode.choices) == ["gelu 512 x 512, float32"]
        for rows in range(1, 2 * MOST):
            functional.gelu(torch.randn(2, 64 * rows, 8 * rows, requires_grad=True) * 1.0)
            functional.silu(torch.randn(512 << rows % 3, 128, requires_grad=True))
        last = torch.randn(3, 256, 8 * rows, requires_grad=True)
        functional.gelu(last)
    gelus = {call: choice for call, choice in mode.choices.items() if call.startswith("gelu")}
    measured = [call for call, choice in gelus.items() if not choice.at]
    assert len(measured) == MOST < len(gelus), "or a batch of each new shape stalls"
    for call, choice in gelus.items():
        near = gelus[choice.at or call]
        assert near.ours == choice.ours and (not choice.at or f"measured at {choice.at}" in mode.functions()[call])
    assert all(not choice.at for call, choice in mode.choices.items() if call.startswith("silu"))


def test_layers_whose_functions_no_mode_sees_are_in_the_plan() -> None:
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True))
    handle = both_ways.attach(net, batch(), kernels="sparse")
    assert "torch off" in handle.plan.functions["1.self_attn"] and "1.self_attn  torch: " in str(handle.plan)
    mode = fused.fused_of(pickle.loads(pickle.dumps(net)))
    assert mode is not None and list(mode.functions()) == ["1.self_attn"]
    handle.finish()
    assert list(handle.plan.functions) == ["1.self_attn"]


@pytest.mark.parametrize("name", ["gelu_new", "gelu_fast", "gelu_accurate", "gelu", "silu"])
def test_activations_of_transformers_take_one_pass(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    act = pytest.importorskip("transformers.activations").ACT2FN[name]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, 64), act, nn.Linear(64, WIDTH))
    twin, kind, found = copy.deepcopy(net), type(net[1]), served(monkeypatch)
    handle = both_ways.attach(net, batch(), kernels="sparse")
    other = both_ways.attach(twin, batch(), kernels="sparse")
    fused.take_off(twin, other.title)
    for activation in other._activations.values():
        take_off(activation)
    for step in (lambda net: net, lambda net: copy.deepcopy(net), lambda net: pickle.loads(pickle.dumps(net))):
        assert_near(gradients(step(net), batch()), gradients(twin, batch()), 1e-5)
    assert found == ["Activation"] * 3
    assert_near([checkpoint(net, batch().requires_grad_(), use_reentrant=False)], [twin(batch())], 1e-5)
    written = name in ("gelu_new", "gelu_fast", "gelu_accurate")
    assert handle.plan.functions == ({"1": "fused (its formula in one pass)"} if written else {})
    copied = copy.deepcopy(net)
    both_ways.finish(copied)
    handle.finish()
    assert type(copied[1]) is type(net[1]) is kind and handle.plan.functions.keys() == ({"1"} if written else set())


def test_copies_serve_and_are_finished() -> None:
    net = model()
    handle = both_ways.attach(net, batch(), kernels="sparse")
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        mode = fused.fused_of(other)
        assert mode is not None and mode is not fused.fused_of(net) and mode.policy == "always"
        assert_near(gradients(other, batch()), gradients(net, batch()), 1e-6)
        both_ways.finish(other)
        assert fused.fused_of(other) is None and not (other._forward_hooks or other._forward_pre_hooks)
    handle.remove()
    assert fused.fused_of(net) is None


@pytest.mark.parametrize("attach", ["both ways", "packed", "SDGP"])
def test_fifty_steps_have_the_losses_of_torch_functions(attach: str) -> None:
    losses = []
    for policy in ("always", "never"):
        net = model()
        if attach == "SDGP":
            handle = sdgp.attach(net, "2:4", mode="magnitude")
        else:
            handle = both_ways.attach(net, batch(), kernels="sparse", state="packed" if attach == "packed" else "dense")
        mode = fused.fused_of(net)
        assert mode is not None and handle.attached
        mode.policy = policy
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3, fused=True)
        x = batch()
        for _ in range(50):
            optimizer.zero_grad()
            loss = functional.mse_loss(net(x), x[..., :8])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    for ours, theirs in zip(losses[:50], losses[50:], strict=True):
        assert abs(ours - theirs) <= 1e-5 * theirs
