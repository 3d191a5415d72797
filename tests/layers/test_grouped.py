"""Layers that are alike stand on one line, and every name is on exactly one."""

import itertools
import random
import re
from dataclasses import replace

from twofour.compiler import LayerPlan, Plan
from twofour.compiler.advice import Advice, AdviceRow
from twofour.compiler.graph_report import GraphReport, OperatorTime
from twofour.layers.grouped import grouped, one_text, without_numbers

SPARSE, DENSE = "nm_matmul_2x4_f32_rows__scalar", "dense_matmul_f32_linear__torch"


def patterns(names: list[str]) -> list[tuple[str, str]]:
    return [(group.pattern, group.count) for group in grouped(names, [""] * len(names))]


def expanded(pattern: str) -> list[str]:
    """Write out every name that a pattern stands for."""

    def values(part: str) -> list[str]:
        found = []
        for value in part.strip("{}").split(","):
            run = re.fullmatch(r"(\d+)-(\d+)", value)
            found += [str(number) for number in range(int(run[1]), int(run[2]) + 1)] if run else [value]
        return found

    return [".".join(parts) for parts in itertools.product(*(values(part) for part in pattern.split(".")))]


def test_names_that_differ_in_numbers_and_parts_become_one_pattern() -> None:
    names = [f"encoder.layer.{i}.attention.{part}" for i in range(6) for part in ("query", "key", "value")]
    assert patterns(names) == [("encoder.layer.{0-5}.attention.{query,key,value}", "x18")]
    assert patterns(["0", "2", "3", "4", "head"]) == [("{0,2-4,head}", "x5")]
    assert patterns(["a.0", "b"]) == [("a.0", ""), ("b", "")]
    assert patterns(["a.9", "a.10", "a.01"]) == [("a.{9,10,01}", "x3")]


def test_a_missing_layer_is_in_no_pattern() -> None:
    names = [f"layer.{i}.{part}" for i in range(4) for part in ("q", "k")]
    names.remove("layer.2.q")
    assert patterns(names) == [("layer.{0,1,3}.q", "x3"), ("layer.{0-3}.k", "x4")]


def test_each_name_is_in_one_pattern_of_its_key_and_no_other_name_is() -> None:
    chance = random.Random(0)
    for _ in range(200):
        every = [f"m.{i}.{part}.{j}" for i in range(4) for part in "abc" for j in range(3)] + ["x", "y.1"]
        names = chance.sample(every, chance.randint(1, len(every)))
        keys = [chance.randint(0, 1) for _ in names]
        groups = grouped(names, keys)
        assert sorted(index for group in groups for index in group.members) == list(range(len(names)))
        for group in groups:
            assert {keys[index] for index in group.members} == {keys[group.members[0]]}
            assert sorted(expanded(group.pattern)) == sorted(names[index] for index in group.members)


def test_reasons_differ_in_the_numbers_of_the_layers_they_name_alone() -> None:
    texts = [f"sparse at 2 tokens; a part of `layer.{i}.(q + k)`" for i in range(3)]
    assert len({without_numbers(text) for text in texts}) == 1
    assert one_text(texts) == "sparse at 2 tokens; a part of `layer.{0-2}.(q + k)`"
    assert without_numbers("at 2 tokens") != without_numbers("at 3 tokens")


def entry(
    name: str, reason: str = "sparse is faster", sparse_ms: float | None = 1.0, kernel: str = SPARSE
) -> LayerPlan:
    return LayerPlan(name, "Linear", (8, 16), 4, kernel, "", 2.0, sparse_ms, reason, 512, 272, 272)


def test_a_plan_prints_a_row_per_kind_of_layer_and_keeps_all_of_them() -> None:
    layers = [entry(f"layer.{i}.{part}", sparse_ms=1.0 + i / 10) for i in range(6) for part in ("q", "k")]
    layers += [entry("head", "dense: not 2:4", None, DENSE), entry("tail", "dense: skipped", None, "torch")]
    plan = Plan(tuple(layers), "float32", "fast", (), 1, "avx2")
    head, *rows = str(plan).splitlines()
    assert head.split() == ["layer", "count", "shape", "tokens", "kernel", "dense", "ms", "sparse", "ms", "why"]
    assert rows[0].split() == [
        "layer.{0-5}.{q,k}",
        "x12",
        "8x16",
        "4",
        SPARSE,
        "2.0000",
        "1.0000-1.5000",
        "sparse",
        "is",
        "faster",
    ]
    assert rows[1].endswith("dense: not 2:4") and rows[2].endswith("dense: skipped")
    assert rows[3].startswith("12 of 14 layers run sparse")
    listed = plan.to_dict()["layers"]
    assert isinstance(listed, list) and len(listed) == len(plan.layers) == 14


def test_advice_prints_a_row_per_kind_of_layer_and_token_count() -> None:
    rows = [
        AdviceRow(f"layer.{i}", (8, 16), tokens, 2.0, 1.0 + tokens, SPARSE, f"verdict {tokens}")
        for i in range(3)
        for tokens in (1, 8)
    ]
    skipped = tuple((f"norm.{i}.weight", "no Linear") for i in range(3))
    advice = Advice(tuple(rows), skipped, (1, 8), 1, "avx2")
    lines = str(advice).splitlines()
    assert [line.split()[:4] for line in lines[1:3]] == [["layer.{0-2}", "x3", "8x16", n] for n in ("1", "8")]
    assert (
        lines[3].startswith("1 token: these layers take 6.000 ms dense")
        and lines[-1] == "dense: norm.{0-2}.weight x3: no Linear"
    )
    assert len(advice.rows) == 6


def test_a_layer_counts_as_sparse_where_the_product_that_holds_it_is() -> None:
    product = replace(entry("(q + k)", kernel=DENSE), kind="product", parts=("q", "k"))
    plan = Plan((entry("q"), entry("k"), entry("v"), product), "float32", "fast", (), 1, "avx2")
    assert "1 of 3 layers run sparse" in str(plan)


def test_an_account_says_which_rewrites_do_not_run() -> None:
    account = GraphReport("graph", "faster", {}, {"joined": 2}, (), (OperatorTime("linear", 1, 1.0),))
    assert account.lines()[1:] == [
        "rewrites: joined 2",
        "after: 1.000 ms = linear 1.000 ms (1), each operator timed by itself",
    ]
    raced = replace(account, engine_ms={"layers": 3.0, "graph": 2.0})
    assert raced.lines()[0].endswith("; layers 3.000 ms, graph 2.000 ms")
    assert raced.lines(timed=False)[0].endswith("; layer by layer takes 1.50x its time"), "one time of one thing"
    idle = replace(account, engine="layers").lines()[1:]
    assert [line.partition(":")[0] for line in idle] == [
        f"{name} (of the graph, which does not run)" for name in ("rewrites", "after")
    ]
