"""Files: whole or not there, in folders that one process writes at a time, and read within limits."""

from twofour.files.archive import is_archive, require_sound
from twofour.files.folder import making, names_in, remove_known
from twofour.files.lock import PATIENCE, locked
from twofour.files.memory import bytes_of
from twofour.files.named import named
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

__all__ = [
    "LARGEST_LIST",
    "PATIENCE",
    "as_new",
    "bytes_of",
    "is_archive",
    "is_temporary",
    "json_or_none",
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
