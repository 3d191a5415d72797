import ast
import pickle
from pathlib import Path

import twofour
from twofour.errors import KernelError, TwofourError


def test_the_form_of_a_message() -> None:
    error = KernelError("it cannot run", got="this", wanted="that", remedy="the other", reasons=["a: no", "b: no"])
    assert str(error.for_layer("fc")) == (
        "layer `fc`: it cannot run\n  reason  a: no\n  reason  b: no\n"
        "  got     this\n  wanted  that\n  try     the other"
    )
    assert error.for_layer("other").layer == "fc", "the innermost name stays"
    assert "wanted  that" in repr(error)


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(KernelError("it cannot run", got="this", layer="fc")))
    assert isinstance(error, TwofourError)
    assert (str(error), error.got, error.layer) == ("layer `fc`: it cannot run\n  got     this", "this", "fc")


def test_what_compiling_refuses_says_what_to_try() -> None:
    package = Path(twofour.__file__).parent
    folders = *package.glob("compiler/*.py"), *package.glob("kernels/*.py")
    files = [package / "capture.py", package / "pruning.py", *folders]
    silent = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("CompileError", "KernelError", "LayerError", "RecipeError")
        and not any(keyword.arg == "remedy" for keyword in node.keywords)
    ]
    assert not silent, "\n".join(silent)
