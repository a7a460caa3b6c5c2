"""Pictures as files: what matplotlib is needed for, and what can be known of a file before the work for it."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from polyshard.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_ENDINGS = (".svg", ".png", ".pdf")
_MISSING = "Drawing needs matplotlib: install polyshard[docs], or leave out --picture."


def require_drawable(file: str | Path) -> None:
    """Raise where a picture could not be written to ``file``; to be called before what takes time.

    Raises ConfigError: the ending is none of ``.svg``, ``.png`` and ``.pdf``, there is no such folder, or none that may
    be written to, or matplotlib is not installed.
    """
    path = Path(file)
    if path.suffix.lower() not in _ENDINGS:
        raise _unwritable(file, f"its ending is none of {', '.join(_ENDINGS)}")
    if not path.absolute().parent.is_dir():
        raise _unwritable(file, "there is no such folder")
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise _unwritable(file, "it is a folder" if path.is_dir() else "permission denied")
    if find_spec("matplotlib") is None:
        raise ConfigError(_MISSING)


def blank(width: float, height: float) -> Figure:
    """An empty figure, in inches. Raises ConfigError: matplotlib is not installed."""
    try:
        # No pyplot: it would choose a window system, and keep figures.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(_MISSING) from error
    return Figure(figsize=(width, height), layout="constrained")


def write(figure: Figure, file: str | Path) -> None:
    """Write ``figure`` to ``file``, whose ending says how. Words stay words in an SVG, to be searched and copied.

    Raises ConfigError: it cannot be written.
    """
    from matplotlib import rc_context

    try:
        # Without its date and random names, the same picture is the same file.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "polyshard"}):
            figure.savefig(str(file), metadata={"Date": None} if Path(file).suffix.lower() == ".svg" else None)
    except (OSError, ValueError) as error:
        raise _unwritable(file, str(error)) from error


def _unwritable(file: str | Path, why: str) -> ConfigError:
    return ConfigError(
        f"cannot write the picture {str(file)!r}: {why}. Name a file in a folder that is there, as .svg."
    )
