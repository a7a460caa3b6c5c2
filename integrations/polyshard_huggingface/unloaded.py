"""Initialises meta models that a checkpoint is read into afterwards: what no file has, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from fnmatch import fnmatchcase
from typing import Any

import torch
from polyshard.errors import ParameterError
from polyshard.inspect import Initializer, saved_buffers, saved_name
from polyshard.io.memory import flat_bytes
from polyshard.nested import iter_tensors
from polyshard.state.source import listed
from torch import nn

from . import _private
from .conversion import joined


def to_be_loaded(model: nn.Module, *, fresh: Collection[str] = ()) -> Initializer:
    """The initializer for ``polyshard.shard(model, initializer=...)`` where ``load`` is next.

    Parameters become NaN, so that a ``load`` that was forgotten shows in the first loss; nothing is drawn for them.
    Buffers that no file holds (rotary frequencies, masks) are computed, by the model of Transformers that the module
    belongs to, or else by the module's ``reset_parameters()``.

    Args:
        model: On the meta device, not sharded.
        fresh: Patterns (``"score.*"``) of names of parameters that the checkpoint lacks: these are initialised as the
            model says. To be named in ``load(missing=...)`` too. Seed all ranks alike before ``shard``.

    Raises:
        ParameterError: a module keeps a tensor on the meta device outside of its parameters and buffers, where nothing
            finds it. The function that is returned raises it, so that ``shard`` does, for a buffer that no file holds
            and nothing computes, and for a fresh parameter that nothing initialises.
    """
    _refuse_attributes(model)
    names = {module: saved_name(model, name) for name, module in model.named_modules()}
    persistent = frozenset(saved_name(model, name) for name in model.state_dict())
    hollow = frozenset(name for name, each in saved_buffers(model, every=True) if each.is_meta)
    owners: dict[nn.Module, Any] = {}
    for owner in filter(_private.is_pretrained, model.modules()):
        # Of several around a module the innermost.
        owners.update(dict.fromkeys(owner.modules(), owner))

    def initialise(module: nn.Module) -> None:
        if module in owners:
            owners[module]._init_weights(module)
        else:
            getattr(module, "reset_parameters", bool)()

    @torch.no_grad()
    def initializer(module: nn.Module) -> None:
        held = {joined(names[module], name): each for name, each in module.named_parameters(recurse=False)}
        # Those of other module states are on the meta device meanwhile.
        held = {name: each for name, each in held.items() if not each.is_meta}
        new = {name: each for name, each in held.items() if any(fnmatchcase(name, pattern) for pattern in fresh)}
        for parameter in new.values():
            _fill_unknown(parameter)
        buffers = {joined(names[module], key): key for key, each in module._buffers.items() if each is not None}
        if buffers or new:
            lost = _compute(module, buffers, hollow, initialise)
            if not persistent.issuperset(lost):
                raise ParameterError(
                    f"The files do not hold the buffers {listed(sorted(lost - persistent))} ({type(module).__name__}), "
                    "and the model does not say how they are computed: a model that was built on the meta device would "
                    "compute with what memory held before. Build it on the CPU, with load() after shard() as here, or "
                    "give the module a reset_parameters() method."
                )
        unset = [name for name, each in new.items() if each.is_floating_point() and bool(each.isnan().any())]
        if unset:
            raise ParameterError(
                f"{listed(unset)} ({type(module).__name__}) should be initialised afresh, but the model does not say "
                "how. Give the module a reset_parameters() method."
            )
        for name, parameter in held.items():
            if name not in new:
                _fill_unknown(parameter)

    return initializer


def _compute(
    module: nn.Module, buffers: Mapping[str, str], hollow: frozenset[str], initialise: Callable[[nn.Module], None]
) -> set[str]:
    """Initialise ``module``; returns which buffers that does not set, which are unknown then.

    Twice, over different values: what it sets comes out the same. ``buffers``: full names and keys.
    """
    before = {key: module.get_buffer(key).clone() for name, key in buffers.items() if name not in hollow}
    outcomes: list[dict[str, torch.Tensor]] = []
    for value in (0, 1):
        for name in hollow & buffers.keys():
            module.get_buffer(buffers[name]).fill_(value)
        devices = {each.device for each in module.buffers(recurse=False) if each.device.type == "cuda"}
        # What is drawn must be the same both times.
        with torch.random.fork_rng(devices=list(devices)) if not outcomes else nullcontext():
            initialise(module)
        outcomes.append({key: module.get_buffer(key).clone() for key in buffers.values()})
    for key, each in before.items():
        module.get_buffer(key).copy_(each)
    # Bits: a buffer may hold NaN on purpose.
    bits = [{key: flat_bytes(each) for key, each in outcome.items()} for outcome in outcomes]
    lost = {name for name, key in buffers.items() if name in hollow and not torch.equal(*(each[key] for each in bits))}
    for name in lost:
        _fill_unknown(module.get_buffer(buffers[name]))
    return lost


def _refuse_attributes(model: nn.Module) -> None:
    own = ("_parameters", "_buffers", "_modules")
    lost = [
        joined(name, key)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in own and any(tensor.is_meta for tensor in iter_tensors(value))
    ]
    if lost:
        raise ParameterError(
            f"The modules keep {', '.join(map(repr, lost))} as plain attributes on the meta device, where nothing "
            "would give them values. Register them as buffers, or build the model on the CPU."
        )


def _fill_unknown(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
