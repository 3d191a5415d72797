"""Every rule on tensors inside and at the edge of its domain: the stated error, what stays finite, what it saves."""

import math
from functools import cache

import torch
from torch import Tensor

from tests.graph.algebra.cases import CASES, LINEARS, Case, Of
from tests.turns import in_turn
from twofour.capture import capture
from twofour.graph import ALL_RULES, CLOSE, EXACT, Outcome, Program, rewrite

RULES = {rule.name: rule for rule in ALL_RULES}
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-40, 1.2e-38, 2.0**31, -(2.0**31), 3.5, -1e-20, 1e-6]


def rewritten(model: Of, inputs: list[Tensor], *names: str, kind: str = CLOSE) -> tuple[Program, Outcome]:
    """Rewrite a model by the named rules, all without."""
    graph = capture(model, dict(zip("abc", inputs, strict=False)), dynamic=False)
    outcome = rewrite(graph.module, [RULES[name] for name in names] or ALL_RULES, kind=kind)
    return Program(graph.module), outcome


@cache
def alone(name: str) -> tuple[Of, Program, Outcome]:
    """Return the model of a case, and what the rule alone made of it: captured once for all that call it."""
    case = CASES[name]
    model = case.model()
    return model, *rewritten(model, case.values(), name, "computed twice")


def edges(case: Case) -> list[Tensor]:
    """Return inputs of zeros of both signs, denormals, and what is as large as an exact rule allows."""
    values = case.values()
    if not case.dtype.is_floating_point:
        return values
    chosen = [torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), value.shape)] for value in values]
    return [edge.to(case.dtype) for edge in chosen]


def test_every_rule_has_a_case_and_a_name_of_its_own() -> None:
    assert set(CASES) == set(RULES)
    assert len(RULES) == len(ALL_RULES)
    for rule in ALL_RULES:
        assert rule.kind in (EXACT, CLOSE) and rule.domain and rule.bound and rule.saves, rule.name


@in_turn("name", CASES)
def test_a_rule_keeps_its_error_and_saves_something(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    model, program, outcome = alone(name)
    inputs = case.values()
    assert outcome.counts.get(name), "the rule was not used"
    saved = next(entry.saved for entry in outcome.done if entry.rule == name)
    assert saved.seconds > 0 and (saved.flops > 0 or saved.traffic > 0 or saved.calls > 0)
    found = program(*inputs)[0]
    if case.bitwise:
        torch.testing.assert_close(found, model(*inputs), rtol=0, atol=0, equal_nan=True)
        return
    wide = [x.double() for x in (*inputs, *(w.detach() for w in model.held))]
    want, error = case.function(*wide), case.error(*wide)
    known = want.isfinite()
    distance = (found.double() - want).abs()
    # The test's own functions around the rule's, as a sine, round once more.
    assert bool((distance <= error + 4 * 2.0**-24 * want.abs() + 1e-38)[known].all()), distance.max()


@in_turn("name", [name for name in CASES if RULES[name].kind == EXACT])
def test_an_exact_rule_makes_nothing_overflow_and_loses_no_nan(name: str) -> None:
    torch.manual_seed(1)
    case = CASES[name]
    model, program, outcome = alone(name)
    assert outcome.counts.get(name)
    for _ in range(5):
        inputs = edges(case)
        want, found = model(*inputs), program(*inputs)[0]
        if case.bitwise:
            torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(found.signbit(), want.signbit())
        assert bool(found.isfinite()[want.isfinite()].all()), "a number overflows"
    if not case.dtype.is_floating_point:
        return
    for strange in (math.nan, math.inf, -math.inf):
        for index in range(len(case.inputs)):
            inputs = case.values()
            inputs[index].flatten()[0] = strange
            want, found = model(*inputs), program(*inputs)[0]
            assert not bool(found.isfinite()[~want.isfinite()].any()), f"{strange} is lost"
            assert bool(found.isfinite()[want.isfinite()].all()), f"{strange} spreads"


@in_turn("name", CASES)
def test_a_value_that_others_read_is_still_there(name: str) -> None:
    """Every input of the replaced node is given back too: nothing may be written over it or vanish."""
    torch.manual_seed(2)
    case = CASES[name]
    model, inputs = case.model(), case.values()
    before = [x.clone() for x in inputs]
    model.function = lambda *args: (case.function(*args), args[0].cos(), case.function(*args))
    program, _ = rewritten(model, inputs)
    found, want = program(*inputs), model(*inputs)
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert len({tensor.data_ptr() for tensor in (*found, *inputs)}) == len(found) + len(inputs), "memory is shared"
    for one, other in zip(inputs, before, strict=True):
        assert torch.equal(one, other)


@in_turn("name", LINEARS)
def test_sealed_weights_are_not_merged(name: str) -> None:
    case = CASES[name]
    model, inputs = case.model(), case.values()
    graph = capture(model, dict(zip("abc", inputs, strict=False)), dynamic=False)
    for node in graph.module.graph.nodes:
        if node.op == "get_attr":
            node.meta["sealed"] = "it is 2:4"
        if node.op == "call_function" and len(node.args) > 2 and "linear" in str(node.target):
            node.args[1].meta["bias"] = node.args[2]
    outcome = rewrite(graph.module, [RULES[name]])
    merges = name != "one linear layer of two inputs added"
    assert bool(outcome.counts) is not merges
    assert [line.endswith("it is 2:4") for line in outcome.not_done] == [True] * merges
    torch.testing.assert_close(Program(graph.module)(*inputs)[0], model(*inputs), rtol=1e-5, atol=1e-5)


@in_turn("name", LINEARS)
def test_sparse_weights_take_numbers_along_an_axis_alone(name: str) -> None:
    case = CASES[name]
    model, inputs = case.model(), case.values()
    graph = capture(model, dict(zip("abc", inputs, strict=False)), dynamic=False)
    for node in graph.module.graph.nodes:
        if node.op == "get_attr" and node.meta["val"].ndim == 2:
            node.meta |= {"sealed": "it is 2:4", "scalable": True}
    scales = name in (
        "number into a weight",
        "number of the input into a weight",
        "vector into a weight",
        "vector of the input into a weight",
    )
    outcome = rewrite(graph.module, [RULES[name]])
    assert bool(outcome.counts) is scales or name == "one linear layer of two inputs added"
    torch.testing.assert_close(Program(graph.module)(*inputs)[0], model(*inputs), rtol=1e-5, atol=1e-5)
    merged = [node for node in graph.module.graph.nodes if ".merged.weight" in str(node.meta.get("weight"))]
    assert [node.meta["sealed"] for node in merged] == ["it is 2:4"] * scales, "what was scaled is sealed too"


@in_turn("name", LINEARS)
def test_without_copies_no_weight_is_merged(name: str) -> None:
    case = CASES[name]
    graph = capture(case.model(), dict(zip("abc", case.values(), strict=False)), dynamic=False)
    outcome = rewrite(graph.module, [RULES[name]], merge=False)
    assert not any(entry.merges for entry in outcome.done)
