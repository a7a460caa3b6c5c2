"""The engine as a module around the model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from .composable import clip_grad_norm_, close, no_sync, shard, unsharded
from .config import ShardConfig
from .engine.cutting.materialize import Initializer


class FullyShardedDataParallel(nn.Module):
    """``polyshard.shard(module, config)``, with the operations as methods.

    ``module`` is sharded in place and stays reachable as ``.module``; attributes and items that the wrapper lacks are
    the module's. Parameters, buffers and state dicts keep the module's own names.
    """

    def __init__(
        self,
        module: nn.Module,
        config: ShardConfig | None = None,
        *,
        initializer: Initializer | None = None,
        ignored_modules: Collection[nn.Module] = (),
        ignored_parameters: Collection[nn.Parameter] = (),
    ) -> None:
        super().__init__()
        self.module = shard(
            module,
            config,
            initializer=initializer,
            ignored_modules=ignored_modules,
            ignored_parameters=ignored_parameters,
        )
        # state_dict() leaves ".module" out, also inside a larger model's.
        self.register_load_state_dict_pre_hook(_under_module)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward."""
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """See ``polyshard.no_sync``."""
        return no_sync(self.module)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """See ``polyshard.clip_grad_norm_``."""
        return clip_grad_norm_(self.module, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    def unsharded(self, *, writeback: bool = False) -> AbstractContextManager[None]:
        """See ``polyshard.unsharded``."""
        return unsharded(self.module, writeback=writeback)

    def close(self) -> None:
        """See ``polyshard.close``."""
        close(self.module)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's named parameters."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The module's named buffers."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state dict, under the module's own names; refused while its parameters are sharded."""
        return self.module.state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]


def _under_module(_: nn.Module, state_dict: dict[str, Any], prefix: str, *__: Any) -> None:
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[f"{prefix}module.{key[len(prefix) :]}"] = state_dict.pop(key)
