"""The twofour file: safetensors whose sparse weights stand in the canonical packed form (docs/formats.md)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twofour.checkpoints import Checkpoint, write_tensors
from twofour.errors import FormatError, PackingError
from twofour.export.digest import DIGEST, digest_of, require_whole
from twofour.export.metadata import KEY, Description, malformed, read_description
from twofour.files import replacing, writing
from twofour.packing import Header, Packed

VALUES, INDICES, SCALES, ZEROS = ".values", ".indices", ".scales", ".zeros"

IN_THE_WAY = torch.uint8, (0,)
"""dtype and shape of the tensor that stands under a packed weight's own name: it fits no model, so that whoever takes
the file for a plain one fails at it. Without it transformers would find no weight and make up a random one."""


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


def parts_of(name: str, packed: Packed) -> dict[str, Tensor]:
    """Return the tensors that a packed weight is stored as, by their names in a file."""
    dtype, shape = IN_THE_WAY
    own = torch.empty(shape, dtype=dtype, device="cpu")
    parts = {"": own, VALUES: packed.values, INDICES: packed.indices, SCALES: packed.scales, ZEROS: packed.zeros}
    return {name + suffix: tensor for suffix, tensor in parts.items() if tensor is not None}


def require_distinct(contents: Contents) -> None:
    """Refuse contents of which two tensors would be stored under one name.

    Raises:
        FormatError: There are two.
    """
    taken = set(contents.plain)
    for name, packed in contents.packed.items():
        for part in parts_of(name, packed):
            if part in taken:
                raise FormatError(
                    "two tensors of the model have one name",
                    got=part,
                    wanted="distinct names",
                    remedy="rename a parameter or buffer",
                )
            taken.add(part)


def write(path: str | os.PathLike[str], contents: Contents) -> None:
    """Write the file under a temporary name in the same folder, then rename it.

    Raises:
        FormatError: Two tensors have one name, or the file cannot be written.
    """
    target = Path(path)
    require_distinct(contents)
    tensors = dict(contents.plain)
    for name, packed in contents.packed.items():
        tensors |= parts_of(name, packed)
    headers = {name: packed.header.to_dict() for name, packed in contents.packed.items()}
    text = Description(headers, contents.aliases, contents.settings).to_text()
    with writing(target, FormatError), replacing(target) as temporary:
        write_tensors(temporary, tensors, {"format": "pt", KEY: text, DIGEST: digest_of(text, tensors)})


def read(path: str | os.PathLike[str], *, mapped: bool = False) -> Contents:
    """Read and validate a file or a folder: digests, headers, sizes, every index; plain safetensors are read too.

    A file may be cut, overwritten or removed afterwards. A folder holds model.safetensors, or
    model.safetensors.index.json (whose path is taken too) and the files it names.

    Args:
        path: The file or folder.
        mapped: Whether large tensors may stand on the files' own pages (`Checkpoint.map_all`); by default each is read
            into memory of its own.

    Raises:
        FormatError: Something is missing, truncated, malformed, of another version, or holds an illegal index; its
            `code` names the row of the table in docs/formats.md.
    """
    target = Path(path)
    found, tensors = Checkpoint.open_all(target, mapped=mapped)
    texts = {file: found.metadata[file].get(KEY) for file in found.files}
    described = {file: read_description(file, text) for file, text in texts.items() if text is not None}
    if not described:
        _require_nothing_packed(found.metadata, tensors)
        said = found.promise
        settings = {"patterns": said.patterns, **({"axes": said.axes} if said.axes else {})} if said.patterns else {}
        return Contents({name: tensor for part in tensors.values() for name, tensor in part.items()}, {}, {}, settings)
    first = require_one_save(target, texts, described)
    for file in described:
        require_whole(file, found.metadata[file], texts[file] or "", tensors[file])
    packed = {
        name: weight for file, part in described.items() for name, weight in packed_in(file, part.packed, tensors[file])
    }
    plain = {name: tensor for part in tensors.values() for name, tensor in part.items()}
    aliases = joined_aliases(target, described.values(), plain.keys(), packed.keys())
    return Contents(plain, packed, aliases, dict(first.settings))


def _require_nothing_packed(
    metadata: Mapping[Path, Mapping[str, str]], tensors: Mapping[Path, Mapping[str, Tensor]]
) -> None:
    """Refuse a file of ours that has lost its description, without which it would be taken for a plain one."""
    for path, part in tensors.items():
        own = [name for name, tensor in part.items() if (tensor.dtype, tuple(tensor.shape)) == IN_THE_WAY]
        packed = [name for name in own if name + VALUES in part and name + INDICES in part]
        if packed or DIGEST in metadata[path]:
            what = f"{len(packed)} packed weights, such as `{packed[0]}`" if packed else "a digest of `twofour.save`"
            got = f"{what}, and no metadata key `{KEY}`, which describes them: it is gone"
            remedy = (
                "fetch the file again, or save the model again; tools that write safetensors anew drop its metadata"
            )
            raise malformed("no-description", path, got, remedy)


def require_one_save(path: Path, files: Collection[Path], described: Mapping[Path, Description]) -> Description:
    """Return what the first file says, which all of them say of the model.

    Raises:
        FormatError: They are of different saves.
    """
    first = next(iter(described.values()))
    if len(described) < len(files) or any(other.settings != first.settings for other in described.values()):
        raise malformed("shards-differ", path, "its files are not of one save: they say different things of the model")
    return first


def joined_aliases(
    path: Path, described: Iterable[Description], plain: Iterable[str], packed: Iterable[str]
) -> dict[str, str]:
    """Join the aliases of the files; every name stands for one tensor, and every alias for one that is stored.

    Raises:
        FormatError: A name is stored packed and plain, or an alias is stored, stands twice or stands for nothing.
    """
    stored, aliases = set(plain), dict[str, str]()
    for name in packed:
        if name in stored:
            raise malformed("stored-twice", path, f"`{name}` is stored packed and plain")
    stored |= set(packed)
    for alias, name in (pair for part in described for pair in part.aliases.items()):
        if alias in stored or alias in aliases:
            raise malformed("alias-taken", path, f"`{alias}` is an alias and stored, or an alias twice")
        if name not in stored:
            raise malformed("alias-nothing", path, f"`{alias}` is said to be tied to `{name}`, which is not there")
        aliases[alias] = name
    return aliases


def packed_in(path: Path, headers: Mapping[str, Any], tensors: dict[str, Tensor]) -> Iterator[tuple[str, Packed]]:
    """Yield the packed weights of a file and take their parts out of its tensors."""
    for name, fields in headers.items():
        own = tensors.get(name)
        if own is not None and (own.dtype, tuple(own.shape)) == IN_THE_WAY:  # older files have none
            del tensors[name]
        for suffix in (VALUES, INDICES):
            if name + suffix not in tensors:
                raise malformed(f"no-{suffix[1:]}", path, f"the packed weight `{name}` lacks {name + suffix}")
        try:
            header = Header.from_dict(fields)
            scaled = header.encoding.scaled
            scales, zeros = (tensors.pop(name + suffix, None) if scaled else None for suffix in (SCALES, ZEROS))
            packed = Packed(header, tensors.pop(name + VALUES), tensors.pop(name + INDICES), scales, zeros)
            packed.validate()
        except PackingError as error:
            raise FormatError(
                f"the packed weight cannot be used: {error.what}",
                got=f"{path}: {error.got}",
                wanted=error.wanted,
                remedy=error.remedy,
                layer=name,
                code=error.code,
            ) from error
        yield name, packed


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
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
        kept[name] = tensor if whole else tensor.clone()
    return kept, aliases
