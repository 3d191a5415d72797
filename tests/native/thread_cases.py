"""The child of test_threads: each row of each native operation from several threads of Python at once, then by a team.

    python -m tests.native.thread_cases openmp

All threads read the same operands and write answers of their own, which must be, bit for bit, those of a call alone.
`make sanitize-threads` runs it under the thread sanitizer, which sees what calls share and what a team shares. Prints
how many calls were made by how many threads, and how many by a team.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tests.native.calls import calls
from twofour import native

THREADS = 4

Call = tuple[Callable[..., Any], list[Any]]

WRITTEN = {
    **{
        "nm_matmul": (4,),
        "nm_matmul_columns": (3,),
        "hybrid_matmul": (4,),
        "block_matmul": (4,),
        "dense_matmul": (4,),
        "nm_conv": (5,),
        "hybrid_conv": (5,),
        "dense_int4_pack": (0,),
        "dense_rows": (3,),
    },
    **{"layout_pack": (0,), "layout_unpack": (1, 2, 3, 4), "layout_refill": (0,), "attention": (4,), "norm": (4,)},
    "norm_to_bytes": (4, 5),
    "attention_of_bytes": (4,),
    **{"attention_of_columns": (4,), "nm_gradient": (5,), "nm_unbiased": (3,), "nm_compress": (2, 3), "nm_mask": (2,)},
    "nm_gradient_through": (4, 8),
    **{
        "layout_refill_kept": (0,),
        "kept_gather": (2,),
        "kept_scatter": (2,),
        "nm_sddmm": (4,),
        "nm_conv_gradient": (3,),
    },
    **{"nm_tiles": (2,), "nm_nonzero": (2,), "nm_ties": (), "nm_groups": ()},
    **{"nm_stripes_refine": (2,), "nm_stripes_assign": (2,), "fused_block": (3, 4)},
    **{"attention_of_windows": (4,), "fused_matmul": (10, 26, 30), "recurrent": (14, 15, 16), "assign_rows": (1,)},
    **{"attention_of_sequences": (4,), "take_rows": (2,), "real_tokens": (), "lay_out": (1, 2, 3)},
    **{"depthwise_conv": (4,), "dense_conv": (5,), "squeeze_excite": (6,)},
    **{
        "attention_gradient": (5, 6, 7),
        "attention_dropped": (4,),
        "activation": (4,),
        "gated_activation": (3,),
        "rotation": (4,),
        "column_sums": (2,),
        "pixel_means": (2,),
        "fill_pruned": (0,),
    },
    **{"conv_chain": (5,), "bits_matmul": (4,), "bits_conv": (7,), "window_conv": (5,)},
}
"""Places of the operands that a function writes."""

ALONE = {
    "layout_pack",
    "layout_unpack",
    "dense_int4_pack",
    "nm_ties",
    "nm_groups",
    "assign_rows",
    "real_tokens",
    "lay_out",
}
"""Functions that take no number of threads."""


def answers(call: Call) -> list[Any]:
    """Make a call with its answers in memory of their own; return them and what the call returned."""
    function, given = call
    arguments = list(given)
    for place in WRITTEN[function.__name__]:
        if isinstance(given[place], Tensor):
            arguments[place] = given[place].clone()
    returned = function(*arguments)
    return [returned, *(arguments[place] for place in WRITTEN[function.__name__])]


def require_same(call: Call, found: list[Any], alone: list[Any], how: str) -> None:
    """Raise where an answer is another than that of a call alone."""
    for one, other in zip(found, alone, strict=True):
        same = torch.equal(bits(one), bits(other)) if isinstance(one, Tensor) else one == other
        assert same, f"{call[0].__name__} {call[1][0] if isinstance(call[1][0], int) else ''} differs {how}"


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, so that NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)


def together(made: list[Call], alone: list[list[Any]], rounds: int = 2) -> None:
    """Call every row from all threads: in the same order, then, in a second round, each thread in its own."""
    gate = threading.Barrier(THREADS)

    def one(me: int) -> None:
        order = list(range(len(made)))
        for step in range(rounds):
            if step:
                random.Random(me).shuffle(order)
            for place in order:
                if not step:
                    gate.wait(60)
                require_same(made[place], answers(made[place]), alone[place], f"in thread {me} of {THREADS}")

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(one, me) for me in range(THREADS)]:
            done.result()


def teams(made: list[Call], alone: list[list[Any]]) -> tuple[list[Call], list[list[Any]]]:
    """Return the calls that take a number of threads, now of a team, and their answers."""
    found: list[tuple[Call, list[Any]]] = []
    for (function, arguments), expected in zip(made, alone, strict=True):
        if function.__name__ not in ALONE:
            place = 6 if function.__name__.startswith("nm_stripes") else len(arguments) - 1
            assert arguments[place] == 1, f"{function.__name__} takes its threads elsewhere"
            found.append(((function, [*arguments[:place], THREADS - 1, *arguments[place + 1 :]]), expected))
    return [call for call, _ in found], [expected for _, expected in found]


def main() -> None:
    """Call everything, of short operands and of longer ones; teams take their threads from the source that is named."""
    if not native.extension().use_threads(sys.argv[1], torch._C.__file__):
        sys.exit(f"this process has no threads of {sys.argv[1]}")
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-6)
    made = [*calls(), *calls(scale=5)]
    alone = [answers(call) for call in made]
    together(made, alone)
    torch.set_num_threads(THREADS)  # torch's own loop grants no more
    shared, expected = teams(made, alone)
    for call, answer in zip(shared, expected, strict=True):
        require_same(call, answers(call), answer, f"by a team of {THREADS - 1}")
    if "once" in sys.argv:
        half = len(shared) // 2  # short operands have hardly a team
        together(shared[half:], expected[half:], 1)
    else:
        together(shared, expected)
    print(len(made), "calls by", THREADS, "threads,", len(shared), "by a team")


if __name__ == "__main__":
    main()
