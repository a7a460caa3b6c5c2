"""Reads settings from a TOML file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .suggestions import did_you_mean, listed


def read_table(file: Path, table: str) -> dict[str, Any]:
    """What stands in ``[table]`` of ``file``; raises ``ConfigError`` where it cannot be read or has no such table."""
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {file}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error
    settings = document.get(table)
    if not isinstance(settings, dict):
        tables = [key for key, value in document.items() if isinstance(value, dict)]
        raise ConfigError(
            f"{file} has no table [{table}].{did_you_mean(table, tables)} Its tables: {listed(tables) or 'none'}."
        )
    return settings
