"""The report's page: what it shows of each kind of run, and that nothing in a run is taken for markup."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import twofour
from tests.report.runs import HOSTILE, layer, optimized, record, trained
from twofour import measure, report
from twofour.errors import ReportError
from twofour.report.markup import Markup, escaped, tag

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records" / "demo-digits-intel-xeon-processor-6-167-1.json"


class Parsed(HTMLParser):
    """Elements with their attributes, and all text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def headings(self) -> list[str]:
        return [attrs["id"] or "" for name, attrs in self.elements if name == "section"]


def parsed(path: Path) -> Parsed:
    page = report.to_html(report.read(path))
    found = Parsed(page)
    assert not found.open, "an element is not closed"
    return found


def test_hostile_names_stay_text_and_the_page_asks_for_nothing(tmp_path: Path) -> None:
    written = report.write(report.read(optimized(tmp_path / "run", HOSTILE)), tmp_path / "report.html")
    page = written.read_text(encoding="utf-8")  # a lone surrogate has no bytes
    found = Parsed(page)
    names = [name for name, _ in found.elements]
    assert (
        names.count("script") == 1 and names.count("style") == 1 and not {"img", "iframe", "b", "i", "u"} & set(names)
    )
    attributes = [(key, value) for _, attrs in found.elements for key, value in attrs.items()]
    assert not [key for key, _ in attributes if key.startswith("on") or key in ("style", "src")]
    assert {value for key, value in attributes if key == "href" and not str(value).startswith("#")} == {"data:,"}
    text = "".join(found.texts)
    for name in HOSTILE[:5]:
        assert name in text
    assert "a\\u202eb\\u200bc\\u0000d\\u001be\\ud800f" in text


def test_the_policy_lets_only_the_pages_own_style_and_script_run(tmp_path: Path) -> None:
    page = report.to_html(report.read(optimized(tmp_path)))
    (policy,) = [a["content"] or "" for _, a in Parsed(page).elements if a.get("http-equiv")]
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "http" not in policy
    for name in ("style", "script"):
        (inside,) = re.findall(f"<{name}>(.*?)</{name}>", page, re.S)
        assert f"{name}-src 'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'" in policy


def test_a_run_of_optimize_has_every_part_but_training(tmp_path: Path) -> None:
    found = parsed(optimized(tmp_path))
    assert found.headings() == ["quality", "time", "size", "tried", "layers", "masks", "load", "machine"]
    text = " ".join(found.texts)
    for words in ("98.40 ± 0.50 %", "2 of 3 layers run sparse", "2.00 ms", "2.20 MB", "3 of 3 masks are kept"):
        assert words in text
    assert "2026-01-01 00:00 UTC" in text
    heads = [attrs for name, attrs in found.elements if name == "th"]
    assert heads and all(attrs["aria-sort"] == "none" and attrs["scope"] == "col" for attrs in heads)
    charts = [attrs for name, attrs in found.elements if name == "svg" and attrs.get("class") == "chart"]
    assert charts and all(attrs["role"] == "img" and attrs["aria-label"] for attrs in charts)


def test_what_a_run_lacks_is_left_out(tmp_path: Path) -> None:
    measure.save([record("optimize")], tmp_path / "results.json")
    assert parsed(tmp_path).headings() == ["time", "machine"]
    (tmp_path / "training.json").write_text(json.dumps(trained() | {"control": None}))
    assert parsed(tmp_path / "training.json").headings() == ["quality", "training"]


def test_a_layer_runs_as_the_product_that_holds_it(tmp_path: Path) -> None:
    optimized(tmp_path)
    layers = [layer("(q + k)", kind="product", parts=["q", "k"]), layer("q", sparse=False), layer("k", sparse=False)]
    measure.write_json(tmp_path / "plan.json", {"layers": layers})
    assert "2 of 2 layers run sparse" in " ".join(parsed(tmp_path).texts)


def test_training_is_drawn_beside_its_control(tmp_path: Path) -> None:
    file = tmp_path / "training.json"
    file.write_text(json.dumps(trained()))
    run = report.read(file)
    assert [curve.title for curve in run.curves] == ["Loss of training", "Evaluation", "Learning rate"]
    assert run.curves[0].lines["sparse"] == pytest.approx((1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5))
    assert [score.value for score in run.quality[0].scores] == pytest.approx([0.5, 0.85, 0.5, 0.85])
    lines = [attrs for name, attrs in parsed(file).elements if name == "polyline"]
    assert len(lines) == 6 and (lines[0]["points"] or "").startswith("0.000,0.000 25.000,")


