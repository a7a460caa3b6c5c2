"""What tells whether a block of a checkpoint is the one that was written."""

from __future__ import annotations

import re
from collections.abc import Iterable

import xxhash

#: Under which a manifest keeps them.
NAME = "xxh3_128"
_TEXT = re.compile(r"[0-9a-f]{32}", re.ASCII)


def digest_of(pieces: Iterable[memoryview]) -> str:
    """The xxh3 of 128 bits of the pieces, one behind another, in hexadecimal.

    Above 20 GB/s on a core, where sha256 has 1.5: a load reads no faster than it compares. Both tell any damage; that
    nobody can make other bytes for a digest would protect nothing here, since whoever can change a file can change the
    digest as well.
    """
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def is_digest(text: str) -> bool:
    """Whether ``digest_of`` could have given ``text``."""
    return _TEXT.fullmatch(text) is not None
