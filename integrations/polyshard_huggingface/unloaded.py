"""Initialises meta models that a checkpoint is read into afterwards: what no file has, and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from polyshard.errors import ParameterError
from polyshard.inspect import Initializer
from polyshard.nested import iter_tensors
from torch import nn

from . import _private
from .tensors import joined


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
    return _ToBeLoaded(model, tuple(fresh))


class _ToBeLoaded:
    def __init__(self, model: nn.Module, fresh: tuple[str, ...]) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._owners = _owners(model)
        self._persistent = frozenset(model.state_dict())
        self._hollow = frozenset(name for name, each in model.named_buffers(remove_duplicate=False) if each.is_meta)
        self._fresh = fresh

    def __call__(self, module: nn.Module) -> None:
        prefix = self._names[module]
        buffers = {joined(prefix, key): each for key, each in module._buffers.items() if each is not None}
        parameters = {
            joined(prefix, key): each
            for key, each in module._parameters.items()
            # Those of other module states are on the meta device meanwhile.
            if each is not None and not each.is_meta
        }
        fresh = {
            name: each
            for name, each in parameters.items()
            if any(fnmatchcase(name, pattern) for pattern in self._fresh)
        }
        with torch.no_grad():
            for parameter in parameters.values():
                _fill_unknown(parameter)
            if buffers or fresh:
                self._compute(module, buffers)
            unset = [name for name, each in fresh.items() if each.is_floating_point() and bool(each.isnan().any())]
            if unset:
                raise ParameterError(
                    f"{', '.join(map(repr, unset))} ({type(module).__name__}) should be initialised afresh, but the "
                    "model does not say how. Give the module a reset_parameters() method."
                )
            for name, parameter in parameters.items():
                if name not in fresh:
                    _fill_unknown(parameter)

    def _compute(self, module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
        """Initialise ``module``, and see that this sets its buffers: twice, over different values, to the same."""
        hollow = [name for name in buffers if name in self._hollow]
        before = {name: each.clone() for name, each in buffers.items() if name not in self._hollow}
        devices = {each.device for each in buffers.values() if each.device.type == "cuda"}
        with torch.random.fork_rng(devices=list(devices)):
            # What is drawn must be the same both times.
            first = self._outcome(module, hollow, 0)
        second = self._outcome(module, hollow, 1)
        for name, value in before.items():
            buffers[name].copy_(value)
        differing = [name for name in hollow if not _same(first[name], second[name])]
        lost = [name for name in differing if name not in self._persistent]
        if lost:
            raise ParameterError(
                f"The files do not hold the buffers {', '.join(map(repr, lost))} ({type(module).__name__}), and the "
                "model does not say how they are computed: a model that was built on the meta device would compute "
                "with what memory held before. Build it on the CPU, with load() after shard() as here, or give the "
                "module a reset_parameters() method."
            )
        for name in differing:
            _fill_unknown(buffers[name])

    def _outcome(self, module: nn.Module, hollow: Collection[str], value: int) -> dict[str, torch.Tensor]:
        """The buffers ``hollow`` after initialising ``module``, where all of them were ``value`` before."""
        keys = {name: name.rpartition(".")[2] for name in hollow}
        for key in keys.values():
            _buffer(module, key).fill_(value)
        self._initialise(module)
        return {name: _buffer(module, key).clone() for name, key in keys.items()}

    def _initialise(self, module: nn.Module) -> None:
        owner: Any = self._owners.get(module)
        if owner is not None:
            # How a model of Transformers says what a module inside holds at first.
            owner._init_weights(module)
            return
        reset = getattr(module, "reset_parameters", None)
        if callable(reset):
            reset()


def _owners(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """For each module the innermost model of Transformers that it is in."""
    found: dict[nn.Module, nn.Module] = {}
    waiting: list[tuple[nn.Module, nn.Module | None]] = [(model, None)]
    while waiting:
        module, owner = waiting.pop()
        owner = module if _private.is_pretrained(module) else owner
        if owner is not None:
            found[module] = owner
        waiting += [(child, owner) for child in module.children()]
    return found


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


def _buffer(module: nn.Module, key: str) -> torch.Tensor:
    buffer = module._buffers[key]
    assert buffer is not None
    return buffer


def _fill_unknown(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    # Bits: a buffer may hold NaN on purpose.
    bits = [each.contiguous().view(-1).view(torch.uint8) for each in (first, second)]
    return first.shape == second.shape and torch.equal(bits[0], bits[1])
