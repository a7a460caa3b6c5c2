"""What a user asked to shard, checked for its types."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config import ShardConfig
from ..errors import AlreadyShardedError, ConfigError, ConfigTypeError
from ..planning.parts import ParameterPlace
from ..runtime.placed import Placements

#: Initialises the parameters and buffers that a module holds directly.
Initializer = Callable[[nn.Module], None]


def refuse_torch_sharded(module: nn.Module, *, but: type | tuple[type, ...] = ()) -> None:
    """Raise AlreadyShardedError where torch sharded a module inside ``module``: name and rank.

    Its parameters may be ``DTensor``s, as those of tensor parallelism are, and only its class tells what cut them.
    ``but``: a drop-in's class that is one of torch's.
    """
    for name, inner in module.named_modules() if isinstance(module, nn.Module) else ():
        # A drop-in's class for its modules is torch's, too, by way of another one.
        kind = next(filter(_is_torch_sharded, type(inner).__mro__), None)
        if kind is not None and not isinstance(inner, but):
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            wraps = kind.__name__ == "FullyShardedDataParallel"
            call, drop_in = (kind.__name__, "polyshard_fsdp") if wraps else ("fully_shard", "polyshard_fsdp2")
            raise AlreadyShardedError(
                f"'{name or '(root)'}' was sharded by torch.distributed.fsdp's {call} (rank {rank}): import "
                f"{call} from {drop_in} for all of the model, or use one of them."
            )


def _is_torch_sharded(kind: type) -> bool:
    # It puts a class beside the module's own, which is no module.
    mixins = (base for base in kind.__bases__ if not issubclass(base, nn.Module))
    is_torchs = any(base.__module__.startswith("torch.distributed.fsdp") for base in mixins)
    return is_torchs and issubclass(kind, nn.Module)


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asked to shard."""

    module: nn.Module
    """A module, or ``GroupedModules``."""
    config: ShardConfig
    initializer: Initializer | None = None
    ignored_modules: Collection[nn.Module] = ()
    ignored_parameters: Collection[nn.Parameter] = ()
    composes: bool = False
    """Whether modules inside may be sharded already, and become part of the new root."""
    placements: Placements | None = None
    """How its parameters lie, where a drop-in says so."""
    placed: Mapping[nn.Parameter, ParameterPlace] = field(default_factory=dict)
    """What the drop-in says of parameters."""
    optimizers: Collection[torch.optim.Optimizer] = ()
    """Made before, and to hold the parameters that are made."""
    stays_on_meta: bool = False
    """Whether parameters and buffers on the meta device stay there until somebody gives them memory."""

    def refuse_types(self) -> None:
        """Raise ConfigTypeError for arguments of ``shard()`` that are none."""
        found = "Give objects of the model, as model.get_{}(name) finds them."
        for name, wanted, remedy in (
            ("ignored_modules", nn.Module, found.format("submodule")),
            ("ignored_parameters", torch.Tensor, found.format("parameter")),
            ("optimizers", torch.optim.Optimizer, "Give what was made over model.parameters()."),
        ):
            listed: Any = getattr(self, name)
            if isinstance(listed, nn.Module | torch.Tensor | str) or not isinstance(listed, Collection):
                raise ConfigTypeError(f"{name} is a {type(listed).__name__}, no collection. Write {name}=[...].")
            for each in listed:
                if not isinstance(each, wanted):
                    raise ConfigTypeError(f"{name} has {each!r}, which is no {wanted.__name__}. {remedy}")
        if self.initializer is not None and not callable(self.initializer):
            raise ConfigTypeError(f"initializer is {self.initializer!r}, which cannot be called. Give a function.")

    @property
    def owned_locally(self) -> frozenset[nn.Parameter]:
        """Ignored parameters of which each rank has one of its own.

        Raises:
            ConfigError: ``ignored_parameters`` says something else than ``"replicated"`` or ``"local"`` of one.
        """
        said = self.ignored_parameters if isinstance(self.ignored_parameters, Mapping) else {}
        for parameter, word in said.items():
            if word not in ("replicated", "local"):
                raise ConfigError(
                    f"ignored_parameters says {word!r} of a parameter of shape {tuple(parameter.shape)}. Write "
                    "'replicated' where all ranks train one, or 'local' where each has one of its own (an expert)."
                )
        return frozenset(parameter for parameter, word in said.items() if word == "local")
