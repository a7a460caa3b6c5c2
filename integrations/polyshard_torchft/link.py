"""One rank's connection to the same rank of other jobs: who is there, means over them, and whether a step counts."""

from __future__ import annotations

import enum
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from polyshard.errors import CollectiveTimeoutError, PolyshardError, StateError
from polyshard.interfaces import COMPLETED, Collectives, Work

if TYPE_CHECKING:
    from torchft import Manager

    from .managed_group import ManagedGroup

#: How often a job asks a lighthouse that does not answer, before its patience ends.
_RETRIES = 1 << 30
#: Beyond all numbers of gradients, and of lineages.
_MOST = 1 << 48


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """What a ``Link`` was asked for; see ``Torchft``."""

    lighthouse: str
    min_replicas: int
    timeout: timedelta
    """Of a mean over jobs, and of a state that another job sends."""
    patience: timedelta
    """How long a job waits for enough others, or for the lighthouse."""


class Phase(enum.Enum):
    """Where a link stands."""

    APART = "apart"
    """No ``Elastic`` was made."""
    BETWEEN = "between steps"
    STEP = "inside of a step"
    BROKEN = "behind an error in a step that counts, whose update is not known to be whole: start the job again"
    CLOSED = "behind its end"


@dataclass(frozen=True, slots=True)
class Quorum:
    """Who takes part in a step. Equal on all ranks of a job."""

    rank: int
    """Which of the jobs this one is, of those that are there."""
    size: int
    """How many jobs are there."""
    steps: int
    """Steps that counted before."""
    batches: int
    """Batches of all jobs in these."""


