"""A recipe says which layer gets which pattern, chosen by which criterion; it loads from and saves to TOML.

format = 1
criterion = "magnitude"
eligibility = "asp"
skip = ["head"]

[[rule]]
layers = "encoder.*.fc1"
pattern = "2:4"
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import nn

from twofour import criteria, masks, patterns
from twofour.criteria import Choice, Criterion
from twofour.errors import LayerError, PatternError, RecipeError
from twofour.files import named, read_toml, reason, replacing
from twofour.layers import (
    SUPPORTED,
    PrunableWeight,
    Skipped,
    is_distributed,
    matches,
    parse_globs,
    remedy_for,
    require_eligibility,
    require_matches,
    walk,
)
from twofour.patterns import Block, Hybrid, Pattern

FORMAT = 1
DENSE = "dense"

_KEYS = ("format", "criterion", "eligibility", "skip", "rule")
_RULE_KEYS = ("layers", "pattern")

UNREACHED = 0.02
"""How far the share of whole blocks that are zero may lie from what was asked for before a warning says so."""


@dataclass(frozen=True)
class Assignment:
    """What a recipe means for one model: a pattern for each weight to prune, a reason for each other one."""

    weights: tuple[tuple[PrunableWeight, Pattern], ...]
    skipped: tuple[Skipped, ...]

    def empty(self) -> LayerError:
        """The error for a model in which there is nothing to prune."""
        return LayerError(
            "nothing in the model can be pruned",
            reasons=[f"`{skipped.name}`: {skipped.reason}" for skipped in self.skipped]
            or ["the model has no parameter with two or more axes"],
            wanted=f"at least one layer ({SUPPORTED}) that a rule matches and the pattern fits",
            remedy=remedy_for(skipped.reason for skipped in self.skipped),
        )

    def tell_unreached(self, log: logging.Logger) -> None:
        """Warn of weights of so few blocks that no number of them is near the share that was asked for."""
        for weight, pattern in self.weights:
            if not isinstance(pattern, Block):
                continue
            shape = tuple(weight.reduction_last(weight.parameter).shape)
            reached = pattern.reached(shape)
            if abs(reached - pattern.sparsity) > UNREACHED:
                log.warning(
                    "`%s` ends with %.1f%% of its blocks zero where %s asks for %.1f%%: it is cut into %d of them;"
                    " smaller blocks come nearer",
                    *(weight.name, 100 * reached, pattern.name, 100 * pattern.sparsity, prod(pattern.grid(shape))),
                )

    def settled(self, model: nn.Module, criterion: Criterion) -> list[Choice]:
        """Return the masks of weights whose zeros obey their patterns already: their values are left as they are."""
        carried = masks.of(model).values()
        masked = {(mask.module, mask.attribute): (mask.pattern, mask.keep) for mask in carried}
        return criteria.settled(self.weights, criterion, masked)

    def but(self, settled: Sequence[Choice]) -> Assignment:
        """Return what is left to prune beside weights that are settled."""
        names = {choice.weight.name for choice in settled}
        return replace(self, weights=tuple(pair for pair in self.weights if pair[0].name not in names))

    def tell_settled(self, model: nn.Module, settled: Sequence[Choice], log: logging.Logger) -> None:
        """Warn of weights in which there is nothing to choose: zeros that are there already stay."""
        carried = {(mask.module, mask.attribute): mask.pattern for mask in masks.of(model).values()}
        found: dict[str, list[str]] = {}
        for choice in settled:
            weight, new = choice.weight, choice.pattern
            old = carried.get((weight.module, weight.attribute)) or _regular(weight, new)
            if old is not None and old.density < new.density:
                said = f"{old.name} already, and {new.name} makes nothing denser: what was pruned is gone, and zeros "
                said += "stand in its places until training fills them"
            else:
                said = "pruned already, its zeros stay and the criterion has nothing to choose"
            found.setdefault(f"{said}; values are left as they are", []).append(choice.weight.name)
        for said, (first, *others) in found.items():
            log.warning(
                "`%s`%s: %s; to start anew call twofour.masks.detach(model) and load the dense weights again",
                *(first, f" and {len(others)} more" if others else "", said),
            )


def _regular(weight: PrunableWeight, pattern: Pattern) -> Pattern | None:
    """Return the N:M of a pattern with dense groups where a weight without a mask is that in all groups, else None."""
    if not isinstance(pattern, Hybrid) or is_distributed(weight.parameter):
        return None
    return pattern.regular if pattern.regular.check(weight.reduction_last(weight.parameter.detach())).ok else None


@dataclass(frozen=True)
class Recipe:
    """Ordered rules from layer globs to patterns; the first glob that matches a layer decides.

    Attributes:
        rules: Pairs of a glob (see `layers.matches`) and a pattern, or None for dense.
        criterion: Which values of a group stay.
        skip: Globs of layers that stay dense whatever the rules say.
        eligibility: "asp" or "any", as in `layers.walk`.
    """

    rules: tuple[tuple[str, Pattern | None], ...]
    criterion: Criterion = field(default_factory=criteria.Magnitude)
    skip: tuple[str, ...] = ()
    eligibility: str = "asp"

    def __post_init__(self) -> None:
        require_eligibility(self.eligibility, RecipeError)
        if not self.rules:
            raise RecipeError(
                "the recipe has no rules",
                got="no rule",
                wanted='a pattern, or a mapping such as {"encoder.*": "2:4"}',
                remedy='"2:4" makes every eligible layer sparse',
            )

    @classmethod
    def parse(
        cls,
        source: str | Pattern | Mapping[str, str | Pattern] | Recipe,
        *,
        criterion: str | Criterion | None = None,
        skip: str | Sequence[str] = (),
        eligibility: str = "asp",
    ) -> Recipe:
        """Turn what a caller wrote into a recipe; a `Recipe` keeps its own criterion and rules and gains `skip`.

        Args:
            source: A pattern for every eligible layer; a mapping from globs to patterns or "dense", first match wins;
                or a recipe.
            criterion: Name of a criterion, or one. Default: the recipe's own, else "magnitude".
            skip: Further globs of layers to leave dense.
            eligibility: "asp" or "any".

        Raises:
            RecipeError: A rule is malformed, or an argument contradicts the recipe given.
            PatternError: A pattern does not parse.
        """
        globs = parse_globs(skip, kind=RecipeError)
        chosen = None if criterion is None else criteria.parse(criterion)
        if isinstance(source, Recipe):
            for name, value, default, own in (
                ("criterion", chosen, None, source.criterion),
                ("eligibility", eligibility, "asp", source.eligibility),
            ):
                if value not in (default, own):
                    raise RecipeError(
                        f"`{name}` is given twice",
                        got=f"{value} beside a recipe that says {own}",
                        wanted="one of them",
                        remedy=f"leave `{name}` out, or dataclasses.replace(recipe, {name}=...)",
                    )
            return replace(source, skip=tuple(dict.fromkeys((*source.skip, *globs))))
        if isinstance(source, Mapping):
            rules = tuple((_glob(glob), _pattern(text, glob)) for glob, text in source.items())
        else:
            rules = (("*", patterns.parse(source)),)
        return cls(rules, chosen or criteria.Magnitude(), globs, eligibility)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recipe:
        """Read a recipe from a TOML file.

        Raises:
            RecipeError: The file is missing, no TOML, or not a recipe.
        """
        path = named(path, RecipeError, "the path of a recipe")
        try:
            table = read_toml(path)
        except (OSError, ValueError) as error:
            raise RecipeError(
                f"the recipe {os.fspath(path)!r} cannot be read",
                got=reason(error),
                wanted="a TOML file in UTF-8, as Recipe.save writes it",
                remedy="look at the file: Recipe.parse(...).save(path) writes one",
            ) from error
        try:
            return _from_table(cls, table)
        except (RecipeError, PatternError) as error:
            error.what = f"{os.fspath(path)}: {error.what}"
            raise

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recipe as TOML; a reader never sees half of it.

        Raises:
            RecipeError: The file cannot be written: `path` is a folder, say, or the disk is full.
        """
        path = named(path, RecipeError, "the path of a recipe")
        try:
            with replacing(path) as temporary:
                temporary.write_text(self.to_toml(), encoding="utf-8")
        except OSError as error:
            raise RecipeError(
                f"the recipe {os.fspath(path)!r} cannot be written",
                got=str(error),
                wanted="a file name in a folder that may be written to, and room for it",
                remedy="choose another path, for instance recipe.toml",
            ) from error

    def to_toml(self) -> str:
        """Return the recipe's TOML text."""
        lines = [
            f"format = {FORMAT}",
            f"criterion = {_quote(self.criterion.name)}",
            f"eligibility = {_quote(self.eligibility)}",
            f"skip = [{', '.join(map(_quote, self.skip))}]",
        ]
        for glob, pattern in self.rules:
            name = DENSE if pattern is None else pattern.name
            lines += ["", "[[rule]]", f"layers = {_quote(glob)}", f"pattern = {_quote(name)}"]
        return "\n".join(lines) + "\n"

    @property
    def tied(self) -> tuple[str, ...]:
        """Layers that a rule names without a wildcard: they are pruned also where an embedding has their weight."""
        return tuple(glob for glob, pattern in self.rules if pattern and not set(glob) & set("*?["))

    def rule_for(self, *layers: str) -> tuple[str, Pattern | None] | None:
        """Return the first rule that matches any of the names of a (tied) layer, or None."""
        return next((rule for rule in self.rules if any(matches(rule[0], layer) for layer in layers)), None)

    def pattern_for(self, *layers: str) -> Pattern | None:
        """Return the pattern that the rules give a layer, by any of its names when it is tied; None is dense.

        `skip` and eligibility are not looked at.
        """
        rule = self.rule_for(*layers)
        return rule[1] if rule else None

    def assign(self, model: nn.Module, *, empty: bool = False) -> Assignment:
        """Lay the recipe over a model; `empty` takes weights without values too (meta device).

        Raises:
            RecipeError: A glob matches no layer.
            LayerError: A rule other than "*" asks for a pattern and no weight can be given it.
        """
        require_matches(model, (glob for glob, _ in self.rules), "a rule", RecipeError)
        found = walk(model, skip=self.skip, eligibility=self.eligibility, tied=self.tied, empty=empty)
        weights: list[tuple[PrunableWeight, Pattern]] = []
        skipped = list(found.skipped)
        for weight in found.weights:
            rule = self.rule_for(*weight.layers)
            if reason := _rule_reason(weight, rule):
                skipped.append(Skipped(weight.name, weight.layer, reason))
            elif rule and rule[1]:
                weights.append((weight, weight.lay(rule[1])))
        self._require_effect(weights, skipped)
        return Assignment(tuple(weights), tuple(skipped))

    def _require_effect(self, weights: Sequence[tuple[PrunableWeight, Pattern]], skipped: Sequence[Skipped]) -> None:
        """Refuse a rule that asks for sparse layers by name and gets none; "*" takes what there is."""
        layers = [layer for weight, _ in weights for layer in weight.layers]
        for rule in self.rules:
            glob, pattern = rule
            if pattern is None or not glob.strip("*") or any(self.rule_for(layer) == rule for layer in layers):
                continue
            reasons = [f"`{other.name}`: {other.reason}" for other in skipped if matches(glob, other.layer)]
            raise LayerError(
                f"the rule {glob!r} asks for {pattern.name} and prunes nothing",
                reasons=reasons or ["an earlier rule decides all its layers, or they have no weight"],
                wanted="a rule that prunes at least one weight",
                remedy=f'{remedy_for(reasons)}; "dense" leaves layers alone',
            )


