"""How much is measured before a choice is made: all of it, or as much as a few seconds allow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """How long the candidates of one case are raced, and how often a case is looked at.

    Attributes:
        name: As `compile(effort=...)` spells it.
        rounds: Rounds of one race, at most.
        box: Share of its time box that a race spends.
        sure: Whether a race goes on while half of its rounds would choose otherwise.
        behind: How many times the fastest candidate's time another one may take while it is warmed up, to be timed in
            more than one round.
        looks: Looks after which a case is not measured again, in whatever doubt its order is.
    """

    name: str
    rounds: int
    box: float
    sure: bool
    behind: float
    looks: int


FULL = Effort("full", rounds=1 << 20, box=1.0, sure=True, behind=float("inf"), looks=2)

QUICK = Effort("quick", rounds=3, box=0.2, sure=False, behind=1.5, looks=1)

EFFORTS = {how.name: how for how in (FULL, QUICK)}

_current: ContextVar[Effort] = ContextVar("effort", default=FULL)


def effort() -> Effort:
    """Return the effort of the measurements that are made now."""
    return _current.get()


@contextmanager
def measuring(how: Effort) -> Iterator[None]:
    """Race with this effort inside."""
    token = _current.set(how)
    try:
        yield
    finally:
        _current.reset(token)
