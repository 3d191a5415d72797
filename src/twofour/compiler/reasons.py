"""The words in which a plan says why a layer runs as it does."""

from __future__ import annotations

from twofour.compiler.choose import Choice
from twofour.compiler.layouts import WORTH_A_COPY

AS_FLOATS = "a file holds it as float32"
"""Of a layer that computes in whole numbers and runs dense."""

ALONE = "by itself the layer is faster dense, and keeps no packed copy"
"""Of a layer whose weight could be packed, where a graph measures it again."""


def explain(choice: Choice, tokens: int, dense_because: str, memory: str, *notes: str) -> str:
    """Say in a few words why the layer runs as it does at `tokens`.

    Args:
        choice: What was measured and chosen.
        tokens: A token count that was measured.
        dense_because: Why the weight is not packed, "" where it is.
        memory: "fast" or "small".
        notes: What else there is to say; empty ones are left out.
    """
    reason = _reason(choice, tokens, dense_because, memory)
    return "; ".join(filter(None, (f"{reason} ({choice.origin})" if choice.origin else reason, *notes)))


TIE = 1.05
"""Joined products run as one unless they take this many times as long: within that times are noise, and calls count."""


def explain_join(together: float, apart: float) -> str:
    """Say why products of one input run as one, or do not; seconds of both, raced against each other."""
    tie = ", a tie: one call" if apart < together <= TIE * apart else ""
    return f"joined: apart they take {apart / together:.2f}x its time{tie}"


def _reason(choice: Choice, tokens: int, dense_because: str, memory: str) -> str:
    if dense_because:
        return f"dense: {dense_because}"
    dense, sparse = choice.at(tokens, sparse=False), choice.at(tokens, sparse=True)
    if sparse is None:
        return "dense: no sparse kernel runs here"
    if dense is None:
        return "sparse: no dense kernel of this type runs here"
    ratio = dense / sparse
    if choice.runs(tokens).sparse:
        if ratio > 1:
            return "sparse is faster"
        small = f'memory="small" keeps packed weights alone, at {1 / ratio:.2f}x the time of dense'
        return f"sparse: {small}" if memory == "small" else f"sparse: within {WORTH_A_COPY - 1:.0%}, one copy fewer"
    if ratio <= 1:
        return f"dense: the best sparse kernel takes {1 / ratio:.2f}x its time here"
    return f"dense: sparse would gain {ratio - 1:.1%} at most, less than a further copy is worth"
