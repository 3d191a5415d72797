"""Whole models side by side: ours, and the dense runtimes that are installed, on one example."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calls, engines, measure
from twofour.calls import Example
from twofour.engines import EAGER, INDUCTOR, OPENVINO, ORT, Candidates
from twofour.errors import OptimizeError, one_of
from twofour.measure import Record

NAMES = (EAGER, INDUCTOR, ORT, OPENVINO)
"""Runtimes that a model is held against."""
BUILT = {
    EAGER: (engines.eager, ("float32", "bfloat16")),
    INDUCTOR: (engines.inductor, ("float32",)),
    ORT: (engines.onnxruntime, ("float32", "int8")),
    OPENVINO: (engines.openvino, ("float32", "bfloat16", "int8")),
}
"""What builds each, and the types that it is built in: those that its makers offer for a CPU."""
SECONDS = 10.0


@dataclass(frozen=True)
class Positional:
    """A model as other runtimes call it: tensors by their places in, a tuple of tensors out."""

    model: nn.Module
    inputs: tuple[Tensor, ...]

    @classmethod
    def of(cls, model: nn.Module, example: Example) -> Positional:
        """Return the model behind one that takes the example's tensors by place; what else it holds stays as it is.

        Raises:
            OptimizeError: The example holds no tensor, or some inside of lists, or the model answers with none.
        """
        whole = [*example.args, *example.kwargs.values()]
        inputs = [value.detach() for value in whole if isinstance(value, Tensor)]
        with calls.evaluating(model), torch.no_grad():
            paths = tuple(_paths(example.run(model)))
        inside = sum(isinstance(leaf, Tensor) for leaf in example.leaves) - len(inputs)
        if not inputs or inside or not paths:
            raise OptimizeError(
                "the model cannot be called by other runtimes",
                got=f"{len(inputs)} tensors as arguments, {inside} inside of them, {len(paths)} in the answer",
                wanted="arguments that are tensors, and tensors in the answer",
            )
        return cls(_ByPlace(model, example, paths).eval().requires_grad_(False), tuple(inputs))


class _ByPlace(nn.Module):
    """Takes the tensors of an example by place, and answers with those that the paths lead to."""

    def __init__(self, model: nn.Module, example: Example, paths: tuple[tuple[Any, ...], ...]) -> None:
        super().__init__()
        self.inner, self._paths = model, paths
        places = iter(range(len(example.args) + len(example.kwargs)))

        def place(value: Any) -> tuple[int, Any]:
            return (next(places), None) if isinstance(value, Tensor) else (-1, value)

        self._args = [place(value) for value in example.args]
        self._kwargs = {name: place(value) for name, value in example.kwargs.items()}

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        args = [rest if at < 0 else inputs[at] for at, rest in self._args]
        kwargs = {name: rest if at < 0 else inputs[at] for name, (at, rest) in self._kwargs.items()}
        output = self.inner(*args, **kwargs)
        return tuple(_follow(output, path) for path in self._paths)


def _paths(output: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where the tensors of an output are: keys, places or attributes, from the outside in."""
    if isinstance(output, Tensor):
        yield before
    elif isinstance(output, Mapping):  # transformers' outputs too
        for key in output:
            yield from _paths(output[key], (*before, key))
    elif isinstance(output, tuple | list):
        for place, entry in enumerate(output):
            yield from _paths(entry, (*before, place))
    elif hasattr(output, "__dataclass_fields__"):
        for name in output.__dataclass_fields__:
            yield from _paths(getattr(output, name), (*before, f".{name}"))


def _follow(output: Any, path: Sequence[Any]) -> Tensor:
    for step in path:
        named = isinstance(step, str) and step.startswith(".")
        output = getattr(output, step[1:]) if named else output[step]
    return output


def require_known(without: Sequence[str]) -> None:
    """Refuse names of what cannot be left out: torch as it is stays, so that there is something to compare with.

    Raises:
        OptimizeError: One is no other of `NAMES`.
    """
    for name in without:
        one_of("there is no such runtime to leave out", name, NAMES[1:], OptimizeError)


def require_smoothable(smooth: bool, dtypes: str | Sequence[str], data: bool) -> None:
    """Refuse to smooth outliers where nothing is compiled in int8 on data.

    Raises:
        OptimizeError: It is asked for, and nothing is.
    """
    if smooth and ("int8" not in dtypes or not data):
        raise OptimizeError(
            "outliers are smoothed before int8 rounds them, on data",
            got=f"dtype={dtypes!r}, {'with' if data else 'without'} data",
            wanted="int8 among the types, and data",
            remedy="dtype='int8' with data, or leave `smooth` out",
        )


def timed(
    ours: Mapping[str, nn.Module],
    model: nn.Module,
    example: Any,
    dtypes: Sequence[str],
    *,
    without: Sequence[str] = (),
    seconds: float = SECONDS,
    meta: Mapping[str, object] | None = None,
    tell: Callable[[str], object] = lambda what: None,
) -> Record:
    """Time our models and the runtimes with the dense model, interleaved, on one example.

    Args:
        ours: Name -> what `compile` or `load` returned.
        model: What the runtimes are given.
        example: Inputs of one call.
        dtypes: Types that the runtimes may compute in.
        without: Runtimes to leave out.
        seconds: Time box of the comparison.
        meta: Facts for the record, which also says why a runtime is missing.
        tell: Called with the name of each runtime before it is built.
    """
    threads, given = torch.get_num_threads(), Example.of(example)
    side = Candidates()
    try:
        with calls.without_cache(model):
            subject = Positional.of(model, given)
            want = engines.values_of(engines.eager(subject, "float32", threads)())
            for name, dtype in wanted(dtypes):
                title = title_of(name, dtype)
                if name in without:
                    side.missing[title] = "left out as asked"
                    continue
                tell(title)
                side.add(title, partial(BUILT[name][0], subject, dtype, threads), want, dtype)
    except OptimizeError as error:
        side.missing |= {name: error.got or error.what for name in NAMES}
    if not side.calls:  # none is built in these types
        side.calls[EAGER] = partial(_called, model, given)
    theirs = tuple(side.calls)
    side.calls |= {name: partial(_called, fast, given) for name, fast in ours.items()}
    tell("the models side by side")
    facts = {**(meta or {}), "missing": side.missing, "errors": side.errors}
    return engines.compare(side.calls, theirs, threads, seconds, measure.without_nan(facts))


def wanted(dtypes: Sequence[str]) -> list[tuple[str, str]]:
    """Return each runtime with each of the types that it is built in."""
    return [(name, dtype) for name, (_, offered) in BUILT.items() for dtype in offered if dtype in dtypes]


def title_of(name: str, dtype: str) -> str:
    """Return the name of a runtime in a type, as tables say it."""
    return name if dtype == "float32" else f"{name}, {dtype}"


def _called(model: nn.Module, example: Example) -> Any:
    with torch.inference_mode():
        return model(*example.args, **example.kwargs)


def missing(record: Record) -> dict[str, str]:
    """Return why runtimes were not timed, by name."""
    found = record.meta.get("missing")
    return {str(name): str(why) for name, why in found.items()} if isinstance(found, Mapping) else {}
