"""The twofour file: safetensors whose sparse weights stand in the canonical packed form (docs/formats.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from twofour.errors import FormatError, PackingError
from twofour.files import replacing
from twofour.packing import Header, Packed

FILE_VERSION = 1
KEY = "twofour"
"""Metadata key under which safetensors carries our JSON."""

VALUES, INDICES, SCALES, ZEROS = ".values", ".indices", ".scales", ".zeros"


@dataclass(frozen=True, eq=False)
class Contents:
    """What a file holds.

    Attributes:
        plain: Tensors as they are, by parameter or buffer name.
        packed: Packed weights, by parameter name.
        aliases: Name of a tied parameter -> name under which its tensor is stored.
        settings: What the model was compiled with: "kind" ("masked" or "compiled"), dtype, memory, tokens.
    """

    plain: dict[str, Tensor]
    packed: dict[str, Packed]
    aliases: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def write(path: str | os.PathLike[str], contents: Contents) -> None:
    """Write the file under a temporary name in the same folder, then rename it.

    Raises:
        FormatError: Two tensors have one name, or the file cannot be written.
    """
    target = Path(path)
    tensors = {name: tensor.detach().contiguous() for name, tensor in contents.plain.items()}
    for name, packed in contents.packed.items():
        parts = {VALUES: packed.values, INDICES: packed.indices, SCALES: packed.scales, ZEROS: packed.zeros}
        for suffix, tensor in parts.items():
            if name + suffix in tensors:
                raise FormatError("two tensors of the model have one name", got=name + suffix, wanted="distinct names")
            if tensor is not None:
                tensors[name + suffix] = tensor.contiguous()
    described = {
        "version": FILE_VERSION,
        "packed": {name: packed.header.to_dict() for name, packed in contents.packed.items()},
        "aliases": contents.aliases,
        "settings": contents.settings,
    }
    try:
        with replacing(target) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt", KEY: json.dumps(described)})
    except (OSError, SafetensorError) as error:
        raise FormatError("the file cannot be written", got=f"{target}: {error}", wanted="a writable path") from error


def read(path: str | os.PathLike[str]) -> Contents:
    """Read and validate a file: header, sizes and every index; plain safetensors are read too.

    Raises:
        FormatError: The file is missing, truncated, malformed, of another version, or holds an illegal index.
    """
    target = Path(path)
    try:
        with safe_open(target, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise FormatError("there is no such file", got=str(target), wanted="a .safetensors file") from error
    except (OSError, SafetensorError, ValueError) as error:
        raise FormatError(
            "the file is not readable as safetensors",
            got=f"{target}: {error}",
            wanted="a complete .safetensors file",
            remedy="compare its size with the original's: a broken copy or download is the usual cause",
        ) from error
    if KEY not in metadata:
        return Contents(tensors, {})
    described = _described(target, metadata[KEY])
    packed = {name: _packed(target, name, fields, tensors) for name, fields in described["packed"].items()}
    aliases = described["aliases"]
    for alias, name in aliases.items():
        if name not in tensors and name not in packed:
            raise _malformed(target, f"`{alias}` is said to be tied to `{name}`, which is not there")
    return Contents(tensors, packed, aliases, described["settings"])


def _described(path: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(path, f"the metadata is no JSON: {error}") from error
    if not isinstance(found, dict) or found.get("version") != FILE_VERSION:
        version = found.get("version") if isinstance(found, dict) else found
        raise FormatError(
            "the file is of another version",
            got=f"{path}: version {version!r:.40}",
            wanted=f"version {FILE_VERSION}",
            remedy="use the release of twofour that wrote it",
        )
    parts = {key: part for key in ("packed", "aliases", "settings") if isinstance(part := found.get(key), dict)}
    if len(parts) < 3:
        raise _malformed(path, "the metadata lacks packed, aliases or settings")
    if not all(isinstance(name, str) for name in parts["aliases"].values()):
        raise _malformed(path, "an alias is no name")
    return parts


def _packed(path: Path, name: str, fields: object, tensors: dict[str, Tensor]) -> Packed:
    missing = [name + suffix for suffix in (VALUES, INDICES) if name + suffix not in tensors]
    if missing:
        raise _malformed(path, f"the packed weight `{name}` lacks {', '.join(missing)}")
    try:
        header = Header.from_dict(fields)
        scales, zeros = (
            tensors.pop(name + suffix, None) if header.dtype in ("int8", "int4") else None for suffix in (SCALES, ZEROS)
        )
        packed = Packed(header, tensors.pop(name + VALUES), tensors.pop(name + INDICES), scales, zeros)
        packed.validate()
    except PackingError as error:
        raise FormatError(
            f"the packed weight cannot be used: {error.what}",
            got=f"{path}: {error.got}",
            wanted=error.wanted,
            remedy=error.remedy,
            layer=name,
        ) from error
    return packed


def _malformed(path: Path, got: str) -> FormatError:
    return FormatError(
        "the file is malformed",
        got=f"{path}: {got}",
        wanted="a file as docs/formats.md describes it",
        remedy="write it again with twofour.save",
    )


def untie(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Keep one name of each tensor that stands under several; return the rest as aliases.

    Views that only overlap are copied, since safetensors stores each tensor on its own.
    """
    first: dict[tuple[object, ...], str] = {}
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        same = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and same in first:
            aliases[name] = first[same]
            continue
        first[same] = name
        kept[name] = tensor.clone() if _is_view(tensor) else tensor
    return kept, aliases


def _is_view(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() != tensor.nbytes or not tensor.is_contiguous()