def _rule_reason(weight: PrunableWeight, rule: tuple[str, Pattern | None] | None) -> str | None:
    if rule is None:
        return "no rule of the recipe matches it"
    glob, pattern = rule
    if pattern is None:
        return f"dense by the rule {glob!r}"
    why = weight.unfit(pattern)
    return f"weight {tuple(weight.parameter.shape)}: {why}" if why else None


def _glob(glob: Any) -> str:
    if not isinstance(glob, str) or not glob:
        raise RecipeError(
            "a rule's glob must be text",
            got=repr(glob),
            wanted='a layer name or glob, "encoder.*.fc1"',
            remedy='"*" matches every layer',
        )
    return glob


def _pattern(text: Any, glob: str) -> Pattern | None:
    try:
        return None if text == DENSE else patterns.parse(text)
    except PatternError as error:
        error.what = f"rule {glob!r}: {error.what}"
        raise


def _from_table(cls: type[Recipe], table: dict[str, Any]) -> Recipe:
    _require_keys(table, _KEYS, "the recipe")
    if table.get("format") != FORMAT:
        raise RecipeError(
            "the recipe has another format",
            got=repr(table.get("format")),
            wanted=f"format = {FORMAT}",
            remedy=f"start the file with `format = {FORMAT}`; a higher number wants a newer twofour",
        )
    rules, skip = table.get("rule", []), table.get("skip", [])
    if not isinstance(rules, list) or not all(isinstance(rule, dict) for rule in rules):
        raise RecipeError(
            "the rules are malformed",
            got=repr(rules),
            wanted="[[rule]] tables",
            remedy='[[rule]], then a line layers = "*" and a line pattern = "2:4"',
        )
    if not isinstance(skip, list) or not all(isinstance(glob, str) for glob in skip):
        raise RecipeError(
            "`skip` is malformed",
            got=repr(skip),
            wanted='a list of globs, skip = ["head"]',
            remedy="put the globs into brackets and quotes, or leave the line out",
        )
    for rule in rules:
        _require_keys(rule, _RULE_KEYS, "a rule")
        if missing := [key for key in _RULE_KEYS if key not in rule]:
            raise RecipeError(
                f"a rule lacks `{missing[0]}`",
                got=repr(rule),
                wanted='layers = "...", pattern = "..."',
                remedy=f"add `{missing[0]}` to it",
            )
    return cls(
        tuple((_glob(rule["layers"]), _pattern(rule["pattern"], rule["layers"])) for rule in rules),
        criteria.parse(table.get("criterion", "magnitude")),
        tuple(skip),
        table.get("eligibility", "asp"),
    )


def _require_keys(table: dict[str, Any], known: Sequence[str], what: str) -> None:
    for key in table:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            raise RecipeError(
                f"{what} has an unknown key",
                got=repr(key),
                wanted=", ".join(known),
                remedy=f"did you mean `{close[0]}`?" if close else "take it out",
            )


def _quote(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
