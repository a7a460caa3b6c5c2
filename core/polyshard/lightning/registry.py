"""Names of the strategies in Lightning's registries."""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from ..config import ShardConfig
from .fabric import PolyshardFabricStrategy
from .trainer import PolyshardStrategy


def register(config: ShardConfig | None = None, *, name: str = "polyshard") -> None:
    """Let ``strategy=name`` stand for a strategy with ``config``, in ``lightning.Trainer`` and ``lightning.Fabric``.

    For programs whose strategy is text. Nothing is registered by importing this package, and the last call counts.
    """
    settings = config or ShardConfig()
    for registry, cls in ((StrategyRegistry, PolyshardStrategy), (STRATEGY_REGISTRY, PolyshardFabricStrategy)):
        registry.register(
            name, cls, description="Parameters, gradients and optimizer state sharded", override=True, config=settings
        )
