"""What a file says of its own weights: our metadata and packed weights, compressed-tensors' config, apex's masks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twofour.checkpoints import Checkpoint, read_promise
from twofour.errors import FormatError, PatternError, cut
from twofour.files import read_json
from twofour.importing.asp import BUFFER, weight_names
from twofour.patterns import Pattern, parse

_NO_STRUCTURE = (None, "", "0:0", "unstructured")
"""What compressed-tensors writes as `sparsity_structure` where there is no N:M."""

_EXPRESSION = "re:"
_REPEATS = 4
"""How many repetitions an expression of a file may have: each multiplies the time by the name's length."""
_LONGEST = 200
"""Names over so many characters match no expression, for the same reason."""


@dataclass(frozen=True)
class ConfigPromise:
    """What the config.json of compressed-tensors promises.

    Attributes:
        pattern: Of every layer it is meant for.
        targets: Class names or layer names, "re:..." for expressions that `re.match` runs; "Linear" is what its
            compressors took.
        ignore: The same for layers left out.
    """

    pattern: Pattern
    targets: tuple[str, ...]
    ignore: tuple[str, ...]

    def covers(self, layer: str, kind: str) -> bool:
        """Whether it is meant for a layer."""
        if any(_names(target, layer) for target in self.ignore):
            return False
        linear = kind in ("linear", "attention_out")
        return any((target == "Linear" and linear) or _names(target, layer) for target in self.targets)


def _names(target: str, layer: str) -> bool:
    if not target.startswith(_EXPRESSION):
        return target == layer
    return len(layer) <= _LONGEST and re.match(target.removeprefix(_EXPRESSION), layer) is not None


def from_metadata(checkpoint: Checkpoint) -> tuple[dict[str, Pattern], dict[str, int]]:
    """Return the patterns and the reduction axes other than 1 that `twofour prune` wrote into the files' metadata.

    Raises:
        FormatError: It is malformed, or names a pattern that does not exist.
    """
    patterns: dict[str, Pattern] = {}
    axes: dict[str, int] = {}
    for file in checkpoint.files:
        said = read_promise(checkpoint.metadata[file], file)
        for name, text in said.patterns.items():
            patterns[name] = known(file, text)
        axes |= said.axes
    return patterns, axes


def known(path: Path, text: str) -> Pattern:
    """Parse a pattern that a file names.

    Raises:
        FormatError: It is none.
    """
    try:
        return parse(text)
    except PatternError as error:
        raise FormatError(
            f"{path} promises a pattern that does not exist",
            got=cut(repr(text), 80),
            wanted=error.wanted,
            remedy="check it with a pattern of your own: --expect 2:4",
        ) from error


def from_config(config: Path | None) -> ConfigPromise | None:
    """Return what a config.json promises by the `sparsity_config` of compressed-tensors, or None.

    Raises:
        FormatError: Its pattern does not exist, or an expression is none or could take for ever to match.
    """
    found = next((one for one in _sparsity_configs(config) if one.get("sparsity_structure") not in _NO_STRUCTURE), None)
    if config is None or found is None:
        return None
    structure = found["sparsity_structure"]
    targets, ignore = (_texts(found.get(key), config) for key in ("targets", "ignore"))
    if not isinstance(structure, str):
        raise FormatError(
            f"the sparsity_config of {config} is malformed",
            got=f"sparsity_structure {cut(repr(structure), 80)}",
            wanted='the text of a pattern, "2:4"',
        )
    return ConfigPromise(known(config, structure), targets or ("Linear",), ignore)


def _sparsity_configs(config: Path | None) -> Iterator[Mapping[str, Any]]:
    """Yield the places where releases of compressed-tensors have written it, the newest first."""
    try:
        content = read_json(config) if config is not None else {}
    except (OSError, ValueError):
        return  # who needs config.json for the layers says what is wrong with it
    if not isinstance(content, dict):
        return
    for around in (content.get("quantization_config"), content.get("compression_config"), content):
        if isinstance(around, dict) and isinstance(found := around.get("sparsity_config"), dict):
            yield found


def _texts(given: object, config: Path) -> tuple[str, ...]:
    texts = tuple(text for text in given if isinstance(text, str)) if isinstance(given, list) else ()
    for text in texts:
        if text.startswith(_EXPRESSION) and (why := _unfit(text.removeprefix(_EXPRESSION))):
            raise FormatError(
                f"an expression in {config} is not used",
                got=f"{cut(repr(text), 80)}: {why}",
                wanted=f"a regular expression of at most {_REPEATS} repetitions, none of them of a group",
                remedy="name the layers in `targets` and `ignore`, or take the sparsity_config out",
            )
    return texts


def _unfit(expression: str) -> str:
    """Say why an expression of an unknown author is not run, "" where it may be."""
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        return f"it does not compile: {error}"
    if re.search(r"\)[*+{]", expression):
        return "it repeats a group, which can take time exponential in the name's length"
    if (repeats := len(re.findall(r"[*+{]", expression))) > _REPEATS:
        return f"it has {repeats} repetitions"
    return ""


def apex_masks(names: Collection[str]) -> dict[str, str]:
    """Return the names of apex's masks by the names of their weights, of those whose weight is there."""
    found = [(match, name) for name in names if (match := BUFFER.fullmatch(name)) and match["kind"] == "mask"]
    weights = [next((weight for weight in weight_names(match) if weight in names), None) for match, _ in found]
    return {weight: name for weight, (_, name) in zip(weights, found, strict=True) if weight is not None}
