"""Names of Transformers that it does not promise to keep, as they are in version 5.23.

- ``core_model_loading`` and ``conversion_mapping``: which names and shapes a checkpoint on the Hub has for a model
  whose modules were renamed or fused since. ``from_pretrained`` and ``save_pretrained`` alone apply them, to whole
  tensors.
- ``_init_weights``: the one place where a model says how buffers that no file holds are computed.
- ``_keys_to_ignore_on_*``: which tensors a class leaves out of its files, or does not want from them.

``tests/huggingface/test_transformers.py`` compares each with ``from_pretrained`` and ``save_pretrained``.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from polyshard.errors import UnsupportedError
from torch import nn

from .conversion import Conversion, listed, unchanged


def is_pretrained(model: nn.Module) -> bool:
    """Whether ``model`` is one of Transformers', which was imported then."""
    known: type[nn.Module] | None = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return known is not None and isinstance(model, known)


def _conversions(model: nn.Module) -> tuple[Any, Any]:
    """The modules ``conversion_mapping`` and ``core_model_loading``.

    Raises UnsupportedError: this version of Transformers does not have them as 5.23 has.
    """
    needed = {
        "conversion_mapping": ("get_model_conversion_mapping",),
        "core_model_loading": (
            "WeightConverter",
            "WeightRenaming",
            "dot_natural_key",
            "rename_source_key",
            "revert_weight_conversion",
        ),
    }
    try:
        found = {name: importlib.import_module(f"transformers.{name}") for name in needed}
        lost = [f"{name}.{key}" for name, keys in needed.items() for key in keys if not hasattr(found[name], key)]
    except ImportError as error:
        lost = [str(error)]
    if lost:
        raise UnsupportedError(
            f"This version of Transformers does not say how the files of {type(model).__name__} become the model "
            f"({', '.join(lost)}). Take version 5.23, or pass a convert function."
        )
    return found["conversion_mapping"], found["core_model_loading"]


class _WithWholeShapes:
    """A model whose parameters have their whole shapes: conversions ask for them, and pieces have others."""

    def __init__(self, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._model = model
        self._shapes = shapes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> torch.Tensor:
        """A tensor of the whole parameter's shape, without values."""
        return torch.empty(self._shapes[name], device="meta")


def from_files(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> Conversion:
    """The conversion that ``from_pretrained`` applies to a checkpoint of ``model``. ``shapes``: of all its tensors."""
    if not is_pretrained(model):
        return unchanged
    conversion_mapping, core_model_loading = _conversions(model)

    def convert(saved: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        transforms = conversion_mapping.get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, core_model_loading.WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, core_model_loading.WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        prefix, known = model.base_model_prefix or None, dict.fromkeys(shapes, True)

        def renamed(name: str, rename: list[Any], convert: list[Any]) -> tuple[str, str | None]:
            found: tuple[str, str | None] = core_model_loading.rename_source_key(name, rename, convert, prefix, known)
            return found

        made: dict[str, torch.Tensor] = {}
        waiting: dict[str, Any] = {}
        # Experts are stacked in the order of this loop.
        for name in sorted(saved, key=core_model_loading.dot_natural_key):
            target, pattern = renamed(name, renamings, converters)
            if target not in known and name in known:
                target, pattern = renamed(name, [], [])
            if pattern is None or target not in known:
                made[target] = saved[name]
                continue
            waiting.setdefault(target, copy.deepcopy(by_pattern[pattern]))
            waiting[target].add_tensor(target, name, pattern, saved[name])
        made.update(_carried_out(waiting, _WithWholeShapes(model, shapes)))
        return made

    return convert


def to_files(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> Conversion:
    """The conversion that ``save_pretrained`` applies: the names and shapes that checkpoints on the Hub have."""
    if not is_pretrained(model):
        return unchanged
    _, core_model_loading = _conversions(model)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())

    def convert(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        kept = {name: tensor for name, tensor in tensors.items() if name not in ignored}
        try:
            made: Mapping[str, Any] = core_model_loading.revert_weight_conversion(_WithWholeShapes(model, shapes), kept)
        except UnsupportedError as error:
            raise UnsupportedError(f"{type(model).__name__} cannot be saved as Transformers does: {error}") from error
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    return convert


def left_out_of_files(model: Any) -> Callable[[str], bool]:
    """Whether the class of ``model`` leaves a tensor out when it saves."""
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ()) if is_pretrained(model) else set()
    return ignored.__contains__


def unwanted(model: Any) -> Callable[[str], bool]:
    """Whether the class of ``model`` does not want a tensor that older checkpoints have."""
    if not is_pretrained(model):
        return lambda name: False
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    # Buffers that no file has today; files of some years ago have them, under the names of then.
    buffers = [name for name, _ in model.named_buffers()]
    for name in ("rotary_emb.inv_freq", "position_ids"):
        if any(each.endswith(name) for each in buffers):
            patterns.add(rf"(^|\.){re.escape(name)}$")
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def tied_away(model: Any) -> frozenset[str]:
    """Names of tied tensors that ``save_pretrained`` does not keep."""
    if not is_pretrained(model):
        return frozenset()
    return frozenset(getattr(model, "all_tied_weights_keys", None) or ())


def write_config(model: Any, folder: Path, dtype: torch.dtype) -> list[str]:
    """Write the files beside the weights by which ``from_pretrained`` knows the model; returns their names."""
    if not is_pretrained(model):
        return []
    before = {path.name for path in folder.iterdir()}
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    return sorted({path.name for path in folder.iterdir()} - before)


def _carried_out(waiting: Mapping[str, Any], model: _WithWholeShapes) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    refused: dict[str, str] = {}
    for target, converter in waiting.items():
        try:
            found = converter.convert(target, model=model, config=model.config)
        except UnsupportedError as error:
            refused[target] = str(error)
            continue
        made.update({name: each[0] if isinstance(each, list) else each for name, each in found.items()})
    if refused:
        reasons = "\n".join(f"  {reason}" for reason in dict.fromkeys(refused.values()))
        raise UnsupportedError(
            f"What Transformers does to load {listed(list(refused))} cannot be done in parts:\n{reasons}\nPass a "
            "convert function that puts them together, or convert the checkpoint once by from_pretrained and "
            "save_pretrained(save_original_format=False)."
        )
    return made
