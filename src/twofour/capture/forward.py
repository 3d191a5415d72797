"""capture: a model's forward as a graph of torch operators, for every batch and sequence length where that is possible.

The graph comes from torch.export without decompositions, so that linear, attention and normalisation stay whole.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from twofour.calls import without_fast_paths
from twofour.capture.in_place import without_changes
from twofour.capture.quiet import OthersAlone, quietly
from twofour.capture.same_padding import sizes_stay_free
from twofour.errors import CompileError, cut

logger = logging.getLogger("twofour.capture")

_LIBRARY = torch.library.Library("twofour", "FRAGMENT")
_LIBRARY.define("kept(Tensor x, str name, int width, int[] axes) -> Tensor")
KEPT = torch.ops.twofour.kept.default
"""Stands for a layer that is kept whole: (x, its name, outputs, axes). It is never run.

Of a convolution the axes are taps, stride, zeros and dilation of each axis of an image; of a Linear there are none.
"""


def _kept(x: Tensor, name: str, width: int, axes: Sequence[int]) -> Tensor:
    sizes = []
    for size, start in zip(x.shape[x.ndim - len(axes) // 4 :], range(0, len(axes), 4), strict=True):
        taps, stride, zeros, dilation = axes[start : start + 4]
        sizes.append((size + zeros - dilation * (taps - 1) - 1) // stride + 1)
    return x.new_empty(*x.shape[: -len(sizes) - 1], width, *sizes)


torch.library.register_fake("twofour::kept", _kept, lib=_LIBRARY)


WITHOUT_A_GRAPH = "change the forward, or go without a graph: compile(..., graph=False) compiles each layer by itself"

SYMBOL_SECONDS = 15
"""Processor time for one attempt with sizes as symbols. A model that pads by its input's size nests them ever deeper:
80 s for a net that is captured with fixed sizes in 3."""

TRACING = threading.RLock()
"""Held by whoever captures a model or computes with what stands in a captured graph: sizes that are symbols, and fakes.

