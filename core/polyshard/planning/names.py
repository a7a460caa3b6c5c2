"""Names in state dicts and checkpoints: paths in the model, without what wrappers add.

Three of torch's wrappers put a module of their own between a name and its parameter: ``checkpoint_wrapper``,
``torch.compile`` and ``DistributedDataParallel``. How a run saves memory or compiles is none of its state, so torch's
``get_model_state_dict`` leaves these out, and so do state dicts, checkpoints, streams and exports here: what was saved
with a wrapper loads without, and the other way round. Errors and ``explain`` may have the path, by which a module is
found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import nn

#: Parts of a path that wrappers add whatever is around them, as torch's own functions take them.
_CHECKPOINTED, _COMPILED = "_checkpoint_wrapped_module", "_orig_mod"
#: What ``DistributedDataParallel`` adds, and many other modules have.
_REPLICATED = "module"
_ADDED = re.compile(rf"(?:^|\.)(?:{_CHECKPOINTED}|{_COMPILED})(?=[.[]|$)")
_MAYBE = re.compile(rf"(?:^|\.)(?:{_CHECKPOINTED}|{_COMPILED}|{_REPLICATED})(?:\.|$)")


def without_wrappers(name: str) -> str:
    """``name``, of which no model is known, without what can be a wrapper's alone. A unit's ends in brackets."""
    return _ADDED.sub("", name).lstrip(".") if "_mod" in name else name


def saved_name(model: nn.Module, name: str) -> str:
    """The name in state dicts of what is ``name`` in ``model``, a path to a parameter, a buffer or a module."""
    if _MAYBE.search(name) is None:
        return name
    path = name.split(".")
    return ".".join(part for part, is_added in zip(path, _added(model, path), strict=True) if not is_added)


def _added(model: nn.Module, path: list[str]) -> Iterator[bool]:
    """For each part of ``path``, from ``model`` on, whether a wrapper adds it."""
    module: nn.Module | None = model
    for part in path:
        wraps = part == _REPLICATED and isinstance(module, nn.parallel.DistributedDataParallel)
        yield wraps or part in (_CHECKPOINTED, _COMPILED)
        # Names may be without a wrapper that has come since, or of a module that moved.
        while module is not None and part not in module._modules:
            inside = (module._modules.get(wrapper) for wrapper in (_CHECKPOINTED, _COMPILED))
            module = next((each for each in inside if each is not None), None)
        module = None if module is None else module._modules[part]


def saved_parameters(model: nn.Module, *, every: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
    """``model.named_parameters()`` with names as saved. ``every``: a shared one comes under each of its names."""
    for name, parameter in model.named_parameters(remove_duplicate=not every):
        yield saved_name(model, name), parameter


def saved_buffers(model: nn.Module, *, every: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """``model.named_buffers()``, as ``saved_parameters``."""
    for name, buffer in model.named_buffers(remove_duplicate=not every):
        yield saved_name(model, name), buffer
