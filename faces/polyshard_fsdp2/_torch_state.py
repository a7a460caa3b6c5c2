"""What programs read and call of the state that FSDP2 keeps of a module, by torch's private names; and no more.

``s`` is ``module._get_fsdp_state()`` or ``fully_shard.state(module)``. Looked up in the programs' sources:

- torch 2.11 to 2.14, ``torch.distributed.pipelining``: ``post_backward()`` of the groups of all of
  ``s._state_ctx.all_states``, then ``s._root_post_backward_final_callback()``.
- torch 2.15, there: whether ``s._comm_ctx`` of two stages is one.
- OLMo-core 3.0, stages of a pipeline: as torch 2.11, without the last call.
- NeMo Automodel 0.7, ``MoEFSDPSyncMixin``: as torch 2.11, for single modules of a model too. Heads of chunked losses:
  ``s._mp_policy.param_dtype``. DeepSeek-V4: whether torch's ``_get_module_fsdp_state(module)`` is None.
- verl 0.9, ``set_reshard_after_forward``: sets ``s._auto_reshard_after_forward``, and its group's
  ``post_forward_mesh_info`` to what torch's ``_get_post_forward_mesh_info`` makes of its ``mesh_info``. Engines over
  Automodel and VeOmni: set its group's ``_training_state``.
- VeOmni, ``DistSignSGD``: ``sharded_param`` of its group's ``fsdp_params``.
- Programs that call a part of a model first: ``s._lazy_init()`` of the whole.

Torch 2.11 has one group (``s._fsdp_param_group``), and later versions a list of them (``s._fsdp_param_groups``), too.
PyTorch's own tests ask for ``s._is_root``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

from ._torch_private import FSDPState


class TorchState(FSDPState):  # type: ignore[misc]
    """The state of the modules that one call of ``fully_shard`` was given. Torch's functions know it by its class."""

    _auto_reshard_after_forward = True

    @property
    def _state_ctx(self) -> SimpleNamespace:
        return SimpleNamespace(all_states=list(self.of_model))

    @property
    def _comm_ctx(self) -> object:
        return self.of_model[0]

    @property
    def _is_root(self) -> bool:
        return self.of_model[0] is self

    @property
    def _fsdp_param_group(self) -> ParamGroup | None:
        return ParamGroup(self) if self.sharded else None

    @property
    def _fsdp_param_groups(self) -> list[ParamGroup]:
        return [ParamGroup(self)] if self.sharded else []

    @property
    def _mp_policy(self) -> object:
        return self.policy

    def _root_post_backward_final_callback(self) -> None:
        # ``post_backward`` has waited.
        return None

    def _lazy_init(self) -> None:
        self.check_root()

    @property
    @abstractmethod
    def of_model(self) -> Sequence[TorchState]:
        """Those of all modules of the model, the outermost one's first."""

    @property
    @abstractmethod
    def sharded(self) -> Sequence[nn.Parameter]:
        """The parameters of the modules; empty where they have none."""

    @property
    @abstractmethod
    def policy(self) -> object:
        """The ``MixedPrecisionPolicy`` of the call."""

    @property
    @abstractmethod
    def mesh_info(self) -> object:
        """The mesh of the call, as torch's functions know it."""

    @abstractmethod
    def check_root(self) -> None:
        """Raise what the first forward of the root would raise before it computes."""

    @abstractmethod
    def reduce_waiting(self) -> None:
        """Reduce gradients that backwards of the model left whole."""

    @abstractmethod
    def set_reshard(self, reshard: bool) -> None:
        """Whether parameters are released after forward."""


class ParamGroup:
    """The parameters of the modules that one call was given."""

    def __init__(self, state: TorchState) -> None:
        self._state = state
        self._training_state: object = None

    @property
    def fsdp_params(self) -> Sequence[Any]:
        return [SimpleNamespace(sharded_param=parameter) for parameter in self._state.sharded]

    @property
    def mesh_info(self) -> object:
        return self._state.mesh_info

    def post_backward(self) -> None:
        """Reduce what backwards left whole, where this is the first group of the model: that of all of them."""
        first = next(each for each in self._state.of_model if each.sharded)
        if first is self._state:
            first.reduce_waiting()

    def _release(self, mesh_info: object) -> None:
        self._state.set_reshard(mesh_info is not None)

    post_forward_mesh_info = property(fset=_release)
