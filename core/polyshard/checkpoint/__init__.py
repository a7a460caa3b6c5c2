"""Checkpoints that do not depend on how a model was sharded: directories of DCP, with digests and a commit.

A checkpoint holds every parameter whole, under its ordinary name, so it loads at another world size or strategy, and
into a model that is not sharded::

    directory = polyshard.checkpoint.save(root, step, model, optimizer, extra={"epoch": 3})
    extra = polyshard.checkpoint.load(polyshard.checkpoint.latest(root), model, optimizer)

    plain.load_state_dict(polyshard.checkpoint.read(directory)["model"])

``async_save`` writes in the background, ``verify`` compares all of a checkpoint with its digests, and ``load_dcp``
reads what FSDP2 or plain torch wrote.

A directory is one that stock ``torch.distributed.checkpoint`` reads. Beside its ``.metadata`` and ``__0_0.distcp`` and
so on there is ``manifest.json`` with the same, and the xxh3 of every 4 MiB of those, and ``COMMITTED`` with the sha256
of both and its own. Loads go by the manifest alone: nothing that is loaded is executed, and no name in a checkpoint is
looked up outside of its directory and the table of dtypes. Digests show damage, not who wrote a checkpoint.
"""

from .folder import latest
from .foreign import DcpKeys, load_dcp
from .loading import load
from .parts import Stages
from .pending import PendingSave
from .reading import read, verify
from .saving import async_save, save
from .storage import URL

__all__ = [
    "URL",
    "DcpKeys",
    "PendingSave",
    "Stages",
    "async_save",
    "latest",
    "load",
    "load_dcp",
    "read",
    "save",
    "verify",
]
