"""The benchmark suite: `python benchmarks/run.py --help` lists its parts; --record keeps what they find."""

from __future__ import annotations

import typer
from rich.console import Console

import engine
import nets
import products
import stages
from options import console
from twofour.errors import TwofourError

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

for part in (engine, products, nets, stages):
    for command in part.COMMANDS:
        app.command()(command)


@app.callback()
def _root() -> None:
    """Interleaved benchmarks against the best dense code, with the machine in every record."""


@app.command()
def figures() -> None:
    """Draw docs/figures and write the tables made from records; needs matplotlib (requirements/figures.txt)."""
    import figures as drawing
    import readme

    for path in (*drawing.draw_all(), drawing.predicted(), readme.draw(), readme.write()):
        console().print(str(path), highlight=False)


def main() -> None:
    """Run the suite; an error of twofour is printed in its own form, exit code 2."""
    try:
        app()
    except TwofourError as error:
        Console(stderr=True).print(f"{type(error).__name__}: {error}", markup=False, highlight=False, soft_wrap=True)
        raise SystemExit(2) from error


if __name__ == "__main__":
    main()
