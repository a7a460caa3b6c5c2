"""Jobs that train one model together, and may be lost and come back, over torchft::

    from polyshard import ShardConfig, shard
    from polyshard_torchft import Elastic

    shard(model, ShardConfig(collectives={"name": "torchft", "lighthouse": "http://host0:29510"}))
    elastic = Elastic(model, optimizer)
    while elastic.steps < 1000:
        with elastic.step() as step:
            loss_of(model, batches[step.batch]).backward()
            if step.commits():
                optimizer.step()

``docs/elastic.md`` says what runs where.
"""

from __future__ import annotations

from .collectives import Torchft
from .elastic import Elastic, Step
from .state import Stateful

__all__ = ["Elastic", "Stateful", "Step", "Torchft"]
