"""Words for messages about names that do not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """``" Did you mean 'x'?"`` for the known word nearest to ``word``, letter case aside, or an empty string.

    ``prefix`` is put before the suggestion and takes no part in the comparison.
    """
    by_folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word.casefold(), by_folded, n=1)
    return f" Did you mean {prefix + by_folded[near[0]]!r}?" if near else ""


def listed(words: Iterable[str]) -> str:
    """``words`` with commas."""
    return ", ".join(words)
