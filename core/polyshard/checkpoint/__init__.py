"""Checkpoints that do not depend on how a model was sharded, over ``torch.distributed.checkpoint``.

A checkpoint holds every parameter whole, under its ordinary name: ``model.<name>``, ``optimizer.state.<name>.<key>``.
It loads at another world size or strategy, and into an unsharded model by ``torch.distributed.checkpoint`` itself::

    directory = polyshard.checkpoint.save(root, step, model, optimizer, extra={"epoch": 3})
    extra = polyshard.checkpoint.load(polyshard.checkpoint.latest(root), model, optimizer)

    state = {"model": dict(plain.named_parameters())}
    torch.distributed.checkpoint.load(state, checkpoint_id=directory, no_dist=True)

``async_save`` writes in the background, and ``load_dcp`` reads what FSDP2 or plain torch wrote.
"""

from ..state.contents import model_state, optimizer_state
from .folder import latest
from .foreign import DcpKeys
from .loading import load, load_dcp
from .pending import PendingSave
from .store import async_save, save

__all__ = [
    "DcpKeys",
    "PendingSave",
    "async_save",
    "latest",
    "load",
    "load_dcp",
    "model_state",
    "optimizer_state",
    "save",
]
