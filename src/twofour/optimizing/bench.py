"""bench: the measuring half of `optimize` alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from twofour import calls, quantization
from twofour.compiler import compile as compile_model
from twofour.errors import OptimizeError, TwofourError
from twofour.measure import Record
from twofour.optimizing.samples import tokens_of
from twofour.optimizing.timing import SECONDS, require_known, require_smoothable, timed

OURS = "twofour"


def bench(
    model: nn.Module,
    example: Any,
    dtypes: str | Sequence[str] = "float32",
    *,
    data: Any = None,
    embeddings: str | None = None,
    smooth: bool = False,
    without: Sequence[str] = (),
    seconds: float = SECONDS,
    name: str = "model",
    tell: Callable[[str], object] = lambda what: None,
) -> Record:
    """Compile a model, dense or sparse, and time it beside the runtimes that are installed, which get the same weights.

    Args:
        model: In any mode; it stays as it is.
        example: Inputs of one call.
        dtypes: Types to compile it in, and that the runtimes may compute in.
        data: For int8: inputs from which ranges are taken once; None: ranges follow each token.
        embeddings: What tables of embeddings are kept in, as `twofour.compile` takes it.
        smooth: For int8 with data: smooth outliers, as there.
        without: Runtimes to leave out: "torch.compile", "ONNX Runtime", "OpenVINO".
        seconds: Time box of the comparison.
        name: Of the model, for the record.
        tell: Called with what is done next.

    Returns:
        The record; `record.baseline` are the runtimes, `record.meta["missing"]` says why one is not among them.

    Raises:
        OptimizeError: A runtime to leave out is unknown, smoothing is asked for without int8 or data, or the model was
            compiled in none of the types.
        CompileError: The model does not run on the example.
    """
    require_known(without)
    asked = (dtypes,) if isinstance(dtypes, str) else tuple(dtypes)
    require_smoothable(smooth, asked, data is not None)
    ours, refused = dict[str, nn.Module](), dict[str, str]()
    for dtype in asked:
        title = f"{OURS}, {dtype}"
        tell(f"compiling in {dtype}")
        try:
            ranged = {"data": data, "smooth": smooth} if dtype == "int8" else {}
            ours[title] = compile_model(model, example, dtype, embeddings=embeddings, **ranged)
        except TwofourError as error:
            if len(asked) == 1:
                raise
            refused[title] = error.got or error.what
    if not ours:
        raise OptimizeError(
            "the model was compiled in none of the types",
            reasons=[f"{title}: {why}" for title, why in refused.items()],
            wanted="one type in which it compiles",
        )
    meta = {"case": "bench", "model": name, "tokens": tokens_of(calls.Example.of(example).leaves)}
    meta |= {
        "rounded": bool(quantization.of(model)),
        "refused": refused,
        "plans": {title: str(getattr(fast, "plan", "")) for title, fast in ours.items()},
    }
    return timed(ours, model, example, asked, without=without, seconds=seconds, meta=meta, tell=tell)
