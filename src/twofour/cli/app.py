"""The typer application: its sub-commands, its version, and how an error leaves it."""

from __future__ import annotations

import ast
import importlib.metadata
import logging
import os
import sys
import traceback
from collections.abc import Iterator, MutableMapping
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from twofour.cli.console import ToStderr, print_error
from twofour.errors import SourceError, TwofourError, explained

logging.getLogger("twofour.streaming").addHandler(ToStderr(logging.WARNING))

UNREADABLE = 2
_USAGE: tuple[type[Exception], ...] = tuple(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
"""What a wrong option raises: typer's own class since it has no click any more, click's before."""


COMMANDS = {
    "demo": "demo:demo",
    "optimize": "optimize:optimize",
    "shrink": "shrink:shrink",
    "prune": "prune:prune",
    "check": "check:check",
    "import": "importing:convert",
    "export": "export:export",
    "advise": "advise:advise",
    "bench": "bench:bench",
    "report": "report:report",
    "explain": "explain:explain",
    "estimate": "estimate:estimate",
    "simulate": "simulate:simulate",
    "kernels": "kernels:kernels",
}
"""Command -> module of this package and its function, in the order of the help."""


class _Imported(MutableMapping[str, Any]):
    """Commands by their names, each imported when it is first asked for: most need neither compiler nor simulators."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.made:
            module, _, function = COMMANDS[name].partition(":")
            alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            alone.command(name)(getattr(import_module(f"twofour.cli.{module}"), function))
            self.made[name] = typer.main.get_command(alone)
        return self.made[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self.made[name] = command

    def __delitem__(self, name: str) -> None:
        del self.made[name]

    def __contains__(self, name: object) -> bool:  # without importing it
        return name in COMMANDS

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _docstring(name: str) -> str:
    """Return what a command says of itself, out of its source: all of them import three seconds' worth."""
    module, _, function = COMMANDS[name].partition(":")
    loader: Any = getattr(find_spec(f"twofour.cli.{module}"), "loader", None)
    source = loader.get_source(f"twofour.cli.{module}")
    if source is None:  # of an installation that kept bytecode alone
        return getattr(import_module(f"twofour.cli.{module}"), function).__doc__
    found = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == function)
    return ast.get_docstring(next(found)) or ""


_RUNS = "twofour.runs"
"""Of a context: its command runs, and is not looked up alone."""


def _require_there(source: str) -> None:
    """Refuse a file of weights that is not there before torch is imported, which takes seconds."""
    if source.endswith((".safetensors", ".onnx")) and ":" not in source and not source.startswith("-"):
        try:
            os.stat(os.path.expanduser(source))
        except FileNotFoundError as error:
            wanted = "a .safetensors file, a folder or an .onnx file that is there"
            raise SourceError(f"there is no file {source}", got="no such file", wanted=wanted) from error
        except (OSError, ValueError):  # the command itself says why it cannot be looked at
            return


class _Group(TyperGroup):
    """Prints an error in its own form and exits with 2; 1 stays the verdict that something is not sparse."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Imported()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        commands = self.commands
        self.commands = {name: TyperCommand(name, help=_docstring(name)) for name in COMMANDS}
        try:
            super().format_help(ctx, formatter)
        finally:
            self.commands = commands

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if ctx.meta.get(_RUNS) and args[0] == "check" and len(args) > 1:
            _require_there(args[1])
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        ctx.meta[_RUNS] = True
        try:
            return super().invoke(ctx)
        except TwofourError as error:
            print_error(error)
            raise typer.Exit(UNREADABLE) from error
        except (typer.Exit, typer.Abort, *_USAGE):
            raise
        except BrokenPipeError as error:  # who read the output wanted no more of it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(UNREADABLE) from error
        except (OSError, MemoryError) as error:
            print_error(SourceError("the command cannot go on", got=explained(error), wanted="files and memory enough"))
            raise typer.Exit(UNREADABLE) from error
        except SystemExit as error:  # of a model's own code: its number would pass for a verdict
            if isinstance(error.__context__, BrokenPipeError):  # of rich, as above
                raise typer.Exit(UNREADABLE) from error
            print_error(SourceError("code that the command runs asked to exit", got=f"SystemExit({error.code!r})"))
            raise typer.Exit(UNREADABLE) from error
        except Exception as error:  # 1 is a verdict: that something is not sparse
            traceback.print_exc()
            print_error(SourceError("this is a fault of twofour", got=explained(error), remedy="please report it"))
            raise typer.Exit(UNREADABLE) from error


app = typer.Typer(
    name="twofour",
    cls=_Group,
    help=(
        "Make a neural network 2:4 sparse, prove that it is as accurate, and run it faster on the machine you have.\n\n"
        "SOURCE is package.module:function, a Hugging Face folder, an installed package that carries one, or a "
        ".safetensors file."
    ),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"twofour {importlib.metadata.version('twofour')}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    app()
