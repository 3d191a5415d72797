"""Work: what a phase takes of an engine, to be added up over phases."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Cycles, operations and 32-bit words.

    Attributes:
        cycles: Of the engine, its arrays side by side.
        products: Multiply-adds that units perform, those with a zero that the mode does not skip among them.
        useful: Multiply-adds that the result needs: no zero of a sparse operand.
        additions: Of blocks, around Strassen's products.
        beside: Words read from or written to the memories beside the arrays.
        main: Words from or to the main memory, each operand and result once.
    """

    cycles: int = 0
    products: int = 0
    useful: int = 0
    additions: int = 0
    beside: float = 0
    main: float = 0

    def __add__(self, other: Work) -> Work:
        """Do one after the other."""
        return Work(
            self.cycles + other.cycles,
            self.products + other.products,
            self.useful + other.useful,
            self.additions + other.additions,
            self.beside + other.beside,
            self.main + other.main,
        )
