"""Names of Transformers that it does not promise to keep, as they are in version 5.23.

- ``core_model_loading`` and ``conversion_mapping``: which names and shapes a checkpoint on the Hub has for a model
  whose modules were renamed or fused since. ``from_pretrained`` and ``save_pretrained`` alone apply them, to a whole
  model at once.
- ``_weight_conversions``: those by which ``from_pretrained`` made a model.
- ``_init_weights``: the one place where a model says how buffers that no file holds are computed.
- ``all_tied_weights_keys``, ``_keys_to_ignore_on_save``, ``_adjust_missing_and_unexpected_keys``: which tensors a class
  leaves out of its files, or does not want from them.

``tests/huggingface/test_transformers.py`` compares each with ``from_pretrained`` and ``save_pretrained``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from polyshard.errors import ConfigError, UnsupportedError
from torch import nn

from .conversion import Conversion, Made, Step, unchanged


def is_pretrained(model: nn.Module) -> bool:
    """Whether ``model`` is one of Transformers', which was imported then."""
    known: type[nn.Module] | None = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    return known is not None and isinstance(model, known)


def _library(model: nn.Module) -> tuple[Any, Any]:
    """The modules ``conversion_mapping`` and ``core_model_loading``.

    Raises UnsupportedError: there is no Transformers, or it is older than 5.23.
    """
    try:
        from transformers import __version__, conversion_mapping, core_model_loading

        lacks = f"version {__version__}" if tuple(map(int, __version__.split(".")[:2])) < (5, 23) else ""
    except ImportError as error:
        lacks = str(error)
    if lacks:
        raise UnsupportedError(
            f"How the files of {type(model).__name__} become the model, Transformers says from version 5.23 on "
            f"({lacks}). Install that."
        )
    return conversion_mapping, core_model_loading


def steps_of(
    model: Any, names: Collection[str], convert: Conversion | None, known: Collection[str] | None = None
) -> list[Step]:
    """How files with ``names`` become a model with the names ``known``; without, how a model with ``names`` is saved.

    By ``convert``, or as ``from_pretrained`` and ``save_pretrained`` do.

    Raises ConfigError: ``convert`` has something else; UnsupportedError: a conversion has no way back.
    """
    if convert is None and not is_pretrained(model):
        return unchanged(names)
    mapping, loading = _library(model)
    transforms = convert
    if transforms is None and known is None:
        transforms = getattr(model, "_weight_conversions", None)
    if transforms is None:
        transforms = mapping.get_model_conversion_mapping(model, add_legacy=known is not None)
        if known is None:
            # Whether files have such a prefix, only those say that a model was read from.
            transforms = [each for each in transforms if not isinstance(each, loading.PrefixChange)]
    kinds = loading.WeightRenaming, loading.WeightConverter
    if not isinstance(transforms, list | tuple) or not all(isinstance(each, kinds) for each in transforms):
        raise ConfigError(
            f"convert is {transforms!r}, and must be a list of WeightRenaming and WeightConverter of "
            "transformers.core_model_loading."
        )
    if known is None:
        try:
            transforms = [each.reverse_transform() for each in transforms[::-1]]
        except (NotImplementedError, ValueError) as error:
            raise UnsupportedError(
                f"{type(model).__name__} cannot be saved as its files were: a conversion has no way back "
                f"({type(error).__name__}: {error})."
            ) from error
    return _steps(loading, model, names, transforms, known)


def _steps(
    loading: Any, model: Any, names: Collection[str], transforms: Sequence[Any], known: Collection[str] | None
) -> list[Step]:
    rename = loading.rename_source_key
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, meta = getattr(model, "base_model_prefix", None) or None, dict.fromkeys(known or (), True)
    groups: dict[tuple[str, str], list[tuple[str, str | None]]] = {}
    # Experts are stacked in this order.
    for name in sorted(names, key=loading.dot_natural_key) if transforms else names:
        # Backwards, what comes out of converters is renamed.
        target, pattern = rename(name, renamings if known is not None else [], converters, prefix, meta)
        if known is not None and target not in meta and (name in meta or pattern is not None):
            target, pattern = rename(name, [], [], prefix, meta) if name in meta else (name, None)
        groups.setdefault((target, name if pattern is None else ""), []).append((name, pattern))

    def make(target: str, sources: Sequence[tuple[str, str | None]], tensors: Sequence[torch.Tensor]) -> Made:
        made: Mapping[str, Any] = {target: tensors[0]}
        if sources[0][1] is not None:
            converter = copy.deepcopy(by_pattern[sources[0][1]])
            for (name, each), tensor in zip(sources, tensors, strict=True):
                converter.add_tensor(target, name, each, tensor)
            made = converter.convert(target, model=model, config=getattr(model, "config", None))
        if known is None:
            made = {rename(name, renamings, [])[0]: each for name, each in made.items()}
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}

    return [
        Step(tuple(name for name, _ in sources), partial(make, target, sources))
        for (target, _), sources in groups.items()
    ]


def left_out_of_files(model: Any) -> tuple[Collection[str], Collection[str]]:
    """Names of tied tensors that ``save_pretrained`` does not keep, and of tensors that it leaves out."""
    found = (getattr(model, name, None) or () for name in ("all_tied_weights_keys", "_keys_to_ignore_on_save"))
    away, left_out = map(set, found)
    return away, left_out


def unwanted(model: Any, names: Collection[str]) -> set[str]:
    """Those of ``names`` that older checkpoints have, and the class of ``model`` does not want."""
    if not is_pretrained(model):
        return set()
    told = SimpleNamespace(missing_keys=set(), unexpected_keys=set(names))
    model._adjust_missing_and_unexpected_keys(told)
    return {name for name in names if name not in told.unexpected_keys}


def write_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the files beside weights in ``dtype``, or the model's, by which ``from_pretrained`` knows it."""
    if not is_pretrained(model):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype or model.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
