"""Sharding in Lightning: a strategy for ``lightning.Trainer``, and one for ``lightning.Fabric``.

::

    trainer = lightning.Trainer(strategy=polyshard_lightning.PolyshardStrategy(ShardConfig(...)), devices=8)
    fabric = lightning.Fabric(strategy=polyshard_lightning.PolyshardFabricStrategy(ShardConfig(...)), devices=8)

For the distribution ``lightning``; ``pytorch-lightning`` and ``lightning-fabric`` have classes of their own, which
these are not.
"""

from __future__ import annotations

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry
from polyshard.config import ShardConfig

from .fabric import PolyshardFabricStrategy
from .trainer import PolyshardStrategy, PreemptionCallback

__all__ = ["PolyshardFabricStrategy", "PolyshardStrategy", "PreemptionCallback", "register"]


def register(config: ShardConfig | None = None, *, name: str = "polyshard") -> None:
    """Let ``strategy=name`` stand for a strategy with ``config``, in ``lightning.Trainer`` and ``lightning.Fabric``.

    For programs whose strategy is text. Nothing is registered by importing this package, and the last call counts.
    """
    settings = config or ShardConfig()
    for registry, cls in ((StrategyRegistry, PolyshardStrategy), (STRATEGY_REGISTRY, PolyshardFabricStrategy)):
        registry.register(
            name, cls, description="Parameters, gradients and optimizer state sharded", override=True, config=settings
        )
