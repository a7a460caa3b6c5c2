"""How the ranks of a benchmark agree. Errors go over the launcher's store: a collective could pair with another one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous


class Ranks:
    """The ranks of one torchrun job, one process for each device of one host."""

    def __init__(self, device_type: str, timeout: timedelta, pretended: int = 0) -> None:
        """``pretended``: a number of ranks of which this process is the first, and the others are not there."""
        if pretended:
            self._pretend(device_type, pretended)
            return
        store, rank, world_size = next(iter(rendezvous("env://", timeout=timeout)))
        self.rank: int = rank
        self.world_size: int = world_size
        self._present = world_size
        self.device = torch.device(device_type)
        if device_type == "cuda":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        dist.init_process_group(
            "nccl" if device_type == "cuda" else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=self.device if device_type == "cuda" else None,
        )
        self._store = PrefixStore("benchmark", store)
        self._meetings = 0

    def _pretend(self, device_type: str, world_size: int) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        self.rank, self.world_size, self._present = 0, world_size, 1
        self.device = torch.device(device_type, *([0] if device_type == "cuda" else []))
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        self._store = PrefixStore("benchmark", HashStore())
        self._meetings = 0

    def meet(self, error: str = "") -> str:
        """Wait for all ranks; returns the errors that any of them brought, the same text on all. Empty for none.

        Without an error a barrier follows, so that ranks leave together.
        """
        self.synchronize()
        key = f"{self._meetings}"
        self._meetings += 1
        if error:
            self._store.set(f"{key}/{self.rank}", error)
            self._store.add(f"{key}/failed", 1)
        if self._store.add(f"{key}/arrived", 1) == self._present:
            self._store.set(f"{key}/open", str(self._store.add(f"{key}/failed", 0)))
        if int(self._store.get(f"{key}/open")):
            keys = {rank: f"{key}/{rank}" for rank in range(self._present)}
            errors = {rank: self._store.get(k).decode() for rank, k in keys.items() if self._store.check([k])}
            unlike = {text.replace(f"rank {rank}", "rank ...") for rank, text in errors.items()}
            if len(unlike) == 1 and len(errors) == self._present:
                return unlike.pop()
            return "; ".join(f"rank {rank}: {text}" for rank, text in errors.items())
        if self._present == 1:
            return ""
        if self.device.type == "cuda":
            dist.barrier(device_ids=[self.device.index])
        else:
            dist.barrier()
        return ""

    def decided(self, choice: bool) -> bool:
        """Rank 0's ``choice``, on every rank."""
        key = f"{self._meetings}/choice"
        self._meetings += 1
        if self.rank == 0:
            self._store.set(key, str(int(choice)))
        return bool(int(self._store.get(key)))

    def largest(self, values: Sequence[float]) -> list[float]:
        """Each value's largest over ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def mean(self, values: Sequence[float]) -> list[float]:
        """Each value's mean over ranks."""
        return [total / self._present for total in self._reduced(values, dist.ReduceOp.SUM)]

    def synchronize(self) -> None:
        """Wait for what this rank's device still does."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        dist.destroy_process_group()

    def _reduced(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        if self._present > 1:
            dist.all_reduce(tensor, op=op)
        reduced: list[float] = tensor.tolist()
        return reduced
