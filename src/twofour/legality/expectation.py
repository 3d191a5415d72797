"""What a caller promises: a pattern everywhere, or patterns by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from twofour.errors import LayerError, cut
from twofour.patterns import Pattern, parse

Expect = str | Pattern | Mapping[str, str | Pattern] | None


@dataclass(frozen=True)
class Expectation:
    """A parsed promise.

    Attributes:
        named: Weight names and their patterns.
        everywhere: The pattern of every eligible weight that is not named.
    """

    named: Mapping[str, Pattern] = field(default_factory=dict)
    everywhere: Pattern | None = None

    @classmethod
    def of(cls, expect: Expect) -> Expectation:
        """Parse what a caller gave.

        Raises:
            PatternError: A pattern does not parse.
            LayerError: A name is no text.
        """
        if expect is None:
            return cls()
        if isinstance(expect, Mapping):
            if wrong := [name for name in expect if not isinstance(name, str)]:
                raise LayerError(
                    "a promise names no weight",
                    got=f"{cut(repr(wrong[0]), 80)}, of type {type(wrong[0]).__name__}",
                    wanted='names of weights, such as "encoder.fc1.weight", and their patterns',
                    remedy="the report of check(model) lists the names",
                )
            return cls({name: parse(text) for name, text in expect.items()})
        return cls(everywhere=parse(expect))

    def find(self, *names: str) -> Pattern | None:
        """Return what is promised of a weight by the first of its names that is named."""
        return next((self.named[name] for name in names if name in self.named), None)

    def require_known(self, seen: Collection[str]) -> None:
        """Refuse a promise of a weight that is not there.

        Raises:
            LayerError: A name is not among `seen`.
        """
        if missing := sorted(set(self.named) - set(seen)):
            known = sorted(seen)
            raise LayerError(
                "a promise names a weight that is not there",
                got=", ".join(missing[:5]),
                wanted=f"names among {', '.join(known[:5])}{', ...' if len(known) > 5 else ''}",
                remedy="check the model that the promise was made for",
            )
