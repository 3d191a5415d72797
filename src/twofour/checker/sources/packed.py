"""What a file says of its own weights: packed forms, ours and foreign, metadata, compressed-tensors' config, masks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from twofour.checkpoints import Checkpoint, Entry
from twofour.errors import FormatError, PackingError, PatternError, cut
from twofour.export.file import IN_THE_WAY, INDICES, SCALES, VALUES, ZEROS, packed_in
from twofour.export.metadata import malformed
from twofour.files import json_or_none
from twofour.importing import Format, Source
from twofour.importing.asp import BUFFER, weight_names
from twofour.importing.bitmask import OFFSETS, SCALE, ZERO, Bitmask
from twofour.importing.bitmask import PARTS as BITMASK_PARTS
from twofour.importing.bitnet import IN_A_BYTE, WIDTHS, BitNet
from twofour.importing.marlin import PARTS as MARLIN_PARTS
from twofour.importing.marlin import Marlin
from twofour.importing.semi_structured import PARTS as TORCH_PARTS
from twofour.importing.semi_structured import SemiStructured
from twofour.packing import Header, dense_of
from twofour.packing.encodings import Bits
from twofour.patterns import Pattern, parse

_SIZES = ("I64", "I32", "I16", "I8", "U8")
"""Types that a shape is stored in."""


class Stored(Protocol):
    """A weight in a file: a tensor of its own (`checkpoints.Entry`), or one in parts."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        ...

    def read(self) -> Tensor:
        """Return its values."""
        ...


