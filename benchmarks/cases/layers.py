"""Layers: the table of DNNFusion's evaluation, operators of a model before and calls after fusion, beside ours.

The paper counts the operators of the graph that a mobile framework would run. Beside it stand three counts of the
same models here: the operators that torch captures, those that they decompose into (core ATen, views left out), and
the calls of one compiled run. Nothing is timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

import twofour
from cases import counts
from models import Subject
from models.paper import PAPER
from twofour.errors import DataError
from twofour.measure import machine, write_json

COLUMNS = ("paper before", "paper after", "captured", "decomposed", "calls", "decomposed / calls", "paper's ratio")


def run(models: Sequence[str], path: Path) -> dict[str, object]:
    """Count every model, write what was found to `path` and return it.

    Raises:
        DataError: There is no such model.
    """
    for name in models:
        if name not in PAPER:
            raise DataError(f"there is no model {name!r}", got=name, wanted=f"one of {', '.join(PAPER)}")
    rows = [count(name) for name in track(models, "counting", console=Console(stderr=True), transient=True)]
    found: dict[str, object] = {"case": "layers", "rows": rows, "machine": machine()}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, found)
    return found


def count(name: str) -> dict[str, object]:
    """Return one row of the table."""
    published = PAPER[name]
    subject = published.build()
    torch.set_num_threads(1)
    account = twofour.compile(subject.model, subject.inputs, tokens=(subject.tokens,), graph=True).plan.account
    assert account is not None
    return {
        "model": name,
        "paper_before": published.before,
        "paper_after": published.after,
        "captured": account.outlines["before"].computing,
        "decomposed": decomposed(subject),
        "calls": counts.our_kernels(account)["all"],
    }


def decomposed(subject: Subject) -> int:
    """Count the operators of a model in core ATen, without views of another's answer."""
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        program = torch.export.export(subject.model, subject.inputs).run_decompositions()
    names = (
        str(node.target).split(".")[1]
        for node in program.graph.nodes
        if node.op == "call_function" and "." in str(node.target)
    )
    return sum(name not in counts.VIEWS for name in names)


def table(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows as text."""
    rows: list[list[str]] = []
    for row in found["rows"]:
        numbers = [row[key] for key in ("paper_before", "paper_after", "captured", "decomposed", "calls")]
        ratios = f"{row['decomposed'] / row['calls']:.1f}", f"{row['paper_before'] / row['paper_after']:.1f}"
        rows.append([row["model"], *map(str, numbers), *ratios])
    return ["model", *COLUMNS], rows
