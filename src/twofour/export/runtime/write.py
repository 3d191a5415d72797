"""to_runtime: a compiled model as a file that libtwofour runs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from twofour.calls import Example
from twofour.capture import arguments
from twofour.compiler.whole_model import WholeModel
from twofour.errors import ExportError
from twofour.export.runtime.file import write_programs
from twofour.export.runtime.program import Constants, Program, translated
from twofour.files import named
from twofour.graph.executor.recorder import RefusedError


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        inputs: Of each program, the names of its inputs and their shapes.
        outputs: The same of its outputs.
        calls: Native calls of each program.
        arena_bytes: Memory that each program writes into.
        file_bytes: Size of the file.
    """

    inputs: tuple[dict[str, tuple[int, ...]], ...]
    outputs: tuple[dict[str, tuple[int, ...]], ...]
    calls: tuple[int, ...]
    arena_bytes: tuple[int, ...]
    file_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready fields."""
        shapes = {
            key: [{n: list(s) for n, s in one.items()} for one in getattr(self, key)] for key in ("inputs", "outputs")
        }
        return {**self.__dict__, **shapes, "calls": list(self.calls), "arena_bytes": list(self.arena_bytes)}


def to_runtime(model: nn.Module, path: str | os.PathLike[str], *examples: Any) -> Exported:
    """Write a compiled model as programs for libtwofour: docs/runtime.md.

    Args:
        model: What `compile(..., graph="native")` returned.
        path: File to write, by custom with the ending .2f4.
        examples: Inputs of one call each, as `compile` takes them, at least one: the file serves their shapes.

    Raises:
        ExportError: The model runs layer by layer, an example is none that its graph holds for, a call is one of
            torch, or the file cannot be written.
    """
    path = named(path, ExportError)
    runner = _runner(model)
    if not examples:
        raise ExportError(
            "a file for libtwofour needs an example",
            got="none",
            wanted="the inputs of one call, for each set of shapes that it is to serve",
            remedy="to_runtime(model, path, example)",
        )
    constants = Constants()
    with torch.inference_mode():
        programs = [_recorded(model, runner, Example.of(example), constants) for example in examples]
    size = write_programs(path, programs, constants)
    return Exported(
        tuple({name: tuple(one.shape) for name, one in program.inputs} for program in programs),
        tuple({name: tuple(program.places[place].shape) for name, place in program.outputs} for program in programs),
        tuple(len(program.calls) for program in programs),
        tuple(program.arena for program in programs),
        size,
    )


def _runner(model: nn.Module) -> WholeModel:
    runner = vars(model).get("forward")
    if isinstance(runner, WholeModel):
        return runner
    plan = getattr(model, "plan", None)
    account = getattr(plan, "account", None)
    raise ExportError(
        "the model is no compiled graph",
        got=getattr(account, "reason", "")
        or ("compiled layers without an example" if plan else "a model that is not compiled"),
        wanted="what compile(model, example, graph='native') returns",
        remedy="compile it so; a model that cannot be captured has no program",
    )


def _recorded(model: nn.Module, runner: WholeModel, example: Example, constants: Constants) -> Program:
    given = arguments(model, example.args, example.kwargs)
    leaves = runner.guard.leaves(given)
    if leaves is None:
        name, why = runner.guard.unlike(given)
        raise ExportError(
            "the graph does not hold for an example",
            got=f"`{name}`: {why}",
            wanted="inputs of the kind that the model was compiled on",
            remedy="compile on this example",
        )
    leaves = [
        leaf.clone(memory_format=torch.contiguous_format) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    ]
    names = _names(given)
    _require_apart([name for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, Tensor)], "inputs")
    inputs = {index: names[index] for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    try:
        recorder, outputs = runner.program.recorded(leaves)
        answer = _named_outputs(runner.outputs.value(outputs))
        return translated(recorder, inputs, leaves, answer, constants)
    except RefusedError as error:
        raise ExportError(
            "a run of the model cannot be recorded",
            got=str(error),
            wanted="calls whose memory is known",
            remedy="report it with the model",
        ) from error


def _names(given: Any) -> list[str]:
    """Return a name for each leaf of named values: `x`, `batch.input_ids`."""
    return [_name(path) for path, _ in tree_flatten_with_path(given)[0]]


def _name(path: Sequence[Any]) -> str:
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", keystr((key,)))))) for key in path]
    return ".".join(parts)


def _named_outputs(answer: Any) -> Mapping[str, Tensor]:
    """Return the tensors of an answer by name: `output` where it is one, else by their keys or places."""
    leaves = tree_flatten_with_path(answer)[0]
    found = [(_name(path) or "output", leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
    _require_apart([name for name, _ in found], "outputs")
    return dict(found)


def _require_apart(names: Sequence[str], role: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ExportError(
            f"two {role} have one name",
            got=f"`{twice[0]}`",
            wanted="keys that differ where they are joined by dots",
            remedy="rename a key",
        )
