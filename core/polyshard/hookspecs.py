"""The hooks that a listener may implement, and the markers for them.

A listener is any object; a method becomes a hook implementation by ``@polyshard.hookimpl`` and may leave out arguments
that it does not need. All hooks are cold: at wrap, at a checkpoint, or once a step; the observers that
``make_observer`` returns hear of single units inside a step. Hooks run in the order in which the configuration names
the listeners. A hook that raises ends the call that it belongs to.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pluggy
import torch

from .interfaces import Observer, UnitSpec

if TYPE_CHECKING:
    from .config import ShardConfig

#: Under which pluggy knows specs and implementations.
PROJECT_NAME = "polyshard"

#: Marks a listener's method as the implementation of the hook of the same name.
hookimpl = pluggy.HookimplMarker(PROJECT_NAME)
#: Marks a specification.
hookspec = pluggy.HookspecMarker(PROJECT_NAME)


@hookspec
def before_shard(model: torch.nn.Module, config: ShardConfig) -> None:
    """``model`` is about to be sharded as ``config`` says; its parameters are still whole.

    Called on every rank, after plugins were resolved and inputs checked, before anything in the model changes.
    """


@hookspec
def after_shard(model: torch.nn.Module) -> None:
    """``model`` is sharded; its parameters are this rank's shards.

    Forward hooks may be put on its modules that look and return None. Nothing else of it may be changed.
    """


@hookspec
def on_save(model: torch.nn.Module, path: Path | str) -> None:
    """The state of ``model`` was written to the folder ``path`` and is complete. Called on every rank."""


@hookspec
def on_load(model: torch.nn.Module, path: Path | str) -> None:
    """The state of ``model`` was read back from the folder ``path``. Called on every rank."""


@hookspec
def on_progress(model: torch.nn.Module, work: str, done: int, total: int) -> None:
    """Of ``work``, such as ``"Saving runs/step-00000100"``, ``done`` of ``total`` bytes are written, or read.

    Called on every rank with its own bytes, every few MiB, on the thread that saves or loads ``model``. ``done`` grows
    to ``total``, unless the work fails. Not called for saves in the background.
    """


@hookspec
def on_replicas(model: torch.nn.Module, before: int, now: int) -> None:
    """``now`` jobs take part in the step of ``model`` that begins, and ``before`` in the last one; 0 before the first.

    Called on every rank of a job over collectives with ``replicas``, before the forward, where the two differ.
    """


@hookspec
def step_begin(model: torch.nn.Module) -> None:
    """The outermost forward of ``model`` is about to start. Must not synchronize with the device."""


@hookspec
def step_end(model: torch.nn.Module) -> None:
    """The backward of ``model`` has ended and gradients are there, in stream order. Must not synchronize."""


@hookspec
def make_observer(unit: UnitSpec) -> Observer | None:
    """An observer of ``unit`` during steps, or None. Called once for each unit, at wrap."""
