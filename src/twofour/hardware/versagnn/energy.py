"""Energy: picojoules of what an engine does, from one published table; only ratios between modes mean anything."""

from __future__ import annotations

from dataclasses import dataclass

from twofour.hardware.versagnn.work import Work


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
