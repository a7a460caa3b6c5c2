"""How tensors are divided over the files of a checkpoint, and what the index says of them. No I/O."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..errors import ConfigError
from .files import INDEX, WEIGHTS

#: Files of this form are of a checkpoint in several files.
STALE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Shards:
    """The files of a checkpoint to be written."""

    files: Mapping[str, Mapping[str, tuple[torch.dtype, tuple[int, ...]]]]
    """For each file its tensors in order, with dtype and shape."""
    total_nbytes: int

    def index(self, parameters: int) -> str | None:
        """The text of the index; None where one file holds all. ``parameters``: their number of elements."""
        if list(self.files) == [WEIGHTS]:
            return None
        weight_map = {name: file for file, tensors in self.files.items() for name in tensors}
        metadata = {"total_parameters": parameters, "total_size": self.total_nbytes}
        return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"

    def names(self) -> set[str]:
        """What the folder holds of weights afterwards, the index included."""
        return {*self.files, *([] if list(self.files) == [WEIGHTS] else [INDEX])}


def divided(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], most: int) -> Shards:
    """``tensors`` in their order, in files of at most ``most`` bytes of tensors, or of one tensor that is larger."""
    groups: list[list[str]] = [[]]
    filled = total = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if groups[-1] and filled + nbytes > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
        total += nbytes
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    # Wider elements first: each then begins at a multiple of its size.
    ordered = [sorted(group, key=lambda name: (-tensors[name][0].itemsize, name)) for group in groups]
    files = zip(names if len(groups) > 1 else [WEIGHTS], ordered, strict=True)
    return Shards({file: {name: tensors[name] for name in group} for file, group in files}, total)


def nbytes_of(size: int | str) -> int:
    """``size`` in bytes: a number, or text such as ``"5GB"`` or ``"512 MiB"``.

    Raises:
        ConfigError: it is neither, or not positive.
    """
    found = size if isinstance(size, int) and not isinstance(size, bool) else 0
    if isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())):
        found = int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))
    if found <= 0:
        raise ConfigError(f"max_shard_size must be bytes above 0, a number or text such as '5GB', not {size!r}.")
    return found
