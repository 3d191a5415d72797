"""Files: whole or not there, in folders that one process writes at a time, and read within limits."""

from typing import TYPE_CHECKING, Any

from twofour.files.archive import is_archive, require_sound
from twofour.files.folder import making, names_in, remove_known
from twofour.files.lock import PATIENCE, locked
from twofour.files.named import kind_of, named
from twofour.files.reading import (
    LARGEST_LIST,
    json_or_none,
    opened,
    read_bytes,
    read_json,
    read_text,
    read_toml,
    reason,
    require_plain,
    unreadable,
)
from twofour.files.replacing import as_new, is_temporary, remove_left, replacing, writing

if TYPE_CHECKING:
    from twofour.files.memory import bytes_of

__all__ = [
    "LARGEST_LIST",
    "PATIENCE",
    "as_new",
    "bytes_of",
    "is_archive",
    "is_temporary",
    "json_or_none",
    "kind_of",
    "locked",
    "making",
    "named",
    "names_in",
    "opened",
    "read_bytes",
    "read_json",
    "read_text",
    "read_toml",
    "reason",
    "remove_known",
    "remove_left",
    "replacing",
    "require_plain",
    "require_sound",
    "unreadable",
    "writing",
]


def __getattr__(name: str) -> Any:
    if name == "bytes_of":  # of tensors: it imports torch, which files of words do not need
        from twofour.files.memory import bytes_of

        return bytes_of
    raise AttributeError(f"module 'twofour.files' has no attribute {name!r}")
