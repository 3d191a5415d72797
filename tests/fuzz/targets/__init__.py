"""What is fuzzed: a module each, whose `one` makes an input of a few bytes, has the library read it and judges it.

A target has four members:

* `TRACED`: modules of twofour whose branches lead the fuzzer.
* `SEEDS`: bytes to begin with, of inputs that are good.
* `build(data)`: the input that the bytes describe, the same each time; none describe a good one.
* `run(built)`: has it read. It returns a word for what came of it, raises what the library raises, and an
  AssertionError where something came out that contradicts what went in.
"""

from __future__ import annotations

import importlib
from typing import Any

TARGETS = ("load", "read", "index", "safetensors", "pickle", "onnx", "recipe", "systolic", "journal", "checkpoint")
TARGETS += ("layout", "graph", "native", "cut", "runtime")
"""Modules of this folder, in the order in which they run."""

YOUNG = ("provider",)
"""Those that run behind them and have no record of a long run, plain and under the sanitizers, yet."""


def target(name: str) -> Any:
    """Return the module of a target."""
    return importlib.import_module(f"{__name__}.{name}")


def judge(module: Any, data: bytes) -> str:
    """Return the outcome of the input that the bytes describe: a word, or the code or kind of the refusal.

    Raises:
        Exception: A finding. Nothing but a TwofourError that says what it got or wanted counts as a refusal.
    """
    from twofour.errors import TwofourError  # not sooner: atheris traces what is imported when a target is

    try:
        return module.run(module.build(data))
    except TwofourError as error:
        assert error.what and (error.got or error.wanted or error.reasons), error
        return error.code or type(error).__name__
