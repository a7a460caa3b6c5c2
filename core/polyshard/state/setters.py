"""State dicts into a sharded model and its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import StateError
from ..runtime.root import Root
from .agreement import together
from .held import FirstRanksSource, HeldSource
from .optimizers import Joint, Optimizers
from .options import StateOptions, StateOrigin
from .resting import resting_root
from .restore import ModelRestore, OptimizerRestore, Unmatched


def set_model_state_dict(model: nn.Module, state: Mapping[str, Any], options: StateOptions | None = None) -> Unmatched:
    """Let ``model`` have the values of ``state``, in place; returns the names that did not match, if not ``strict``.

    Tensors have the whole tensors' shapes. They may be plain, ``CheckpointTensor`` of the same sharding, or ``DTensor``
    of any, which are gathered one at a time where a rank needs other elements than it has. Values are converted to the
    model's dtypes, as ``load_state_dict`` does. A tied parameter is taken from any of its names. Every rank calls it,
    between steps.

    Raises:
        ConfigError: names are missing or unexpected, or tensors have other shapes: one error with all of it, and
            nothing was changed.
        StateError: ``model`` is not the outermost sharded module, or is inside a step or ``unsharded()``.
        RankMismatchError: another rank failed.
        CollectiveError: another rank did not come.
    """
    return _set(resting_root(model, "set_model_state_dict()"), model, None, state, None, options or StateOptions())


def set_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizers, state: Mapping[str, Any], options: StateOptions | None = None
) -> None:
    """Let ``optimizer`` have ``state``, of the form that ``get_optimizer_state_dict`` gives, here or of torch.

    An optimizer that never stepped is given its state. Numbers in the groups' settings are taken over; what is on or
    off must be as it was, and so must the dtypes of states. Tensors as in ``set_model_state_dict``.

    Raises:
        ConfigError: the state is of another optimizer or model; nothing was changed.
        StateError, RankMismatchError, CollectiveError: as ``set_model_state_dict``.
    """
    root = resting_root(model, "set_optimizer_state_dict()")
    _set(root, model, Joint(optimizer), None, state, options or StateOptions())


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateOptions | None = None,
) -> Unmatched:
    """``set_model_state_dict`` and ``set_optimizer_state_dict``, after both state dicts were found to fit."""
    root = resting_root(model, "set_state_dict()")
    return _set(root, model, Joint(optimizers), model_state_dict, optim_state_dict, options or StateOptions())


def init_optimizer_state(model: nn.Module, optimizer: Optimizers) -> None:
    """Let an optimizer that never stepped make its state, for ``torch.distributed.checkpoint.load`` to read into.

    By a step with gradients of zeros and a learning rate of zero, which leaves parameters as they are. The state counts
    that step: load another one over it before training. ``set_optimizer_state_dict`` and ``polyshard.checkpoint`` need
    no such call. Does nothing to an optimizer that has state. Every rank calls it, between steps.

    Raises:
        StateError: a parameter has a gradient, or as ``set_model_state_dict``.
    """
    root = resting_root(model, "init_optimizer_state()")
    for each in Joint(optimizer).members:
        if not each.state:
            _make_state(each, root.rank)


def _make_state(optimizer: torch.optim.Optimizer, rank: int) -> None:
    trained = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
    if any(parameter.grad is not None for parameter in trained):
        raise StateError(
            f"init_optimizer_state() found gradients (rank {rank}), and would step with zeros in their place. Call "
            "optimizer.zero_grad() first."
        )
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        for parameter in trained:
            parameter.grad = None


def _set(
    root: Root,
    model: nn.Module,
    joint: Joint | None,
    model_values: Mapping[str, Any] | None,
    optimizer_values: Mapping[str, Any] | None,
    options: StateOptions,
) -> Unmatched:
    collectives = root.collectives
    from_first = options.origin is StateOrigin.RANK_0
    targets: dict[str, Any] = {}
    unmatched = Unmatched()
    restore: OptimizerRestore | None = None
    source: HeldSource
    if from_first:
        source = FirstRanksSource.of_rank_0(model_values, optimizer_values, collectives)
    with together(collectives, "Matching the state dict"):
        if not from_first:
            source = HeldSource.of_every_rank(model_values, optimizer_values, collectives)
        if model_values is not None:
            restored = ModelRestore(source, model, root.rank, strict=options.strict, frozen=options.frozen)
            targets.update(restored.targets)
            unmatched = restored.unmatched
        if joint is not None:
            restore = OptimizerRestore(source, root, joint, None)
    if restore is not None:
        targets.update(restore.targets)
    source.agree(targets)
    source.read(targets)
    source.bring(targets)
    if restore is not None:
        restore.targets.update({key: targets[key] for key in restore.targets})
        restore.commit()
    return unmatched
