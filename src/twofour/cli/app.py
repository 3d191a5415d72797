"""The typer application: its sub-commands, its version, and how an error leaves it."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from twofour.cli import advise, check, demo, estimate, export, importing, kernels, prune, simulate
from twofour.cli.screen import print_error
from twofour.errors import TwofourError

UNREADABLE = 2


class _Group(TyperGroup):
    """Prints a TwofourError in its own form and exits with 2, instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TwofourError as error:
            print_error(error)
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


app.command("demo")(demo.demo)
app.command("prune")(prune.prune)
app.command("check")(check.check)
app.command("import")(importing.convert)
app.command("export")(export.export)
app.command("advise")(advise.advise)
app.command("estimate")(estimate.estimate)
app.command("simulate")(simulate.simulate)
app.command("kernels")(kernels.kernels)


def main() -> None:
    """Run the command line."""
    app()