torch.export's modes belong to the process, not to the thread. What another thread computes with symbols meanwhile is
traced by them, and torch takes them away and puts them back around much of what it does with fakes: put back after the
capture has ended, they stay, and every later capture of the process fails."""


@contextmanager
def outside_tracing() -> Iterator[None]:
    """Compute on real tensors although a model may be under capture: for a compiled layer whose weight is read."""
    with TRACING, _disable_current_modes():
        yield


class Structure:
    """How leaves make up a value. torch's own description warns when it is copied or pickled; this one does not."""

    def __init__(self, spec: TreeSpec) -> None:
        self.spec = spec

    def value(self, leaves: Sequence[Any]) -> Any:
        """Return the value that `leaves` make up."""
        return tree_unflatten(leaves, self.spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Structure:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # of zeros: an output of Hugging Face leaves out what is None when it is unpickled
        return _structure_of, (tree_unflatten([0] * self.spec.num_leaves, self.spec),)


def _structure_of(value: Any) -> Structure:
    return Structure(tree_flatten(value)[1])


@dataclass(frozen=True)
class Graph:
    """A captured forward.

    Attributes:
        module: Operators on placeholders, one per input leaf; weights and constants are its attributes.
        example: The leaves it was captured with.
        inputs: The parameters of the model's forward that the example gave, with the structure of their values.
        constants: Leaf position -> value of every leaf that is no tensor: the graph holds for these values.
        outputs: Structure of the answer.
        guards: Conditions on the inputs' sizes, as Python on `L`: parameter name -> value.
        dynamic: Whether sizes other than the example's are served.
        reason: Why not, "" where they are.
    """

    module: fx.GraphModule
    example: tuple[Any, ...]
    inputs: Structure
    constants: dict[int, Any]
    outputs: Structure
    guards: tuple[str, ...]
    dynamic: bool
    reason: str


_BY_VALUES = "a size or a branch follows from the values of a tensor, as those of packed sequences do"


def _reason(error: Exception) -> str:
    """Return why an attempt failed, for a reader who knows nothing of torch's symbols."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # slow to import; loaded by now

    if isinstance(error, GuardOnDataDependentSymNode):
        return _BY_VALUES
    return f"{type(error).__name__}: {_first_line(error)}".removeprefix("_TooLateError: ")


_CHANGES = "the forward changes the model or its input"


def _is_of_sizes(error: Exception) -> bool:
    """Tell whether an attempt with fewer free sizes may go better: what is answered and changed is the same in all."""
    unknown = isinstance(error, RuntimeError) and "in output, which is not a known type" in str(error)
    return not unknown and not (isinstance(error, CompileError) and error.what == _CHANGES)


def _first_line(error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), "without a message")
    return cut(re.sub(r"\s*(See )?https?://\S*", "", line), 200)


def capture(
    model: nn.Module,
    example: Mapping[str, Any],
    kept: Mapping[str, tuple[int, ...]] | None = None,
    *,
    dynamic: bool = True,
) -> Graph:
    """Capture the forward of `model` in evaluation mode, without gradients.

    Args:
        model: Any module; it is not changed.
        example: Values of the parameters of its forward, as from `arguments`.
        kept: Names of submodules that become single `KEPT` nodes, with their outputs and axes; they take one tensor.
        dynamic: Try to serve other sizes than the example's; without, all sizes in the graph are whole numbers.

    Returns:
        The graph, for every batch size and sequence length that torch can express within `SYMBOL_SECONDS`, else for
        every batch size, else for the example's sizes.

    Raises:
        CompileError: The model cannot be captured: torch's reason follows.
    """
    reasons: list[str] = []
    apart = _kept_whole(model, kept or {}), sizes_stay_free(model)
    with TRACING, apart[0], apart[1], without_fast_paths(), torch.no_grad(), quietly():
        late: set[str] = set()
        for name, sizes, attempt in _attempts(example, dynamic):
            if name in late:
                continue
            leaves, spec = tree_flatten(attempt)  # before the forward, which may write into what it is given
            try:
                with _Deadline(name) if sizes is not None else nullcontext(), redirect_stderr(OthersAlone()):
                    program = torch.export.export(model, (), attempt, dynamic_shapes=sizes, strict=False)
                    if not without_changes(program.graph):
                        program = program.run_decompositions({})  # the same operators, without changes in place
                return _graph(program, leaves, spec, sizes is not None, "; ".join(reasons[:1]))
            except Exception as error:  # whatever a model's own code raises under tracing
                late |= {name} if isinstance(error, _TooLateError) else set()
                if (reason := _reason(error)) not in reasons:  # most attempts fail for one
                    logger.info("capture with %s failed: %s", name, reason)
                reasons.append(reason)
                if not _is_of_sizes(error):
                    break
    raise CompileError(
        "the model cannot be captured as a graph",
        reasons=reasons,
        wanted="a forward that torch.export can follow: no branch on a tensor's values, no code outside torch",
        remedy=WITHOUT_A_GRAPH,
    )


def _attempts(example: Mapping[str, Any], dynamic: bool) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield what may differ, how torch is told, and inputs: any sizes first, then the first axes, then none.

    torch takes a size of 1 as fixed, so a batch of one is doubled for the capture. It also marks the tensors it is
    given, and a forward may write into the containers, so that each attempt gets its own.
    """
    tensors = [leaf for leaf in tree_flatten(dict(example))[0] if isinstance(leaf, Tensor) and leaf.ndim]
    single = any(len(leaf) == 1 for leaf in tensors)

    def fresh(double: bool) -> dict[str, Any]:
        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return torch.cat([leaf, leaf]) if double and leaf.ndim and len(leaf) == 1 else leaf.clone()

        return tree_map(copied, dict(example))

    def marks(axes: int | None) -> Any:
        def of(leaf: Any) -> Any:
            return (
                {axis: torch.export.Dim.AUTO for axis in range(leaf.ndim)[:axes]} if isinstance(leaf, Tensor) else None
            )

        return tree_map(of, dict(example))

    if dynamic and tensors:
        for name, axes in (("any sizes", None), ("any batch", 1)):
            for double in (True, False) if single else (False,):
                yield name, marks(axes), fresh(double)
    yield "fixed sizes", None, fresh(False)


@contextmanager
def _kept_whole(model: nn.Module, kept: Mapping[str, tuple[int, ...]]) -> Iterator[None]:
    """Let the named modules answer with a single node."""
    with ExitStack() as stack:
        for name, (width, *axes) in kept.items():
            module = model.get_submodule(name)
            if "forward" not in module.__dict__:  # a module that has several names is done once
                inputs = getattr(module, "in_channels" if axes else "in_features", None)
                forward = partial(_answer, name=name, width=width, axes=axes, inputs=inputs)
                object.__setattr__(module, "forward", forward)
                stack.callback(object.__delattr__, module, "forward")
        yield


def _answer(input: Tensor, *, name: str, width: int, axes: list[int], inputs: int | None) -> Tensor:
    axis = -1 - len(axes) // 4
    if inputs is not None and input.shape[axis] != inputs:  # a condition that the graph holds for from here on
        raise CompileError(
            f"the input of `{name}` does not fit",
            got=f"{tuple(input.shape)}",
            wanted=f"{inputs} numbers on axis {axis}",
            remedy="pass an input that the model itself takes",
        )
    return KEPT(input, name, width, axes)


class _TooLateError(Exception):
    """A capture with sizes as symbols takes longer than it may."""


class _Deadline(TorchFunctionMode):
    """End a capture whose symbols grow with every layer: each operator inside looks at the processor time used."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.end = name, time.thread_time() + SYMBOL_SECONDS

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if time.thread_time() > self.end:
            raise _TooLateError(f"a graph for {self.name} takes more than {SYMBOL_SECONDS} s to capture")
        return func(*args, **(kwargs or {}))


def _graph(program: Any, leaves: Sequence[Any], spec: TreeSpec, dynamic: bool, reason: str) -> Graph:
    signature = program.graph_signature
    odd = {spec.kind.name for spec in signature.output_specs} - {"USER_OUTPUT"}
    if odd:
        raise CompileError(
            _CHANGES,
            got=", ".join(sorted(odd)),
            wanted="a forward that computes outputs and leaves buffers and inputs as they are",
            remedy=WITHOUT_A_GRAPH,
        )
    if odd_size := next(filter(_has_unknown_size, program.graph.nodes), None):
        raise CompileError(
            "a size follows from the values of a tensor",
            got=f"the result of {odd_size.target}",
            wanted="sizes that follow from those of the inputs",
            remedy=WITHOUT_A_GRAPH,
        )
    constants = {index: leaf for index, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
    guards = getattr(program, "_guards_code", None)  # torch's own name for it: there is no public one
    if dynamic and guards is None:
        raise CompileError(
            "the conditions on sizes are unknown",
            got=f"torch {torch.__version__}",
            wanted="a torch whose exported programs carry their guards, such as 2.13",
            remedy="install that torch, or compile with graph=False",
        )
    reason = reason if not dynamic else ""
    return Graph(
        _unlifted(program),
        tuple(leaves),
        Structure(spec),
        constants,
        Structure(program.call_spec.out_spec),
        tuple(map(_arithmetic, guards or ())),
        dynamic,
        reason,
    )


def _arithmetic(guard: str) -> str:
    """Return a condition in Python's own functions: torch 2.14 writes its own for the larger of two sizes."""
    return guard.replace("torch.sym_max(", "max(").replace("torch.sym_min(", "min(")


def _has_unknown_size(node: fx.Node) -> bool:
    """Tell whether a result has a size that no input's size says: of `x[mask]`, of `nonzero`."""
    found = node.meta.get("val")
    parts = found if isinstance(found, tuple | list) else [found]
    sizes = [size for part in parts for size in (part.shape if isinstance(part, Tensor) else [part])]
    return any(isinstance(size, torch.SymInt) and not size.node.has_hint() for size in sizes)


def _unlifted(program: Any) -> fx.GraphModule:
    """Return the exported graph with weights and constants as attributes, named as in the state dict."""
    root = nn.Module()
    held = {**dict(program.state_dict), **program.constants}
    targets = {
        spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.kind.name != "USER_INPUT"
    }
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in targets and not node.users:
            continue
        if node.op == "placeholder" and (target := targets.get(node.name)) is not None:
            copies[node] = attribute(graph, root, target, held[target])
            copies[node].meta |= node.meta
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(root, graph)


def attribute(graph: fx.Graph, root: nn.Module, name: str, value: Any) -> fx.Node:
    """Add a node for a weight or constant held by `root` under a flat version of its state-dict `name`."""
    flat = name.replace(".", "__")
    if not hasattr(root, flat):
        root.register_buffer(flat, value.detach() if isinstance(value, Tensor) else value, persistent=False)
    node = graph.create_node("get_attr", flat)
    node.meta["weight"] = name
    return node
