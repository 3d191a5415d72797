"""Recipes in TOML: read, laid over a model, written and read again."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from tests.fuzz.cursor import Cursor, edit_bytes
from tests.fuzz.shelf import put
from twofour.errors import LayerError, RecipeError
from twofour.recipe import Recipe

TRACED = ("twofour.recipe", "twofour.patterns", "twofour.criteria", "twofour.layers", "twofour.files")
SEEDS = (b"",)

PATTERNS = [
    "2:4",
    "1:2",
    "4:8",
    "dense",
    "2:4-transposable",
    "16:2:8",
    "4:8-pairs",
    "block:16x16@0.9",
    "block:3x7@0.7/2",
    "0:4",
    "5:4",
]
PATTERNS += ["2:", "2:4:", "99999999999999999999:4", "2:4 ", "-1:4", "2:4\\u0000", "", "1:1", "64:2:16", "2:999999999"]
GLOBS = ["*", "0", "encoder.*", "2", "[", "[!a]", "**", "x", "", "?", "*" * 40, "0.weight", "é", "\\n"]
CRITERIA = ["magnitude", "random", "taylor", "admm", "sparsegpt", "wanda", "random:7", "random(seed=1)", "", "x"]
CRITERIA += ["magnitude:over=model", "wanda:norm=l2,over=model", "ria:norm=", "magnitude:norm=l3"]
VALUES = ['""', "1", "-1", "0.5", "true", "[]", "{}", "1979-05-27", '["*"]', "[[]]", "nan", "9" * 40, '"asp"', '"any"']
VALUES += ["[" * 200 + "]" * 200, "{a={a={a={}}}}", "'''x'''", "0x7f", "1e400", '"2:4"', "07:32:00"]
KEYS = ["format", "criterion", "eligibility", "skip", "rule", "layers", "pattern", "x", '""', "rule.x", "[rule]"]


@cache
def model() -> nn.Module:
    """Return what recipes are laid over."""
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32, bias=False), nn.Conv2d(8, 16, 3))


def build(data: bytes) -> bytes:
    """Return the TOML."""
    cursor = Cursor(data)
    lines = ["format = 1", f'criterion = "{cursor.pick(CRITERIA)}"', 'eligibility = "any"', 'skip = ["nothing*"]']
    for _ in range(1 + cursor.number(3)):
        lines += ["", "[[rule]]", f'layers = "{cursor.pick(GLOBS)}"', f'pattern = "{cursor.pick(PATTERNS)}"']
    for _ in range(4):
        if cursor.empty:
            break
        place, action = cursor.number(len(lines)), cursor.number(4)
        if action == 0:
            lines[place] = lines[place].partition("=")[0] + "= " + cursor.pick(VALUES)
        elif action == 1:
            lines[place] = f"{cursor.pick(KEYS)} = {cursor.pick(VALUES)}"
        elif action == 2:
            lines.insert(place, cursor.pick(lines))
        else:
            whole = "\n".join(lines).encode()
            return edit_bytes(cursor, edit_bytes(cursor, whole) if cursor.number(2) else whole)
    return "\n".join(lines).encode()


def run(built: bytes) -> str:
    """Read it; what is read means the same when it is written and read again."""
    recipe = Recipe.load(put("recipe.toml", built))
    assert Recipe.load(put("again.toml", recipe.to_toml().encode())) == recipe
    try:
        recipe.assign(model(), empty=True)
    except (RecipeError, LayerError) as error:
        assert error.got or error.reasons or error.wanted, error
        return "misfit"
    return "read"
