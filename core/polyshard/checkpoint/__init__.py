"""Checkpoints that do not depend on how a model was sharded, over ``torch.distributed.checkpoint``.

A checkpoint holds every parameter whole, under its ordinary name: ``model.<name>``, ``optimizer.state.<name>.<key>``.
It loads at another world size or strategy, and into an unsharded model by ``torch.distributed.checkpoint`` itself::

    directory = polyshard.checkpoint.save(root, step, model, optimizer, extra={"epoch": 3})
    extra = polyshard.checkpoint.load(polyshard.checkpoint.latest(root), model, optimizer)

    state = {"model": dict(plain.named_parameters())}
    torch.distributed.checkpoint.load(state, checkpoint_id=directory, no_dist=True)
"""

from ..state.contents import model_state, optimizer_state
from .folder import latest
from .store import load, save

__all__ = ["latest", "load", "model_state", "optimizer_state", "save"]