@dataclass(frozen=True)
class Ours:
    """A packed weight of our own format.

    Attributes:
        name: Its name.
        header: What its bytes say of themselves.
        parts: Where they are.
        file: The file.
        by: Who promises its pattern.
    """

    name: str
    header: Header
    parts: Mapping[str, Entry]
    file: Path
    by: str = "packed form"

    @property
    def promise(self) -> str | None:
        """The pattern that the form holds; None of a dense one."""
        return self.header.pattern if self.header.sparse else None

    @property
    def width(self) -> str | None:
        """The encoding of whole numbers of low bits; None of any other."""
        return self.header.dtype if isinstance(self.header.encoding, Bits) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense weight."""
        return self.header.shape

    def read(self) -> Tensor:
        """Validate the parts and unpack them.

        Raises:
            FormatError: They are malformed.
        """
        parts = {name: entry.read() for name, entry in self.parts.items()}
        ((_, packed),) = packed_in(self.file, {self.name: self.header.to_dict()}, parts)
        return packed.unpack()


@dataclass(frozen=True)
class Foreign:
    """A compressed weight of another library.

    Attributes:
        name: Name of the weight.
        format: What reads it.
        parts: Where its tensors are.
        file: The file or folder.
        shape: Shape of the dense weight.
        promise: The pattern that the form holds; None where it holds any.
        width: Widths of a layer of low bits, else None.
        config: The folder's config.json, where the form needs it.
    """

    name: str
    format: Format
    parts: Mapping[str, Entry]
    file: Path
    shape: tuple[int, ...]
    promise: str | None = "2:4"
    width: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def by(self) -> str:
        """Who promises the pattern."""
        return self.format.name

    def read(self) -> Tensor:
        """Validate and decompress it.

        Raises:
            FormatError: It is malformed.
        """
        source = Source(self.file, {name: entry.read() for name, entry in self.parts.items()}, self.config)
        found = self.format.decode(source, None)
        known = {**found.sparse, **found.low_bits}
        weight = known[self.name].weight if self.name in known else found.plain[self.name]
        dense = dense_of(weight)
        if tuple(dense.shape) != self.shape:
            raise FormatError(
                "a compressed weight has another shape than its parts say",
                got=f"{tuple(dense.shape)}, not {self.shape}",
                wanted="parts of one weight",
                layer=self.name,
            )
        return dense


def ours(file: Path, headers: Mapping[str, object], entries: Mapping[str, Entry]) -> Iterator[Ours]:
    """Yield the packed weights that a file's metadata describes; all parts of one stand in that file, as `load` wants.

    Raises:
        FormatError: A header is malformed, or a weight stands there packed and plain.
    """
    here = {name: entry for name, entry in entries.items() if entry.file == file}
    for name, fields in headers.items():
        own = entries.get(name)
        if own is not None and (own.torch_dtype, own.shape) != IN_THE_WAY:
            raise malformed("stored-twice", file, f"`{name}` is stored packed and plain")
        try:
            header = Header.from_dict(fields)
        except PackingError as error:
            raise FormatError(
                f"the packed weight cannot be used: {error.what}",
                got=f"{file}: {error.got}",
                wanted=error.wanted,
                layer=name,
                code=error.code,
            ) from error
        suffixes = ("", VALUES, INDICES, *((SCALES, ZEROS) if header.encoding.scaled else ()))
        yield Ours(name, header, _parts(here, (name + suffix for suffix in suffixes)), file)


def foreign(path: Path, entries: Mapping[str, Entry], config: Path | None = None) -> Iterator[Foreign]:
    """Yield the weights of compressed-tensors' compressed forms, of torch's semi-structured state dicts and of BitNet.

    Raises:
        FormatError: The parts of one do not tell its shape.
    """
    for found in (*_found(path, entries), *_bitnet(path, entries, config)):
        if len(found.shape) != 2 or min(found.shape) < 1:
            found.read()  # says what is wrong with it
        yield found


def _found(path: Path, entries: Mapping[str, Entry]) -> Iterator[Foreign]:
    for name in entries:
        stem, _, part = name.rpartition(".")
        if part == "bitmask" and f"{stem}.compressed" in entries:
            yield _bitmask(path, stem, entries)
        elif part == MARLIN_PARTS[0] and f"{stem}.{MARLIN_PARTS[2]}" in entries:
            meta = entries[f"{stem}.{MARLIN_PARTS[2]}"].shape
            shape = (meta[1] // 2, meta[0] * 32) if len(meta) == 2 else ()
            parts = _parts(entries, (f"{stem}.{one}" for one in MARLIN_PARTS))
            yield Foreign(f"{stem}.weight", Marlin(), parts, path, shape)
        elif part == TORCH_PARTS[0] and f"{stem}.{TORCH_PARTS[1]}" in entries:
            shape = entries[name].shape
            parts = _parts(entries, (f"{stem}.{one}" for one in TORCH_PARTS))
            promise = "1:2" if entries[name].dtype == "F32" else "2:4"  # tf32
            yield Foreign(stem, SemiStructured(), parts, path, (*shape[:-1], shape[-1] * 2) if shape else (), promise)


def _bitmask(path: Path, stem: str, entries: Mapping[str, Entry]) -> Foreign:
    layer, values = stem.removesuffix(".weight"), entries[f"{stem}.compressed"].shape
    names = [f"{stem}.{one}" for one in (*BITMASK_PARTS, OFFSETS)]
    parts = _parts(entries, (*names, f"{layer}.{SCALE}", f"{layer}.{ZERO}"))
    said = entries.get(f"{stem}.shape")
    whole = said is not None and said.dtype in _SIZES and said.nbytes < 64
    shape = tuple(said.read().flatten().tolist()) if said is not None and whole else ()
    return Foreign(f"{layer}.weight", Bitmask(), parts, path, shape, "2:4" if len(values) == 2 else None)


def _bitnet(path: Path, entries: Mapping[str, Entry], config: Path | None) -> Iterator[Foreign]:
    """Yield the packed weights of a folder whose config.json says that it is of BitNet."""
    content = json_or_none(config) if config is not None else None
    said = content.get("quantization_config") if isinstance(content, dict) else None
    if not isinstance(said, dict) or said.get("quant_method") != BitNet().name:
        return
    for name, entry in entries.items():
        scale = f"{name}_scale"
        if name.endswith(".weight") and entry.dtype == "U8" and scale in entries:
            shape = (entry.shape[0] * IN_A_BYTE, *entry.shape[1:]) if entry.shape else ()
            parts = _parts(entries, (name, scale))
            yield Foreign(name, BitNet(), parts, path, shape, None, WIDTHS.name, {"quantization_config": said})


def _parts(entries: Mapping[str, Entry], names: Iterable[str]) -> dict[str, Entry]:
    return {name: entries[name] for name in names if name in entries}


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
    said = checkpoint.promises.items()
    patterns = {name: known(file, text) for file, one in said for name, text in one.patterns.items()}
    return patterns, dict(checkpoint.promise.axes)


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
    content = json_or_none(config) if config is not None else None
    if not isinstance(content, dict):
        return  # who needs config.json for the layers says what is wrong with it
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
