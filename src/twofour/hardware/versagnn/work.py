"""Work and Energy: what a phase takes of an engine, to be added up over phases, and its picojoules.

The picojoules are of one published table; only ratios between modes mean anything.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from operator import add


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
        return Work(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Energy:
    """Picojoules of one operation in 45 nm.

    From M. Horowitz, "Computing's energy problem (and what we can do about it)", ISSCC 2014, figure 1.1.9: float32
    multiplication 3.7 pJ and addition 0.9 pJ; 64 bits of an 8 KB memory 10 pJ, of DRAM 1.3 to 2.6 nJ (here 1.3).

    Attributes:
        multiplication: One of float32.
        addition: One of float32.
        beside: 32 bits of a memory beside the array.
        main: 32 bits of the main memory.
    """

    multiplication: float = 3.7
    addition: float = 0.9
    beside: float = 5.0
    main: float = 650.0

    def of(self, work: Work) -> float:
        """Return the picojoules of some work."""
        computed = work.products * (self.multiplication + self.addition) + work.additions * self.addition
        return computed + work.beside * self.beside + work.main * self.main
