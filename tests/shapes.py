"""The shapes in annotations, checked at every call of a test: see twofour/shapes.py. Imported before twofour."""

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent.parent / "src"
CHECKED = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts)
    for path in sorted(SOURCE.rglob("*.py"))
    if "from twofour.shapes import" in path.read_text()
]
"""The modules whose annotations name shapes."""

MISSING = [package for package in ("jaxtyping", "beartype") if find_spec(package) is None]
"""A Python of a GPU machine may have pytest and torch alone."""


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have the shapes of a call checked once it was answered: our own refusals come first."""
    from beartype import beartype

    kinds = {name: kind for name, kind in function.__annotations__.items() if "[Tensor, " in str(kind)}
    # Asked once for the arguments alone, whose answer is Any, and once for arguments and answer.
    if function.__annotations__.get("return") is Any or not kinds:
        return function
    function.__annotations__ = kinds
    return beartype(function)


def described() -> str:
    return f"shapes: not checked, {' and '.join(MISSING)} missing" if MISSING else f"shapes of {len(CHECKED)} modules"


def names_shapes(found: Any) -> bool:
    """Tell whether an annotation of a function, or of a class's fields, names the shape of a tensor."""
    function = getattr(found, "__func__", found.__init__ if inspect.isclass(found) else found)
    return any("[Tensor, " in str(kind) for kind in getattr(function, "__annotations__", {}).values())


if not MISSING:
    import jaxtyping

    def jaxtyped_where_shapes_are_named(**how: Any) -> Callable[[Any], Any]:
        """Stand in for what jaxtyping's hook puts over every function, of which few name a shape.

        It would bind the arguments of each call of the others too, a sixth of the time of compiling a model.
        """
        return lambda found: jaxtyped(found, **how) if names_shapes(found) else found

    jaxtyped = jaxtyping.jaxtyped
    jaxtyping.jaxtyped = jaxtyped_where_shapes_are_named  # by this name the code that the hook makes finds it
    jaxtyping.install_import_hook(CHECKED, "tests.shapes.checked")
