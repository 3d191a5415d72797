"""Annotations name shapes: the tests check them, and a user needs nothing for it."""

import inspect
import subprocess
import sys
from importlib import import_module
from typing import get_type_hints

import pytest
import torch

from tests import shapes
from tests.turns import in_turn
from twofour.errors import PatternError
from twofour.packing.encodings import dequantize
from twofour.patterns import NM
from twofour.patterns.groups import check_groups

needs_jaxtyping = pytest.mark.skipif(bool(shapes.MISSING), reason=shapes.described())


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float32, device="cpu")


@needs_jaxtyping
def test_a_wrong_shape_raises() -> None:
    from jaxtyping import TypeCheckError

    assert check_groups(ones(2, 3, 4) > 0, 4, ones(2, 12), 4).ok
    with pytest.raises(TypeCheckError, match=r"check_groups"):
        check_groups(ones(2, 3, 4) > 0, 4, ones(5, 12), 4)


@needs_jaxtyping
def test_a_wrong_dtype_and_a_wrong_number_of_axes_raise() -> None:
    from jaxtyping import TypeCheckError

    whole = torch.ones(2, 8, dtype=torch.int8, device="cpu")
    assert dequantize(whole, ones(2, 4), None).shape == (2, 8)
    with pytest.raises(TypeCheckError):
        dequantize(whole.double(), ones(2, 4), None)
    with pytest.raises(TypeCheckError):
        dequantize(whole.view(2, 2, 4), ones(2, 4), None)


@needs_jaxtyping
def test_functions_that_name_shapes_are_checked_and_no_others() -> None:
    """All of the modules' own; what is called a million times and names none is left as it is."""
    checked, plain = set[str](), set[str]()
    for name in shapes.CHECKED:
        module = import_module(name)
        classes = [found for found in vars(module).values() if inspect.isclass(found) and found.__module__ == name]
        for owner in (module, *classes):
            for found in vars(owner).values():
                function = getattr(found, "__func__", getattr(found, "fget", found))
                if inspect.isfunction(function) and function.__module__ == name:
                    named = any("[Tensor, " in str(kind) for kind in function.__annotations__.values())
                    bound = function.__code__.co_filename.endswith("jaxtyping/_decorator.py")
                    below = hasattr(function, "__wrapped__")  # under a decorator of its own
                    assert named if bound else not named or below, f"{name}.{function.__qualname__}"
                    (checked if bound else plain).add(f"{name}.{function.__qualname__}")
    assert len(checked) >= 120 and len(plain) > len(checked)
    assert "twofour.patterns.nm.NM.project" in checked and "twofour.patterns.nm.NM.group" in plain


def test_our_own_refusals_come_first() -> None:
    with pytest.raises(PatternError, match="not a multiple of 4"):
        NM(2, 4).project(ones(2, 6))
    with pytest.raises(PatternError, match="cannot carry a pattern"):
        NM(2, 4).project([1.0, 2.0])  # type: ignore[arg-type]


@in_turn("name", shapes.CHECKED)
def test_every_annotation_of_a_checked_module_can_be_evaluated(name: str) -> None:
    """One that cannot would be left unchecked without a word."""
    module = import_module(name)
    classes = [found for found in vars(module).values() if inspect.isclass(found) and found.__module__ == name]
    for owner in (module, *classes):
        for function in vars(owner).values():
            if inspect.isfunction(function) and any(
                "[Tensor" in str(kind) for kind in function.__annotations__.values()
            ):
                assert get_type_hints(function)


def test_every_reference_of_a_kernel_names_shapes() -> None:
    found = (shapes.SOURCE / "twofour" / "kernels").rglob("reference.py")
    names = {".".join(path.relative_to(shapes.SOURCE).with_suffix("").parts) for path in found}
    assert names and names <= set(shapes.CHECKED), names - set(shapes.CHECKED)


def test_without_jaxtyping_the_package_works_and_annotations_say_tensor() -> None:
    code = """
import sys
sys.modules["jaxtyping"] = sys.modules["beartype"] = None
import typing, torch, twofour
from twofour.packing import pack
from twofour.patterns import NM, project_reference
weight = torch.randn(4, 8, dtype=torch.float32, device="cpu")
weight = weight * NM(2, 4).project(weight, absolute=True)
assert torch.equal(pack(weight, "2:4").unpack(), weight)
assert typing.get_type_hints(project_reference)["scores"] is torch.Tensor
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
