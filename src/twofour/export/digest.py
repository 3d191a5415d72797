"""A digest of what a file holds: a damaged number is a number still, and no other check finds it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from twofour import native
from twofour.checkpoints import stored_bytes
from twofour.errors import FormatError, cut

DIGEST = "twofour.digest"
"""Metadata key under which a file has it, beside `twofour`."""


def digest_of(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the digest of a description and of named tensors (docs/formats.md), 16 hexadecimal digits."""
    found = _next(text, 0)
    for name in sorted(tensors):
        found = native.extension().digest(stored_bytes(tensors[name]), _next(name, found))
    return f"{found:016x}"


def require_whole(path: Path, metadata: Mapping[str, str], text: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a file whose bytes are not those that its digest is of; one without a digest is taken.

    Args:
        path: The file.
        metadata: Its metadata.
        text: Its description, as it stands there.
        tensors: All its tensors.

    Raises:
        FormatError: They are not.
    """
    said = metadata.get(DIGEST)
    if said is None or said == (found := digest_of(text, tensors)):
        return
    raise FormatError(
        "the file is damaged: its numbers, or what it says of them, are not those that were saved",
        got=f"{path}: bytes of the digest {found}, and {cut(repr(said), 40)} in its metadata",
        wanted="the bytes that twofour.save wrote",
        remedy="fetch or copy it again, or save the model again; who changed it on purpose takes the metadata key "
        f"`{DIGEST}` out",
        code="digest",
    )


def _next(text: str, seed: int) -> int:
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else nothing
    return native.extension().digest(content, seed)
