"""Sharding in Lightning: a strategy for ``lightning.Trainer``, and one for ``lightning.Fabric``.

::

    trainer = lightning.Trainer(strategy=polyshard.lightning.PolyshardStrategy(ShardConfig(...)), devices=8)
    fabric = lightning.Fabric(strategy=polyshard.lightning.PolyshardFabricStrategy(ShardConfig(...)), devices=8)

For the distribution ``lightning``; ``pytorch-lightning`` and ``lightning-fabric`` have classes of their own, which
these are not.
"""

from .common import StateDictType
from .fabric import PolyshardFabricStrategy
from .registry import register
from .trainer import PolyshardStrategy, PreemptionCallback

__all__ = ["PolyshardFabricStrategy", "PolyshardStrategy", "PreemptionCallback", "StateDictType", "register"]
