"""to_onnx: capture, lay out, check and write."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from twofour import calls
from twofour.capture.quiet import without_torchs_log
from twofour.checkpoints import describe
from twofour.compiler.replaceable import require_plain
from twofour.errors import ExportError, absent, cut, one_of
from twofour.export.kept import require_kept, warn_dense
from twofour.export.onnx import gemm, quantize, verify, weights
from twofour.export.onnx.weights import SparseWeight
from twofour.files import PATIENCE, locked, making, named, replacing, writing

logger = logging.getLogger("twofour.export")

OPSET = 20
"""What torch 2.13 translates to; TensorRT 10 and ONNX Runtime 1.17 and later read it."""

OPSETS = (18, 25)
"""The first and the last that torch's converter translates to; below, ONNX's own is tried, down to `OLDEST`."""

OLDEST = 7
"""Opset below which torch.onnx takes no number."""

LARGEST_MODEL = 1_500_000_000
"""Bytes of constants up to which they stand in the .onnx file itself, of which protobuf takes 2 GB."""

HALVES_LIMIT = 0.01
"""Default tolerance of a model in float16: some twenty roundings of 2^-11 from one product to the next, which ONNX
Runtime and torch make in other places."""

OTHER_BATCHES = (1, 3)
"""Batches that a graph with a dynamic batch is compared on besides the example's."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: The file.
        opset: Its operator set.
        error: Largest difference to the masked model in ONNX Runtime, relative to the largest output (at least 1).
        batches: The batches it was compared on.
        weights: The sparse weights, as they stand in the file.
        lost: Masked weights that are not in the graph as they are in the model: nothing is promised of them.
        dtype: "float32", or "int8" with Q/DQ.
    """

    path: Path
    opset: int
    error: float
    batches: tuple[int, ...]
    weights: tuple[SparseWeight, ...]
    lost: tuple[str, ...]
    dtype: str = "float32"

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        held = [{**vars(weight), "pattern": weight.pattern.name} for weight in self.weights]
        return {**vars(self), "path": str(self.path), "weights": held}


def to_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Any,
    *,
    dynamic: bool | Any = True,
    opset: int = OPSET,
    matmul: str = "matmul",
    dtype: str = "float32",
    data: Any = None,
    tolerance: float | None = None,
) -> Exported:
    """Write a masked model as ONNX, its sparse weights where runtimes look for 2:4, after running both.

    Linear layers become Gemm or MatMul with a constant that is 2:4 along the axis summed over, convolutions Conv.
    The file's metadata says which constants are sparse, so that `twofour check` finds them.

    Args:
        model: From `twofour.prune`, with its masks; a dense model is written too, and a warning says so.
        path: The .onnx file; with more than 1.5 GB of weights these lie beside it, in PATH.data,
            or PATH.1.data where that is taken; of the data there only those of the graph replaced go, if it was ours.
        example: As in `twofour.compile`.
        dynamic: True: the first axis of each tensor that is as long as the first tensor's may be of any length. False:
            fixed sizes. Else dynamic_shapes as torch.onnx.export takes them.
        opset: Operator set of ONNX, 18 to 25; an older one where ONNX's converter knows every node of the model.
        matmul: "matmul" leaves products of three axes and more as MatMul; "gemm" writes them as Gemm between two
            Reshape, for TensorRT 8.
        dtype: "float32", or "int8": sparse weights as int8 constants with a scale for each output behind
            DequantizeLinear, their inputs through QuantizeLinear and DequantizeLinear with one scale each.
        data: For int8: inputs, or pairs (input, target), whose largest magnitudes give the scales of the inputs.
        tolerance: Largest difference to the model that is let through; default 1e-4, float16: 0.01, int8: 0.2.

    Raises:
        ExportError: A package of the extra [onnx] is missing, the model or the example is bfloat16, the example is
            empty, the model cannot be captured, or the graph does not run, is not as sparse, or computes something
            else.
        CompileError: The model is compiled already.
    """
    path = named(path, ExportError)
    _require(model, matmul, dtype, data)
    _require_opset(opset)
    limit, example = _limit(tolerance, dtype, model), _usable(model, example)
    with calls.evaluating(model), calls.without_cache(model), torch.no_grad():
        _require_run(model, example)
        ranges = quantize.observe(model, data) if dtype == "int8" else {}
        exported = _captured(model, example, dynamic, opset)
        graph = exported.graph
        if (written := graph.opset_imports.get("")) != opset:  # the converters leave the graph as it was and only warn
            raise _no_opset(opset, f"a graph that stays at opset {written}")
        found, lost = weights.find(graph, model)
        _say_unpromised(path, found, lost)
        if matmul == "gemm":
            gemm.matmul_to_gemm(graph)
            found, lost = weights.find(graph, model)
        weights.require_legal(graph, found)
        if dtype == "int8":
            found = quantize.quantize(graph, found, ranges)
            weights.require_legal(graph, found)
        exported.metadata_props.update(describe(weights.by_initializer(found), {}))
        exported.producer_name = "twofour"
        batches = OTHER_BATCHES if dynamic is True else ()
        with _written(exported, path) as temporary:
            error = _verified(temporary, model, example, batches, limit)
    size = verify.batch_of(example)
    every = (*([size] if size is not None else []), *batches)
    return Exported(path, opset, error, every, tuple(found), tuple(lost), dtype)


def _usable(model: nn.Module, given: Any) -> calls.Example:
    """Return the example, unless it is empty, or anything is bfloat16: ONNX Runtime has no products of it on CPUs.

    Raises:
        ExportError: A parameter, a buffer or a part of the example is bfloat16, or a part of the example is empty.
    """
    example = calls.Example.of(given)
    tensors = [("the example", leaf) for leaf in example.leaves if isinstance(leaf, Tensor)]
    if empty := [tuple(leaf.shape) for _, leaf in tensors if not leaf.numel()]:
        raise ExportError(
            "the example is empty",
            got=f"a tensor of shape {empty[0]}",
            wanted="an input with values: the file is run on it and compared with the model",
            remedy="pass a sample or more; the batch is free in the file (dynamic=True)",
        )
    held = [*((f"`{name}`", value) for name, value in (*model.named_parameters(), *model.named_buffers())), *tensors]
    if wrong := [name for name, value in held if value.dtype is torch.bfloat16]:
        raise ExportError(
            "a bfloat16 model is not written as ONNX",
            got=f"{wrong[0]} in bfloat16",
            wanted="float32, float16 or float64: ONNX Runtime computes no bfloat16 on CPUs, so nothing could be proved",
            remedy="to_onnx(model.float(), ...) with example.float(); runtimes convert to 16 bits themselves (--fp16)",
        )
    return example


def _require_run(model: nn.Module, example: calls.Example) -> None:
    """Refuse an example that the model does not take: a converter's error would name the batch, or a node.

    Raises:
        ExportError: The model raises.
    """
    remedy = "an input of the model's own sizes and types: call the model on it yourself"
    with calls.explaining(ExportError, "the example", wanted=calls.FORMS, remedy=remedy):
        example.run(model)


def _say_unpromised(path: Path, found: list[SparseWeight], lost: list[str]) -> None:
    if not found and not lost:
        warn_dense(path)
    if lost:
        logger.warning("not in the graph as they are in the model, so not promised: %s", ", ".join(lost))


def _limit(tolerance: object, dtype: str, model: nn.Module) -> float:
    halves = any(parameter.dtype is torch.float16 for parameter in model.parameters())
    if tolerance is None:
        return {"float32": HALVES_LIMIT if halves else 1e-4, "int8": 0.2}[dtype]
    if not isinstance(tolerance, int | float) or not tolerance >= 0:
        raise ExportError(
            "`tolerance` is impossible",
            got=repr(tolerance),
            wanted="a number of at least 0, or None",
            remedy=f"leave it out for 1e-4, {HALVES_LIMIT:g} for float16 or 0.2 for int8",
        )
    return tolerance


def require_packages() -> None:
    """Refuse to write ONNX without what writes and runs it.

    Raises:
        ExportError: A package of the extra [onnx] is missing.
    """
    try:
        import onnx  # noqa: F401  # pyright: ignore[reportMissingImports]
        import onnx_ir  # noqa: F401  # pyright: ignore[reportMissingImports]
        import onnxruntime  # noqa: F401  # pyright: ignore[reportMissingImports]
        import onnxscript  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        what = "writing ONNX needs packages that are not installed"
        raise absent(ExportError, what, error, "onnx, onnxscript and onnxruntime", "onnx") from error


def _require(model: nn.Module, matmul: str, dtype: str, data: Any) -> None:
    require_packages()
    for what, given, known in (("matmul", matmul, ("matmul", "gemm")), ("dtype", dtype, ("float32", "int8"))):
        one_of(f"the {what} is not known", given, known, ExportError, f"{what}={known[0]!r}")
    if (data is None) != (dtype == "float32"):
        raise ExportError(
            "data are for int8, and int8 takes data",
            got=f"dtype={dtype!r}, data {'given' if data is not None else 'missing'}",
            wanted="inputs whose ranges become scales: TensorRT runs int8 kernels where both operands have one",
            remedy="pass data=loader with dtype='int8', or leave both out",
        )
    if data is not None and not isinstance(data, Iterable):
        raise ExportError(
            "there are no data to take ranges from",
            got=f"data={cut(repr(data), 80)}",
            wanted="a loader or a list of inputs, or of pairs (input, target)",
            remedy="data=[x] takes a single input",
        )
    require_plain(model)
    require_kept(model)


def _require_opset(opset: int) -> None:
    if not isinstance(opset, int) or isinstance(opset, bool) or not OLDEST <= opset <= OPSETS[1]:
        whole = isinstance(opset, int) and not isinstance(opset, bool)
        got = "a number that no operator set has, or that nothing converts to"
        raise _no_opset(opset, got if whole else f"a {type(opset).__name__}, not a whole number")


def _no_opset(opset: object, got: str) -> ExportError:
    return ExportError(
        f"opset {opset!r} cannot be written",
        got=got,
        wanted=f"{OPSETS[0]} to {OPSETS[1]}; an older one only where ONNX's converter knows every node",
        remedy=f"opset={OPSET} (--opset {OPSET})",
    )


def _captured(model: nn.Module, example: calls.Example, dynamic: Any, opset: int) -> Any:
    """Return the onnx_ir.Model of a model."""
    given = example
    if dynamic is True and verify.batch_of(example) == 1:
        given = verify.resized(example, 2)  # torch.export takes an axis of 1 for fixed
    shapes = _dynamic_shapes(given, dynamic)
    try:
        with _silent():
            program = torch.onnx.export(
                model,
                given.args,
                kwargs=given.kwargs,
                dynamo=True,
                opset_version=opset,
                dynamic_shapes=shapes,
                verbose=False,
            )
    except Exception as error:  # torch.export and the translation raise all kinds
        raise ExportError(
            "the model cannot be captured for ONNX",
            got=_reason(error),
            wanted="a model that torch.export traces, for any batch",
            remedy="dynamic=False, if the model is for one batch only; use_cache=False for decoders",
        ) from error
    assert program is not None
    return program.model


def _dynamic_shapes(example: calls.Example, dynamic: Any) -> Any:
    if dynamic is False:
        return None
    if dynamic is not True:
        return dynamic
    batch, size = torch.export.Dim("batch"), verify.batch_of(example)
    shapes = example.map(lambda leaf: {0: batch} if verify.is_batched(leaf, size) else None)
    return shapes.kwargs or shapes.args


def _reason(error: BaseException) -> str:
    """Return the line of an error, or of what it came from, that says most."""
    while error.__cause__ is not None and error.__cause__ is not error:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {cut(lines[0], 300) if lines else ''}"


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep torch's own report of an export off the screen, and the trace of a conversion that is refused below."""
    quiet = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [each.level for each in quiet]
    for each in quiet:
        each.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(None), without_torchs_log():
            warnings.simplefilter("ignore")
            yield
    finally:
        for each, level in zip(quiet, levels, strict=True):
            each.setLevel(level)


