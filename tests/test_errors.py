import ast
import pickle
from pathlib import Path

import twofour
from twofour import errors
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
    folders = *package.glob("capture/*.py"), *package.glob("compiler/*.py"), *package.glob("kernels/*.py")
    files = [package / "pruning.py", *folders]
    silent = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("CompileError", "KernelError", "LayerError", "RecipeError")
        and not any(keyword.arg == "remedy" for keyword in node.keywords)
    ]
    assert not silent, "\n".join(silent)


COMPLETE = (
    *(
        "allocation",
        "calibration",
        "calls.py",
        "coupling",
        "criteria",
        "drawing.py",
        "hardware",
        "layers",
        "masks",
        "patterns",
        "permutation",
    ),
    *("pruning.py", "quantization.py", "recipe.py", "training"),
)


def test_what_is_refused_before_compiling_says_got_wanted_and_what_to_try() -> None:
    package = Path(twofour.__file__).parent
    paths = [path for name in COMPLETE for path in sorted({package / name, *(package / name).rglob("*.py")})]
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, TwofourError)}
    incomplete, seen = [], 0
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())) if path.is_file() else ():
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in (*kinds, "kind") or not node.args:
                continue
            if ast.unparse(node.func) == "kind" and not isinstance(node.args[0], ast.Constant | ast.JoinedStr):
                continue  # a function of that name
            seen += 1
            given = {entry.arg for entry in node.keywords}
            given |= {"got"} if "reasons" in given else set()
            empty = [entry.arg for entry in node.keywords if ast.unparse(entry.value).endswith("else None")]
            if lacking := [word for word in ("got", "wanted", "remedy") if word not in given] + empty:
                incomplete.append(f"{path.relative_to(package)}:{node.lineno} lacks {', '.join(map(str, lacking))}")
    assert not incomplete, "\n".join(incomplete)
    assert seen > 80, "errors of these folders are no longer found"


def test_a_value_that_is_cut_says_so() -> None:
    assert errors.cut("a" * 40, 40) == "a" * 40
    assert errors.cut("a" * 41, 40) == "a" * 37 + "..."
    assert errors.explained(ValueError("b" * 500)) == f"ValueError: {'b' * 397}..."
