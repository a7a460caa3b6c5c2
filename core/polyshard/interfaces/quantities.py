"""Sizes as users write them."""

from __future__ import annotations

import re

_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?(b?)", re.IGNORECASE)


def bytes_of(value: object) -> int | None:
    """``value``, or the bytes that it spells out: ``"4 GiB"`` is 4 x 1024**3, ``"4 GB"`` 4 x 1000**3, ``"512 B"`` 512.

    None for what is neither an int nor such text. An int may be negative: callers say what they take.
    """
    if isinstance(value, str) and (match := _BYTES.fullmatch(value.strip())) and (match[4] or not match[2]):
        base = 1024 if match[3] else 1000
        return int(float(match[1]) * base ** " kmgt".index((match[2] or " ").lower()))
    return value if isinstance(value, int) and not isinstance(value, bool) else None