@contextlib.contextmanager
def _written(exported: Any, path: Path) -> Iterator[Path]:
    """Write the file under a temporary name for the block; it takes its place when the block ends well."""
    import onnx_ir as ir  # pyright: ignore[reportMissingImports]

    size = sum(value.const_value.nbytes for value in exported.graph.initializers.values() if value.const_value)
    with writing(path, ExportError):
        if size <= LARGEST_MODEL:
            with replacing(path) as temporary:
                ir.save(exported, temporary)
                yield temporary
            return
        with locked(path.parent, ExportError, remedy="write into another folder", wait=PATIENCE):
            beside, replaced = _free_name(path), _data_of(path)

            def put(made: Path) -> None:
                os.replace(made / beside.name, beside)
                os.replace(made / path.name, path)  # the switch: until here the old file has its own data

            with making(path, put) as folder:
                ir.save(exported, folder / path.name, external_data=beside.name)
                yield folder / path.name
            for name in replaced:
                path.with_name(name).unlink(missing_ok=True)


def _data_of(path: Path) -> set[str]:
    """Return the names of the data files of a graph that `to_onnx` wrote; another program's keeps its own."""
    import onnx  # pyright: ignore[reportMissingImports]

    if not path.is_file():
        return set()
    try:
        found = onnx.load(path, load_external_data=False)
    except Exception:  # protobuf's own errors, for a file that is no graph
        return set()
    if found.producer_name != "twofour":
        return set()
    named = {
        entry.value for tensor in found.graph.initializer for entry in tensor.external_data if entry.key == "location"
    }
    ours = re.compile(re.escape(path.name) + r"(\.\d+)?\.data")  # as `_free_name` makes them
    return {name for name in named if ours.fullmatch(name)}


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}{f'.{count}' if count else ''}.data") for count in range(10_000))
    return next(name for name in names if not name.exists())


def _verified(path: Path, model: nn.Module, example: calls.Example, batches: tuple[int, ...], limit: float) -> float:
    runner = verify.session(path)
    error = max(verify.difference(runner, model, example, batch) for batch in (None, *batches))
    if not error <= limit:
        raise ExportError(
            "the exported graph does not compute what the model does",
            got=f"a difference of {error:.2e} of the largest output in ONNX Runtime",
            wanted=f"at most {limit:g}",
            remedy="is the model random in evaluation mode? else pass a larger `tolerance`, or report it",
        )
    return error