@pytest.mark.parametrize("kept, after", [(0, 0.5), (2, 0.82), (5, 0.85), (None, 0.85)])
def test_what_a_training_came_to_is_the_state_that_it_kept(tmp_path: Path, kept: int | None, after: float) -> None:
    content = trained()
    content["sparse"]["kept"] = kept
    (file := tmp_path / "training.json").write_text(json.dumps(content))
    assert report.read(file).quality[0].scores[-1].value == pytest.approx(after)
    content["sparse"]["instead"] = {"held": 0.1, "evaluation": 0.9}
    file.write_text(json.dumps(content))
    scores = report.read(file).quality[0].scores
    assert [score.name for score in scores[-2:]] == ["sparse, after", "pruned control, which stands"]
    assert [score.value for score in scores[-2:]] == pytest.approx([after, 0.9])
    content["sparse"] |= {"kept": 6, "instead": None}
    file.write_text(json.dumps(content))
    with pytest.raises(ReportError, match="the state after epoch 6 of 5"):
        report.read(file)


def test_what_prune_and_check_leave_is_a_page_of_its_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = twofour.prune(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 10)), "2:4", criterion="magnitude")
    content = {"source": "net:build", **twofour.check(model).to_dict(), "files": ["report.json"]}
    (tmp_path / "report.json").write_text(json.dumps(content))
    run = report.read(tmp_path)
    assert run.title == "Pruned: net:build" and run.verdict.startswith("1 of 1 promised weights kept; ")
    assert [(w.name, w.pattern, w.zeros, w.kept, w.verdict) for w in run.weights] == [
        ("0.weight", "2:4", 0.5, True, "2:4 kept")
    ]
    assert len(run.notes) == 1 and run.notes[0].startswith("1.weight stays dense: out_features 10")
    assert "1.weight stays dense" in " ".join(parsed(tmp_path).texts)
    content |= {"skipped": [{"name": str(n), "reason": "small"} for n in range(42)], "ok": False}
    content |= {"streamed": True, "layers": [{"name": "w", "promised": "1:4", "zeros": 0.75, "kept": 0.5}]}
    (file := tmp_path / "checked.json").write_text(json.dumps({k: v for k, v in content.items() if k != "files"}))
    run = report.read(file)
    assert run.title == "Checked: net:build" and run.verdict.startswith("A promise is broken: 1 of 1")
    assert (
        run.weights[0].kept and run.weights[0].verdict == "50.0% of |w| kept" and run.notes[-1] == "2 more stay dense"
    )
    del content["layers"][0]["zeros"]
    file.write_text(json.dumps(content))
    with pytest.raises(ReportError, match="zeros"):
        report.read(file)


def test_records_of_benchmarks_are_charts_or_one_table(tmp_path: Path) -> None:
    few = parsed(RECORDS)
    assert sum(attrs.get("class") == "chart" for _, attrs in few.elements) == len(measure.load(RECORDS)) > 0
    many = [record("linear", shape=f"{n}x64") for n in range(8)]
    measure.save(many, tmp_path / "a.json")
    measure.save(many[:1], tmp_path / "b.json")
    (tmp_path / "other.json").write_text("[1]")
    found = parsed(tmp_path)
    assert sum(name == "tr" for name, _ in found.elements) == 1 + 9
    assert "geometric mean" in found.texts and "2.00x" in found.texts


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quality": [{"title": "t", "scores": []}]}, "without scores"),
        ({"quality": [{"title": "t", "scores": [{"name": "n", "value": "NaN"}]}]}, "where a finite number belongs"),
        ({"sizes": {"dense": "Infinity"}}, "where a finite number belongs"),
        ({"sizes": [1]}, "a list where an object belongs"),
        ({"figures": [["one"]]}, "not enough values"),
        ({"weights": {"a": 1}}, "a dict where a list belongs"),
    ],
)
def test_a_malformed_run_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    measure.save([record("optimize", **change)], tmp_path / "results.json")
    with pytest.raises(ReportError, match=said) as raised:
        report.read(tmp_path)
    assert "malformed" in str(raised.value)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "half.json").write_text('{"accuracy": ')
    (tmp_path / "other.json").write_text('{"<b>": 1}')
    for name, said in (("none", "no such file"), ("list.json", "list"), ("half.json", "JSON"), ("other.json", "<b>")):
        with pytest.raises(ReportError, match=said):
            report.read(tmp_path / name)
    with pytest.raises(ReportError, match=r"a folder with half\.json"):
        report.read(tmp_path)


def test_only_a_report_is_replaced(tmp_path: Path) -> None:
    run = report.read(optimized(tmp_path / "run"))
    target = report.write(run, tmp_path / "new" / "report.html")
    first = target.read_bytes()
    assert report.write(run, target).read_bytes() == first, "the same run makes the same page"
    mine = tmp_path / "mine.html"
    mine.write_text("<p>mine</p>")
    for place in (mine, tmp_path):
        with pytest.raises(ReportError, match="not overwritten"):
            report.write(run, place)
    assert mine.read_text() == "<p>mine</p>"


def test_elements_escape_what_is_not_one() -> None:
    assert tag("p", "<", tag("br"), None, class_='"x"', hidden=True, id=None) == (
        '<p class="&quot;x&quot;" hidden>&lt;<br></p>'
    )
    assert escaped(Markup("<b>")) == "<b>" and escaped("a & 'b'\n") == "a &amp; &#x27;b&#x27;\n"
