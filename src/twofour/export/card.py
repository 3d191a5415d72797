"""The model card of a sparse model: what is sparse, how it was made, and what it costs, with its control."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twofour.errors import ExportError, cut
from twofour.patterns import Hybrid, parse
from twofour.recipe import Recipe

NUMBERS = ("sparse", "dense", "control")

_MASKED = (
    'model = twofour.load("FOLDER/model.safetensors", model, masked=True)    # zeros alone do not tell dense groups\n'
)


@dataclass(frozen=True)
class Accuracy:
    """What a sparse model was measured to do.

    Attributes:
        metric: What was measured, with its unit: "accuracy, %", "perplexity".
        sparse: Of this model.
        data: On what: "STS-B test, 1379 pairs".
        dense: Of the dense model that it was made from.
        control: Of the dense model after the same extra training.
        note: Anything more: seeds, standard errors.
    """

    metric: str
    sparse: float
    data: str = ""
    dense: float | None = None
    control: float | None = None
    note: str = ""

    @classmethod
    def of(cls, given: object) -> Accuracy:
        """Read what a JSON file may hold.

        Raises:
            ExportError: It is no object of these fields.
        """
        try:
            assert isinstance(given, Mapping)
            said = {key: value for key, value in given.items() if value is not None}
            fields: dict[str, Any] = {key: float(one) if key in NUMBERS else str(one) for key, one in said.items()}
            found = cls(**fields)
            assert found.metric
        except (AssertionError, TypeError, ValueError) as error:
            raise ExportError(
                "the accuracy is malformed",
                got=cut(repr(given), 200),
                wanted='{"metric": "accuracy, %", "data": "...", "sparse": 91.4, "dense": 91.7, "control": 91.8}',
                remedy="metric and sparse are needed; dense, control, data and note may be left out",
            ) from error
        return found


def card(
    name: str,
    loader: str,
    patterns: Mapping[str, str],
    zeros: Mapping[str, float],
    dense: int,
    recipe: Recipe | None,
    accuracy: Accuracy | None,
) -> str:
    """Return the text of README.md.

    Args:
        name: Of the model.
        loader: The class of transformers that reads it.
        patterns: Pattern of each sparse weight.
        zeros: Fraction of zeros of each sparse weight.
        dense: How many weights with two axes or more have no pattern.
        recipe: How they were made sparse.
        accuracy: What was measured.
    """
    kinds = Counter(patterns.values())
    tags = "\n".join(f'- "{tag}"' for tag in ("sparse", *sorted(kinds)))
    share = sum(zeros.values()) / max(len(zeros), 1)
    lines = [
        f"---\nlibrary_name: transformers\ntags:\n{tags}\n---",
        f"# {name}, {', '.join(sorted(kinds)) or 'dense'}",
        "Weights with zeros in a pattern that sparse kernels use. They are stored plainly: every tool reads them."
        if kinds
        else "No weight is promised to be sparse.",
        "| pattern | weights |\n| --- | --- |\n"
        + "\n".join(f"| `{pattern}` | {count} |" for pattern, count in sorted(kinds.items()))
        + f"\n| dense | {dense} |",
        f"{share:.1%} of the values of the sparse weights are zero. `twofour check FOLDER` looks again.",
        "## How it was made",
        f"```toml\n{recipe.to_toml().strip()}\n```" if recipe else "No recipe was given when this folder was written.",
        "## Accuracy",
        _accuracy(accuracy),
        "## Use",
        "```python\nimport transformers, twofour\n\n"
        f'model = transformers.{loader}.from_pretrained("FOLDER").eval()\n'
        f"{_MASKED if any(isinstance(parse(kind), Hybrid) for kind in kinds) else ''}"
        "fast = twofour.compile(model, example)      # measured: sparse kernels where they are faster\n```",
    ]
    return "\n\n".join(lines) + "\n"


def _accuracy(given: Accuracy | None) -> str:
    if given is None:
        return "None was given when this folder was written. Measure it on your task before use."
    rows = [("dense, before", given.dense), ("dense, with the same extra training (control)", given.control)]
    rows.append(("this model", given.sparse))
    head = f"{given.metric}{f' on {given.data}' if given.data else ''}"
    table = "\n".join(f"| {label} | {value:g} |" for label, value in rows if value is not None)
    missing = (
        "" if given.control is not None else "\n\nThere is no control: a dense model with the same extra training."
    )
    note = f"\n\n{given.note}" if given.note else ""
    return f"| | {head} |\n| --- | --- |\n{table}{missing}{note}"
