"""Torch's functions that mean whole parameters: refused for those of which this rank holds a piece.

Given a piece they would return something else without a word: a vector of other elements, the same random numbers on
every rank, a bound from the wrong fan. What stands behind their names is exchanged as in [Note: torch's functions].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize, prune

from ...errors import StateError, UnsupportedError
from .. import _torch_private
from .live_roots import Found, live_roots
from .once_imported import once_imported

_VECTORS = "inside of 'with polyshard.unsharded(model)'"
_INITIALISERS = (
    "uniform_",
    "normal_",
    "trunc_normal_",
    "eye_",
    "dirac_",
    "xavier_uniform_",
    "xavier_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "orthogonal_",
    "sparse_",
)


def guard_whole_functions() -> None:
    """Let them refuse pieces, for good. To be called once in a process."""
    utils = torch.nn.utils
    _exchange(utils.parameters_to_vector, _to_vector)
    _exchange(utils.vector_to_parameters, _from_vector)
    for name in _INITIALISERS:
        _guard_initialiser(name)
    _exchange(parametrize.register_parametrization, partial(_parametrize, "register_parametrization"))
    _exchange(parametrize.remove_parametrizations, partial(_parametrize, "remove_parametrizations"))
    _exchange(vars(prune.BasePruningMethod)["apply"].__func__, _prune)
    # These take seconds to import, which programs without tensor parallelism are spared.
    once_imported("torch.distributed.tensor", _guard_distribution)
    once_imported("torch.distributed.tensor.parallel", _guard_parallelization)


def _guard_distribution(tensors: Any) -> None:
    _exchange(tensors.distribute_tensor, _distribute_tensor)
    _exchange(tensors.distribute_module, partial(_divide, "torch.distributed.tensor.distribute_module"))


def _guard_parallelization(parallel: Any) -> None:
    _exchange(parallel.parallelize_module, partial(_divide, "torch.distributed.tensor.parallel.parallelize_module"))


def _exchange(public: Callable[..., Any], function: Callable[..., Any]) -> None:
    """``function`` gets torch's own as its first argument."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(before, *args, **kwargs)

    before = _torch_private.exchange_body(public, called)


def _to_vector(torchs: Callable[..., torch.Tensor], parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    given = list(parameters)
    _refuse_pieces("torch.nn.utils.parameters_to_vector", given, f"Call it {_VECTORS}")
    return torchs(given)


def _from_vector(torchs: Callable[..., None], vec: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
    given = list(parameters)
    instead = "Call it inside of 'with polyshard.unsharded(model, writeback=True)'"
    _refuse_pieces("torch.nn.utils.vector_to_parameters", given, instead)
    torchs(vec, given)


def _guard_initialiser(name: str) -> None:
    instead = (
        "Initialise before sharding, by shard(..., initializer=...) on the meta device, or inside of 'with "
        "polyshard.unsharded(model, writeback=True)', seeded alike on all ranks"
    )

    def called(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # A model is made of thousands of calls, hardly one of them of a sharded parameter.
        if live_roots.may_hold(tensor):
            _refuse_pieces(f"torch.nn.init.{name}", [tensor], instead)
        return before(tensor, *args, **kwargs)

    before: Callable[..., torch.Tensor] = _torch_private.exchange_body(getattr(nn.init, name), called)


def _parametrize(
    name: str, torchs: Callable[..., nn.Module], module: nn.Module, tensor_name: str, *args: Any, **kwargs: Any
) -> nn.Module:
    parametrizations = getattr(module, "parametrizations", {})
    there = [module._parameters.get(tensor_name)]
    if tensor_name in parametrizations:
        there += parametrizations[tensor_name].parameters()
    found = _first(each for each in there if each is not None)
    if found is not None:
        raise UnsupportedError(
            f"torch.nn.utils.parametrize.{name} would replace '{_name(found)}', which is sharded (rank "
            f"{found.root.rank}): what came in its place would be no part of the sharded model. Do it before sharding."
        )
    return torchs(module, tensor_name, *args, **kwargs)


def _distribute_tensor(torchs: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if live_roots.may_hold(tensor):
        instead = "Call polyshard.as_dtensor for this piece as a part of a DTensor"
        _refuse_pieces("torch.distributed.tensor.distribute_tensor", [tensor], instead)
    return torchs(tensor, *args, **kwargs)


def _divide(call: str, torchs: Callable[..., nn.Module], module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    found = _first(module.parameters())
    if found is not None:
        raise UnsupportedError(
            f"{call} would divide '{_name(found)}', which is sharded (rank {found.root.rank}), a second time, and put "
            "what is no part of the sharded model in its place. Leave it out; what tensor parallelism is to divide has "
            "to be in ignored_modules of polyshard.shard."
        )
    return torchs(module, *args, **kwargs)


def _prune(
    torchs: Callable[..., Any], cls: type[prune.BasePruningMethod], module: nn.Module, name: str, *a: Any, **k: Any
) -> Any:
    parameter = module._parameters.get(name)
    found = None if parameter is None else _first([parameter])
    if found is not None and not found.root.unsharded:
        raise UnsupportedError(
            f"torch.nn.utils.prune would replace '{_name(found)}', which is sharded (rank {found.root.rank}). Prune "
            "before sharding, or, together with prune.remove, inside of 'with polyshard.unsharded(model, "
            "writeback=True)'."
        )
    return torchs(cls, module, name, *a, **k)


def _refuse_pieces(call: str, tensors: Iterable[torch.Tensor], instead: str) -> None:
    found = _first(tensors, lambda each: each.unit.grid.shard is not None and not each.root.unsharded)
    if found is not None:
        raise StateError(
            f"{call} got '{_name(found)}', of which this rank holds a piece (rank {found.root.rank}), and means whole "
            f"parameters. {instead}."
        )


def _first(tensors: Iterable[torch.Tensor], counts: Callable[[Found], bool] = lambda _: True) -> Found | None:
    return next((each for each in live_roots.find(list(tensors)) if each is not None and counts(each)), None)


def _name(found: Found) -> str:
    return found.unit.name if found.slot is None else found.unit.parameters[found.slot].names[0]
