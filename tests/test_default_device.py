"""What torch's default device and dtype are is the user's affair: no buffer of ours may follow them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils._device import _device_constructors

from tests.test_architecture import PACKAGE, ROOT

MAKERS = {maker.__name__ for maker in _device_constructors() if getattr(torch, maker.__name__, None) is maker}
"""The functions of torch that ask for the default device."""
WHOLE = {"arange", "randint", "randperm", "range", "tril_indices", "triu_indices"}
"""Those whose dtype follows their arguments, never the default dtype."""


def calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    """Yield each call of a maker as `torch.name(...)` in a file, with the name."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in MAKERS:
                yield node, name


def faults(call: ast.Call, name: str) -> list[str]:
    """Return which of `device` and `dtype` a call leaves to torch's defaults."""
    given = {keyword.arg for keyword in call.keywords}
    asked = ("device",) if name in WHOLE else ("device", "dtype")
    return [argument for argument in asked if argument not in given]


def test_every_tensor_made_names_its_device_and_dtype() -> None:
    bad = [
        f"{path.relative_to(ROOT)}:{call.lineno}: torch.{name} without {' and '.join(missing)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for call, name in calls(path)
        if (missing := faults(call, name))
    ]
    assert not bad, "\n".join(bad)


def test_makers_are_called_by_their_names_in_torch() -> None:
    """`from torch import empty` or `import torch as t` would hide a call from the test above."""
    bad = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and node.module == "torch" and {a.name for a in node.names} & MAKERS)
        or (isinstance(node, ast.Import) and any(a.name == "torch" and a.asname for a in node.names))
    ]
    assert not bad, "\n".join(bad)


def test_the_reader_of_calls_sees_what_is_missing() -> None:
    (call,) = (node for node in ast.walk(ast.parse("torch.zeros(3)")) if isinstance(node, ast.Call))
    assert faults(call, "zeros") == ["device", "dtype"]
    assert faults(call, "arange") == ["device"]
    assert {"empty", "zeros", "ones", "full", "tensor", "arange", "randn", "eye", "linspace"} <= MAKERS
