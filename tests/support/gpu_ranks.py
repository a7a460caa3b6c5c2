"""On which devices the ranks of GPU tests compute: on one each, or all on the first.

``POLYSHARD_RANKS_ON_ONE_GPU=4`` lets so many NCCL ranks share one device. NCCL takes them because each is said to be a
host of its own. Their bytes go through loopback sockets: right or wrong shows, speed does not.
"""

from __future__ import annotations

import os

import torch

_TOGETHER = int(os.environ.get("POLYSHARD_RANKS_ON_ONE_GPU", "0"))


def gpu_ranks(most: int = 2) -> int:
    """How many ranks a test has, at ``most`` where each has a device; at least 1."""
    return _TOGETHER or max(1, min(torch.cuda.device_count(), most))


def share_device() -> bool:
    """Whether all ranks compute on one device."""
    return bool(_TOGETHER)


def device_of(rank: int) -> torch.device:
    """Where ``rank`` computes."""
    return torch.device("cuda", 0 if _TOGETHER else rank)


def settle_on_device(rank: int) -> torch.device:
    """Make ``device_of(rank)`` this process's device; to be called before the process group is made."""
    if _TOGETHER:
        os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    device = device_of(rank)
    torch.cuda.set_device(device)
    return device
