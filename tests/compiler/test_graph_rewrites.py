"""A rule that raises costs the rule: the graph runs without it, and the plan says which one and why."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import twofour
from tests.compiler.small import quick
from tests.graph.small import Encoder
from twofour.capture import capture
from twofour.compiler import graph_rewrites
from twofour.compiler.normed import NORMED
from twofour.graph import ALL_RULES, Rule, arrange, fuse, rewrite, rules, simplify
from twofour.graph.algebra import rewriter
from twofour.graph.base import FailedRuleError

pytestmark = pytest.mark.usefixtures("no_measuring")

REASON = "ValueError: a model never seen"

EXAMPLE = torch.randint(0, 50, (2, 9)), torch.ones(2, 9)


def fails_half_way(rule: Rule) -> Rule:
    """The rule, which leaves a graph that computes something else before it raises."""

    def rewrite(module: fx.GraphModule) -> int:
        for node in list(module.graph.nodes):
            if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor):
                node.replace_all_uses_with(next(iter(module.graph.nodes)))
        raise ValueError("a model\n never seen")

    return replace(rule, rewrite=rewrite)


def left_out(caplog: pytest.LogCaptureFixture, *names: str) -> nn.Module:
    """Compile a model as a graph, whose plan names the rules that failed."""
    torch.manual_seed(0)
    model = twofour.prune(Encoder(layers=1).eval(), "2:4")
    with caplog.at_level(logging.WARNING, "twofour.compiler"):
        fast = quick(model, EXAMPLE, graph=True)
    account = fast.plan.account
    assert account.engine == "graph", account.reason
    assert account.left_out == dict.fromkeys(names, REASON) == fast.plan.to_dict()["account"]["left_out"]
    assert not set(names) & set(account.rewrites)
    for name in names:
        assert f"left out: {name} raised {REASON}, please report it" in str(fast.plan) and f"`{name}`" in caplog.text
    with torch.inference_mode():
        torch.testing.assert_close(fast(*EXAMPLE), model(*EXAMPLE), atol=2e-5, rtol=2e-5)
    return fast


def test_two_rules_fail(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    broken = [fails_half_way(rule) if rule in (rules.ACTIVATIONS, rules.NORMS) else rule for rule in rules.FUSIONS]
    monkeypatch.setattr(rules, "FUSIONS", broken)
    fast = left_out(caplog, rules.ACTIVATIONS.name, rules.NORMS.name)
    assert fast.plan.account.rewrites["attention fused"] == 1, "the others are made"


def raising(*_: Any, **__: Any) -> Any:
    raise ValueError("a model never seen")


def test_a_step_that_is_no_list_of_rules(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(graph_rewrites, "norms_into_products", raising)
    left_out(caplog, NORMED)


def test_a_rule_of_algebra(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    looks = next(rule for rule in ALL_RULES if rule.find is not None)
    broken = [replace(rule, find=raising) if rule is looks else rule for rule in ALL_RULES]
    monkeypatch.setattr("twofour.compiler.graph_algebra.ALL_RULES", broken)
    left_out(caplog, looks.name)


def test_a_replacement_of_algebra_that_fails_names_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    class TimesOne(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.exp(x) * 1.0

    module = capture(TimesOne(), {"x": torch.randn(3, 64)}).module
    monkeypatch.setattr(rewriter._Search, "applied", raising)
    with pytest.raises(FailedRuleError, match="ValueError: a model never seen"):
        rewrite(module)


@pytest.mark.parametrize("apply", [simplify, fuse, arrange])
def test_rules_are_left_out_by_name(apply: Callable[..., dict[str, int]]) -> None:
    module = capture(nn.Sequential(nn.Linear(8, 8)), {"input": torch.randn(3, 8)}).module
    first, *others = apply(module)
    assert set(apply(module, without=[first])) == set(others)