class Link:
    """This rank of a job among the same ranks of other jobs.

    An error on the way to them voids the step: later means return at once, what they hold is of no use, and ``commit``
    answers False on all ranks of the job. Other jobs see the connection end, and void the step as well; one that had
    everything already counts it, and this job takes over its state in the next step.
    """

    def __init__(self, settings: LinkSettings, job: Collectives) -> None:
        self._settings = settings
        self._job = job
        self._phase = Phase.APART
        #: Whether the last step counted; before the first one did not.
        self._counted = False
        self._manager: Manager | None = None
        self._managed: ManagedGroup | None = None
        self._store: Any = None
        self._quorum = Quorum(0, 0, 0, 0)
        self._lost = False
        self._means = 0
        self._meeting: Any = None
        #: By which sets of jobs the steps that count were made. Another one at as many steps was trained apart.
        self.lineage = 0

    @property
    def described(self) -> str:
        if not self._quorum.size:
            return f"other jobs by {self._settings.lighthouse}, no step yet"
        return f"{self._quorum.size} job(s) by {self._settings.lighthouse} after {self._quorum.steps} step(s)"

    def open(self, take: Callable[[], Any], give: Callable[[Any], None]) -> None:
        """Connect to the lighthouse. Every rank of the job calls it, once.

        ``take`` returns this rank's state, for the same rank of another job; ``give`` takes over what that returned.
        """
        if self._phase is not Phase.APART:
            raise StateError(
                f"Elastic() was called for a model that has one, or was closed (rank {self._job.rank}). Make one for "
                "each model."
            )
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torchft import Manager

        from .managed_group import ManagedGroup

        settings, job = self._settings, self._job
        # A store of this start of the job: in torchrun's, a restarted rank would find addresses of the one before.
        address: tuple[str, int] | None = None
        if job.rank == 0:
            host = socket.gethostname()
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            address = host, self._store.port
        host, port = job.all_gather_object(address)[0]
        self._managed = ManagedGroup(job.device, settings.timeout)
        self._manager = Manager(
            pg=self._managed.group,
            load_state_dict=give,
            state_dict=take,
            min_replica_size=settings.min_replicas,
            use_async_quorum=False,
            timeout=settings.timeout,
            quorum_timeout=settings.patience,
            quorum_retries=_RETRIES,
            connect_timeout=settings.timeout,
            rank=job.rank,
            world_size=job.world_size,
            store_addr=host,
            store_port=port,
            lighthouse_addr=settings.lighthouse,
            replica_id=socket.gethostname(),
        )
        self._phase = Phase.BETWEEN

    @property
    def progress(self) -> tuple[int, int]:
        """Steps that counted, and batches of all jobs in them."""
        manager = self._require_manager("progress")
        return manager.current_step(), manager.batches_committed()

    def go_on(self, steps: int, batches: int, lineage: int) -> None:
        """Count from a checkpoint's numbers on."""
        self._require_manager("go_on").load_state_dict({"step": steps, "batches_committed": batches})
        self.lineage = lineage

    @property
    def open_step(self) -> bool:
        """Whether a step has begun that no verdict is known of."""
        return self._phase is Phase.STEP

    def begin(self) -> Quorum:
        """Find out who is there, and take over the state of others where this job is behind. Every rank calls it.

        Raises:
            StateError: ranks of this job are not equally far. Started again, it takes over what others have.
            CollectiveTimeoutError: not enough jobs came, or the lighthouse did not answer, for as long as ranks may
                wait.
        """
        manager = self._require_manager("step")
        if self._phase is not Phase.BETWEEN:
            raise StateError(f"Elastic.step() was called {self._phase.value} (rank {self._job.rank}).")
        if not self._counted:
            self._require_equally_far(manager)
        self._ask(manager)
        self._lost = manager.errored() is not None
        rank = manager.participating_rank()
        self._quorum = Quorum(
            0 if rank is None else rank, manager.num_participants(), manager.current_step(), manager.batches_committed()
        )
        if self._lost:
            self._require_wire().hang_up()
        self._meet()
        self._phase, self._means = Phase.STEP, 0
        return self._quorum

    def _meet(self) -> None:
        """Compare with the other jobs, beside the forward, what ``_agree`` looks at."""
        self._meeting = None
        self._told = torch.empty(0)
        if self._lost or self._quorum.size == 1:
            return
        # Of the last step, where it counts: a job that lost it may have averaged less.
        means = (self._means, -self._means) if self._counted else (-_MOST, -_MOST)
        told = [*means, self.lineage, -self.lineage]
        self._told = torch.tensor(told, dtype=torch.int64, device=self._job.device)
        self._meeting = self._issue(self._told, dist.ReduceOp.MAX)

    def _require_equally_far(self, manager: Manager) -> None:
        """Raise where a state reached some ranks of this job and not all of them."""
        everyone = self._job.all_gather_object((manager.current_step(), manager.batches_committed(), self.lineage))
        if len(set(everyone)) > 1:
            raise StateError(
                f"Ranks of this job are behind different steps ({', '.join(str(each[0]) for each in everyone)}; rank "
                f"{self._job.rank}): a state of another job reached some of them. Start the job again, which takes "
                "over all of it."
            )

    def _ask(self, manager: Manager) -> None:
        # Ranks of this job ask together, once: where one asked again by itself, others might be in their forward.
        try:
            manager.start_quorum()
        except PolyshardError:
            # A state that this job cannot take over.
            self._require_wire().hang_up()
            raise
        except (TimeoutError, RuntimeError) as error:
            raise CollectiveTimeoutError(
                f"No step could begin (rank {self._job.rank}): {error}. Look at the other ranks of this job; if none "
                f"ended, whether the lighthouse {self._settings.lighthouse} runs, and min_replicas jobs do: "
                f"ranks waited for {self._settings.patience.total_seconds():g} s at most."
            ) from error

    def average(self, tensor: torch.Tensor) -> Work:
        """Replace ``tensor`` (contiguous, of any floating dtype) by its mean over the jobs that are there."""
        if self._phase is not Phase.STEP:
            raise StateError(
                f"Gradients were to be averaged over other jobs {self._phase.value} (rank {self._job.rank}). Run "
                "backward inside of Elastic.step()."
            )
        self._means += 1
        if self._lost or self._quorum.size == 1:
            return COMPLETED
        # Summed in fp32: fp16 overflows in a sum that its mean would fit.
        narrow = tensor.dtype in (torch.float16, torch.bfloat16)
        with torch.no_grad():
            total = tensor.to(torch.float32) if narrow else tensor
        work = self._issue(total, dist.ReduceOp.SUM)
        return COMPLETED if work is None else _Mean(self, work, tensor, total, self._quorum.size)

    def commit(self) -> bool:
        """Whether the step counts: alike on all ranks of the job, which all call it."""
        manager = self._require_manager("commit")
        self._agree()
        try:
            counts: bool = manager.should_commit()
        except (TimeoutError, RuntimeError) as error:
            raise CollectiveTimeoutError(
                f"Ranks of this job could not say whether step {self._quorum.steps + 1} counts (rank "
                f"{self._job.rank}): {error}. Look at the other ranks of the job."
            ) from error
        self._phase, self._counted = Phase.BETWEEN, counts
        if counts:
            self.lineage = (self.lineage * 31 + self._require_wire().quorum + 1) % _MOST
        return counts

    def _agree(self) -> None:
        """Lose the step where jobs do not stand at the same place.

        Raises StateError: this job was trained apart from others, or they averaged something else.
        """
        meeting, self._meeting = self._meeting, None
        if meeting is None or not self.wait_for(meeting):
            return
        most, least, last, first = map(int, self._told.tolist())
        if most >= 0 and most != -least:
            self.lose(RuntimeError("jobs averaged different numbers of gradients"))
            raise StateError(
                f"Jobs averaged from {-least} to {most} gradients in step {self._quorum.steps} (rank "
                f"{self._job.rank}). All have to train the same parameters in each step."
            )
        if last != -first:
            self.lose(RuntimeError("jobs were trained apart"))
            if self.lineage != last:
                raise StateError(
                    f"This job was trained apart from others for some of its {self._quorum.steps} steps (rank "
                    f"{self._job.rank}): neither saw the other. Start it again: it takes over their state."
                )

    def wait_for(self, work: Any) -> bool:
        """Whether ``work`` ended well; otherwise the step is lost."""
        try:
            work.wait()
        except (RuntimeError, TimeoutError) as error:
            self.lose(error)
            return False
        return not self._lost

    def lose(self, error: Exception) -> None:
        """Void this step, and let the other jobs know soon."""
        if not self._lost:
            self._lost = True
            # Gloo's connections end with the last reference to them.
            self._meeting = None
            self._require_manager("step").report_error(error)
            self._require_wire().hang_up()

    def _issue(self, tensor: torch.Tensor, op: Any) -> Any:
        try:
            return self._require_wire().all_reduce(tensor, op)
        except (RuntimeError, TimeoutError) as error:
            self.lose(error)
            return None

    def leave(self) -> None:
        """Give the step up: this rank's program raised."""
        if self._phase is Phase.STEP:
            self.lose(RuntimeError("the program raised"))
            self._phase, self._counted = Phase.BETWEEN, False

    def give_up(self) -> None:
        """Begin no further step: the optimizer may have failed in one that counts, and other jobs have made it."""
        self._phase = Phase.BROKEN

    def close(self) -> None:
        """Leave the other jobs. Idempotent."""
        self._phase = Phase.CLOSED
        if self._manager is not None and self._managed is not None:
            self._manager.shutdown(wait=False)
            self._managed.close()
        self._manager = self._managed = self._store = None

    def _require_manager(self, call: str) -> Manager:
        if self._manager is None:
            raise StateError(f"{call} of other jobs was asked for {self._phase.value} (rank {self._job.rank}).")
        return self._manager

    def _require_wire(self) -> ManagedGroup:
        assert self._managed is not None
        return self._managed


class _Mean:
    """A sum over jobs that was issued, and its division."""

    __slots__ = ("_link", "_size", "_tensor", "_total", "_work")

    def __init__(self, link: Link, work: Any, tensor: torch.Tensor, total: torch.Tensor, size: int) -> None:
        self._link, self._work, self._tensor, self._total, self._size = link, work, tensor, total, size

    def wait(self) -> None:
        if self._work is None:
            return
        work, self._work = self._work, None
        if self._link.wait_for(work):
            with torch.no_grad():
                self._total.div_(self._size)
                if self._total is not self._tensor:
                    self._tensor.copy_(self._total)
