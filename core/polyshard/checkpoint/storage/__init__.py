"""Where checkpoints lie: local disk, or an object store behind ``fsspec``; nothing else here touches files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...io.files import path_of
from .contract import LOCK, MARKER, URL, AnyPlace, Attempt, InputFile, JobLock, OutputFile, Place, Storage, is_written
from .local import LocalStorage
from .remote import RemoteStorage, filesystem_of

_LOCAL, _REMOTE = LocalStorage(), RemoteStorage()
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
#: What ``Path`` leaves of ``s3://bucket/run``.
_CUT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/].*", re.DOTALL)


def storage_of(place: Place) -> Storage[Any]:
    return _REMOTE if isinstance(place, URL) else _LOCAL


def place_of(given: object, name: str) -> Place:
    """The argument ``name``: a ``URL`` where it begins with ``scheme://``, else a path.

    Raises ConfigTypeError: it is neither; ConfigError: it is empty, or its filesystem is not installed.
    """
    text = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if isinstance(text, str) and "://" in text:
        return _url_of(text, name)
    path = path_of(given, name)
    if isinstance(given, Path) and _CUT.fullmatch(str(given)) and not path.exists():
        raise ConfigError(
            f"{name} is {given!r}: a Path keeps one of the slashes of a URL, and would be a folder here. Give "
            f"polyshard.checkpoint.URL({str(given).replace(':/', '://', 1)!r})."
        )
    return path


def _url_of(text: str, name: str) -> URL:
    found = _URL.fullmatch(text)
    if found is None:
        raise ConfigError(f"{name} is {text!r}, and must begin with one scheme, as 's3://bucket/run' does.")
    scheme, rest = found.groups()
    if scheme.lower() in ("file", "local"):
        raise ConfigError(f"{name} is {text!r}: this machine's files have locks and renames. Give the path alone.")
    if not rest.strip("/"):
        raise ConfigError(f"{name} is {text!r}, and must name a folder behind '{scheme}://'.")
    url = URL(text)
    filesystem_of(url)
    return url
