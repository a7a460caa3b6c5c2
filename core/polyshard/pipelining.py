"""Pipeline parallelism: stages for the schedules of ``torch.distributed.pipelining`` whose modules are sharded.

Each stage of a pipeline is a model of its own, sharded over the ranks that have it. A schedule runs forwards and
backwards of several microbatches through it, and its gradients are reduced once, behind the last::

    stage = PipelineStage(polyshard.shard(part, config), 0, 2, device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, 8, loss_fn=loss_fn)
    schedule.step(batch)
    clip_grad_norm_([stage], 1.0)
"""

# [Note: gradients of a schedule]
# Backwards of a schedule keep their gradients whole on this rank, and add them up in the reduction dtype, as those
# inside of ``polyshard.no_sync`` do. Torch's schedules call ``perform_reduce_grad`` of a stage behind its last
# backward. That reduces the sums, so a unit takes part in one reduction a schedule, however many microbatches there
# are. The mean over microbatches is taken of what was reduced, and not of what ``.grad`` holds: gradients of an
# earlier schedule stay as they are.

from __future__ import annotations

import enum
import hashlib
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining as torch_pipelining
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from . import _torch_private
from .api import outermost_root
from .errors import ConfigError, RankMismatchError, StateError, UnsupportedError
from .functions.norms import ModelGradients, check_norm_type
from .planning.parts import gradient_of, is_dtensor, local_of
from .runtime.live_roots import ParameterLocation, live_roots
from .runtime.root import Root
from .runtime.states import Reshard, UnitState
from .runtime.streams import CudaStreams
from .runtime.unit import Unit

__all__ = ["Gathers", "PipelineStage", "TiedParameter", "clip_grad_norm_"]

#: The stages of this process whose models live.
_STAGES: weakref.WeakValueDictionary[Root, PipelineStage] = weakref.WeakValueDictionary()


class Gathers(enum.Enum):
    """How often a stage gathers its parameters."""

    SCHEDULE = "schedule"
    """Once for all microbatches of a schedule: the whole stage stays gathered until its gradients are reduced."""
    MICROBATCH = "microbatch"
    """For each microbatch, as ``ShardConfig.reshard_after_forward`` says: one or two units are gathered at a time."""


class PipelineStage(torch_pipelining.PipelineStage):
    """A stage of a pipeline whose module ``polyshard.shard`` or ``polyshard_fsdp2.fully_shard`` has sharded.

    Schedules of ``torch.distributed.pipelining`` take it in the place of torch's own. Stages of one process use the
    same CUDA streams, so that the memory which one releases serves the others.

    Args:
        module: The stage's part of the model, sharded over the ranks that have this stage, and over no others.
        stage_index: The stage's number, from 0.
        num_stages: How many stages there are, on all ranks.
        device: Where the module computes.
        group: The ranks of the pipeline, one of each group of ranks that shares stages; all ranks where None.
        gathers: How often parameters are gathered: ``Gathers.SCHEDULE`` or ``MICROBATCH``, or their values.
        input_args: A microbatch's arguments, or tensors like them on the meta device. Torch finds both out in the first
            step where None.
        output_args: What the module returns for these.

    Raises:
        StateError: ``module`` is not sharded, or not the outermost sharded module.
        ConfigError: it is another stage's, too, or sharded over ranks of other stages; or ``gathers`` is no such word.
        UnsupportedError: ``fully_shard`` sharded it, and ``gathers`` is ``MICROBATCH``.
    """

    def __init__(
        self,
        module: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *,
        group: dist.ProcessGroup | None = None,
        gathers: Gathers | str = Gathers.SCHEDULE,
        input_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        if not hasattr(torch_pipelining.PipelineStage, "perform_reduce_grad"):
            raise UnsupportedError(
                f"The schedules of torch {torch.__version__} end without a call that reduces gradients "
                "(perform_reduce_grad). Install another version."
            )
        root = outermost_root(module, "PipelineStage()")
        self._root = root
        try:
            self.gathers = Gathers(gathers)
        except ValueError:
            raise ConfigError(f"gathers={gathers!r} is neither 'schedule' nor 'microbatch'.") from None
        is_drop_in = isinstance(module, FSDPModule)
        if is_drop_in and self.gathers is Gathers.MICROBATCH:
            raise UnsupportedError(
                f"Stage {stage_index} (rank {root.rank}) was sharded by fully_shard, whose modules torch's schedules "
                "gather themselves, once for all microbatches. Leave gathers out, or shard it with polyshard.shard."
            )
        _refuse_shared(root, stage_index)
        _refuse_ranks_of_others(root, stage_index, group)
        for unit in root.units:
            # A schedule adds gradients up, and writes none in place: layers that would compute both of theirs at once.
            unit.writes_gradients_directly = False
        # Torch computes the gradients of weights apart from graphs that it kept, for which parameters must stay.
        weights = None if self.gathers is Gathers.SCHEDULE else _nothing_apart
        super().__init__(
            module, stage_index, num_stages, device, input_args, output_args, group=group, dw_builder=weights
        )
        _share_streams(root)
        _STAGES[root] = self
        if not self.is_first:
            # What torch finds shapes by, before the first step, has no values. The first stage compares the batch.
            root.same_batch = None
        root.find_infinities = partial(_infinities_of, weakref.ref(self))
        reduced = {each.original for unit in root.units for each in unit.parameters}
        # Parameters into whose ``.grad`` autograd itself accumulates.
        self._accumulating = [parameter for parameter in module.parameters() if parameter not in reduced]
        self._before: list[torch.Tensor | None] = []
        self._policies: list[Reshard] = []
        self._runs = False
        # Whether gradients of the schedule that runs are reduced at its end.
        self._finalizes = True
        #: This rank's stages of the schedule that ran last.
        self._together: Sequence[PipelineStage] = (self,)
        # Whether a gradient of some stage is infinite, since gradients were reduced.
        self._finding: torch.Tensor | None = None

    @override
    def clear_runtime_states(self) -> None:
        """A schedule begins. Gives up one that raised, and all gradients that wait to be reduced.

        Those of a step with ``finalize_gradients=False`` go on waiting.

        Raises:
            StateError: the schedule runs no backward, but forwards would be recorded for one.
            ConfigError: its microbatches differ in size.
        """
        super().clear_runtime_states()
        if self._runs and self._finalizes:
            self._leave()
            self._root.start_over()
            for parameter, before in zip(self._accumulating, self._before, strict=True):
                parameter.grad = before
        if not self.has_backward and torch.is_grad_enabled() and self.submod.training:
            raise StateError(
                f"The schedule of stage {self.stage_index} (rank {self._root.rank}) has no loss_fn, or was called by "
                "eval(): no backward would follow its forwards, which autograd records. Give it a loss_fn on every "
                "rank, or evaluate inside of torch.no_grad(), or with the modules in eval mode."
            )
        batch = _torch_private.divided_batch(self)
        if batch is not None and all(isinstance(stage, PipelineStage) for stage in batch[1]):
            _refuse_uneven(*batch)

    @override
    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of one microbatch, called by ``forward_one_chunk``."""
        if self.has_backward and not self._runs:
            self._enter()
        return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    @override
    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[torch.Tensor | None, ...], list[dict[str, Any]] | None]:
        """A backward of one microbatch: ``"full"``, or that of inputs or of weights alone."""
        backward, root = super().backward_maybe_with_nosync, self._root
        parts = backward_type != "full"
        units = [unit for unit in root.units if parts and unit.gathered.state is UnitState.UNSHARDED]
        synchronises, root.synchronises = root.synchronises, False
        for unit in units:
            # Torch asks the module for the parameters that its graphs end at.
            unit.gathered.show()
        try:
            return backward(backward_type, bwd_kwargs, last_backward)
        finally:
            root.synchronises = synchronises
            for unit in units:
                unit.gathered.hide()
                if unit.gathered.pending:
                    unit.gradients.keep(unit.gathered.take_gradients(), root.streams)

    @override
    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce the gradients of all microbatches, once, and divide them by ``grad_scale_factor``.

        Inside of ``polyshard.no_sync`` they wait, and add up with those of the next schedule, of as many microbatches.
        Torch's schedules call it. Schedules of one's own call it behind a stage's last backward.

        Raises:
            StateError: a communication of the stage's model failed before.
        """
        if not self._runs:
            return
        root, self._finding = self._root, None
        root.leave_failed_backward()
        self._leave()
        if root.synchronises:
            with _divided(root.units, grad_scale_factor):
                root.reduce_waiting()
        else:
            # Inside of no_sync: gradients wait for those of another schedule.
            for module_state in root.module_states:
                module_state.reset()
        self._divide_accumulated(grad_scale_factor)

    @override
    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # Torch 2.11 opens connections by messages to neighbours, its own rank's among them, which gloo refuses.
        opens = super()._get_init_p2p_neighbors_ops()
        return [each for each in opens if each.group_peer != self.group_rank]

    def start_gradient_reduction(self) -> None:
        """Nothing: schedules of torch 2.15 call ``wait_for_gradient_reduction`` behind it."""

    def wait_for_gradient_reduction(self, grad_scale_factor: int) -> None:
        """As ``perform_reduce_grad``, which schedules of torch 2.15 do not call of what ``fully_shard`` sharded."""
        self.perform_reduce_grad(grad_scale_factor)

    def _enter(self) -> None:
        self._runs = True
        root = self._root
        if self.gathers is Gathers.SCHEDULE:
            self._policies = [unit.retention.policy for unit in root.units]
            for unit in root.units:
                unit.retention.policy = Reshard.NEVER
            for module_state in root.module_states:
                module_state.releases_after_backward = False
        self._before = [parameter.grad for parameter in self._accumulating]
        for parameter in self._accumulating:
            parameter.grad = None

    def _leave(self) -> None:
        self._runs = False
        root = self._root
        root.last_backward = True
        for unit, policy in zip(root.units, self._policies, strict=False):
            unit.retention.policy = policy
        self._policies = []
        for module_state in root.module_states:
            # Torch's stage set these of modules that it knows.
            module_state.synchronises = module_state.all_reduces = True
            module_state.releases_after_backward = module_state.releases_by_default

    def _divide_accumulated(self, divisor: int) -> None:
        new = [parameter.grad for parameter in self._accumulating if parameter.grad is not None]
        if divisor != 1 and new:
            _torch_private.foreach_mul_(new, 1.0 / divisor)
        for parameter, before in zip(self._accumulating, self._before, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._before = []

    def _find_infinities(self) -> torch.Tensor:
        """1 where a gradient of any stage is no finite number, else 0; once a schedule, on every rank of the pipeline.

        ``GradScaler`` asks for the first of this rank's optimizers: all of them step, or none.
        """
        finding = self._finding
        if finding is None:
            norm, _ = _norm_of_stages(self._together, math.inf, math.inf, ())
            finding = norm.isfinite().logical_not().float()
            for stage in self._together:
                stage._finding = finding
        return finding


class TiedParameter:
    """One parameter that two stages have: an embedding whose weight is the head's, too.

    Each stage holds and steps one of its own, with equal values. ``reduce`` adds up their gradients, once a step behind
    its last schedule, before anything reads these. Every rank of the pipeline makes it, and calls ``reduce``.

    Args:
        stages: This rank's stages.
        names: The parameter's name in the module of each of the two stages, by the stages' numbers.

    Raises:
        ConfigError: two stages are not named, a stage has no parameter of that name, or no rank has the stage.
        UnsupportedError: ranks of the two stages hold other elements of it; an optimizer gets flat parameters.
        RankMismatchError: the values differ, or another rank raised.
    """

    def __init__(self, stages: Sequence[PipelineStage], names: Mapping[int, str]) -> None:
        stages = _in_order(stages)
        self._group, self._device = stages[0].group, torch.device(stages[0].device)
        held = {stage.stage_index: stage for stage in stages if stage.stage_index in names}
        mine: Any
        try:
            self._held = {number: _location(stage, names[number]) for number, stage in held.items()}
            mine = {number: _signature(found) for number, found in self._held.items()}
        except (ConfigError, UnsupportedError) as error:
            self._held, mine = {}, error
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, mine, group=self._group)
        self._ranks = self._agreed(names, everyone)
        #: Of the later stage: norms count the parameter in the earlier one.
        self.uncounted = [found for number, found in self._held.items() if number == max(names)]

    def _agreed(self, names: Mapping[int, str], everyone: Sequence[Any]) -> dict[int, int]:
        """The rank of each stage in the pipeline's group."""
        rank = dist.get_rank(self._group)
        for place, answer in enumerate(everyone):
            if isinstance(answer, Exception):
                if place == rank:
                    raise answer
                raise RankMismatchError(f"Rank {place} of the pipeline (this is {rank}): {answer}")
        ranks = {number: place for place, answer in enumerate(everyone) for number in answer}
        if len(names) != 2 or ranks.keys() != names.keys():
            raise ConfigError(
                f"TiedParameter() got the stages {sorted(names)}, of which ranks of the pipeline have {sorted(ranks)} "
                f"(rank {rank} there). Name two, on every rank alike: {{0: 'embedding.weight', 3: 'head.weight'}}."
            )
        first, second = (everyone[ranks[number]][number] for number in sorted(names))
        what = " and ".join(f"'{names[number]}' of stage {number}" for number in sorted(names))
        if first[0] != second[0]:
            raise UnsupportedError(
                f"The ranks hold other elements of {what} (rank {rank} of the pipeline): {first[0]} and {second[0]}. "
                "Let each be a unit of its own, with one placement, over equally many ranks."
            )
        if first[1] != second[1]:
            raise RankMismatchError(
                f"The values of {what} differ (rank {rank} of the pipeline). Give both the same ones before sharding, "
                "or load a checkpoint into both."
            )
        return ranks

    @torch.no_grad()
    def reduce(self) -> None:
        """Add up the gradients of both stages. Every rank of the pipeline calls it, once a step."""
        own = {number: _gradient(found) for number, found in self._held.items()}
        if len(own) == 2:
            first, second = own.values()
            second.copy_(first.add_(second.to(first.device)))
            return
        for number, gradient in own.items():
            (other,) = (self._ranks[each] for each in self._ranks if each != number)
            peer = other if self._group is None else dist.get_global_rank(self._group, other)
            leaving = gradient.to(self._device).contiguous()
            arriving = torch.empty_like(leaving)
            operations = [
                dist.P2POp(call, each, peer, self._group)
                for call, each in ((dist.isend, leaving), (dist.irecv, arriving))
            ]
            for work in dist.batch_isend_irecv(operations) if gradient.numel() else ():
                work.wait()
            gradient.add_(arriving.to(gradient.device))


def clip_grad_norm_(
    stages: Sequence[PipelineStage],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    tied: Collection[TiedParameter] = (),
) -> torch.Tensor:
    """Scale gradients in place so that their norm over all stages is at most ``max_norm``; returns the norm before.

    Every rank of the pipeline calls it, behind ``TiedParameter.reduce``. One reduction for each stage of this rank, and
    one over the pipeline.

    Args:
        stages: This rank's stages.
        max_norm: Largest norm that is let through.
        norm_type: Order of the norm; ``float("inf")`` for the largest absolute value.
        tied: Parameters that two stages have: the norm counts them once.

    Returns:
        The norm, a 0-dim tensor, the same on every rank.

    Raises:
        ConfigError: ``norm_type`` is not positive, or there is no stage.
    """
    stages = _in_order(stages)
    check_norm_type(norm_type, "pipelining.clip_grad_norm_", stages[0]._root.rank)
    total, gradients = _norm_of_stages(stages, norm_type, max_norm, tied)
    for each in gradients:
        each.clip(max_norm, total)
    return total


def _norm_of_stages(
    stages: Sequence[PipelineStage], norm_type: float, max_norm: float, tied: Collection[TiedParameter]
) -> tuple[torch.Tensor, list[ModelGradients]]:
    uncounted = [found for each in tied for found in each.uncounted]
    powers, gradients = [], []
    for stage in stages:
        elsewhere = {_receiver(found) for found in uncounted if found.root is stage._root}
        gradients.append(ModelGradients(stage._root, stage.submod, elsewhere))
        norm = gradients[-1].norm(norm_type, max_norm)
        powers.append(norm if math.isinf(norm_type) else norm**norm_type)
    # In one dtype on all ranks: the gradients of one stage may be wider than another's.
    own = torch.stack([power.double() for power in powers]).to(stages[0].device)
    own = own.amax() if math.isinf(norm_type) else own.sum()
    answers = [torch.empty_like(own) for _ in range(dist.get_world_size(stages[0].group))]
    # Not reduced on the way: a maximum over ranks may drop what is not a number.
    dist.all_gather(answers, own, group=stages[0].group)
    everyone = torch.stack(answers)
    total = everyone.amax() if math.isinf(norm_type) else everyone.sum() ** (1.0 / norm_type)
    return total, gradients


def _infinities_of(stage: weakref.ref[PipelineStage]) -> torch.Tensor:
    """What ``GradScaler`` must know of the other stages, as long as there are any."""
    living = stage()
    return torch.zeros(()) if living is None else living._find_infinities()


@dataclass(frozen=True)
class _Agreed:
    """What a schedule's buffers are made for, on this rank."""

    trains: bool
    sizes: list[torch.Size]
    """Of the tensors that a microbatch consists of."""


_AGREED: weakref.WeakKeyDictionary[object, _Agreed] = weakref.WeakKeyDictionary()


def _refuse_uneven(
    schedule: object,
    stages: Sequence[object],
    number: int,
    microbatches: Sequence[tuple[Sequence[Any], Mapping[str, Any]]],
) -> None:
    """Raise if the microbatches of a schedule differ in size, before it sends any of them.

    Torch makes buffers for one size in the first step, and where training follows evaluation or the other way round.
    Ranks of all stages raise in these steps, and in others those alone that have the batch.

    Raises:
        ConfigError: sizes differ, or are others than the buffers are made for.
    """
    own = _in_order([stage for stage in stages if isinstance(stage, PipelineStage)])
    for stage in own:
        stage._together, stage._finalizes = own, _torch_private.finalizes(schedule)
    first, known = own[0], _AGREED.get(schedule)
    trains, rank = bool(first.has_backward), first._root.rank
    sizes = [
        [each.shape for each in (*args, *named.values()) if isinstance(each, torch.Tensor)]
        for args, named in microbatches
    ]
    is_new = known is None or known.trains != trains
    wanted = sizes[0] if known is None or is_new else known.sizes
    # Torch makes fewer of a batch that is too small.
    other = next((each for each in sizes if each != wanted), [] if len(sizes) < number else None)
    text = None
    if other is not None:
        text = (
            f"A microbatch has the shapes {list(map(tuple, other))}, and not {list(map(tuple, wanted))} (stage "
            f"{first.stage_index}, rank {rank}): stages receive one size. Give the schedule a batch that its {number} "
            "microbatches divide, of the same size in each step."
        )
    if is_new:
        sharing = first._root.collectives.process_group
        for group in (first.group, *([] if sharing is None else [sharing])):
            texts: list[str | None] = [None] * dist.get_world_size(group)
            dist.all_gather_object(texts, text, group=group)
            text = next(filter(None, texts), None)
    if text is not None:
        raise ConfigError(text)
    _AGREED[schedule] = _Agreed(trains, wanted)


def _nothing_apart() -> Callable[[], None]:
    """What a stage does where a schedule computes the gradients of weights apart: they are there already."""
    return lambda: None


@contextmanager
def _divided(units: Sequence[Unit], divisor: int) -> Iterator[None]:
    """Reductions inside divide what they deliver."""
    before = [unit.gradients.scale for unit in units]
    if divisor != 1:
        for unit, scale in zip(units, before, strict=True):
            unit.gradients.scale = (1.0 if scale is None else scale) / divisor
    try:
        yield
    finally:
        for unit, scale in zip(units, before, strict=True):
            unit.gradients.scale = scale


def _refuse_shared(root: Root, stage_index: int) -> None:
    other = _STAGES.get(root)
    if other is not None and other.stage_index != stage_index:
        raise ConfigError(
            f"The module of stage {stage_index} is stage {other.stage_index}'s already (rank {root.rank}). Give each "
            "stage a module of its own."
        )


def _refuse_ranks_of_others(root: Root, stage_index: int, group: dist.ProcessGroup | None) -> None:
    """Raise if the stage's module is sharded over other ranks of its pipeline, which have other stages."""
    behind = root.collectives.process_group
    if behind is None:
        return
    sharing = set(dist.get_process_group_ranks(behind))
    others = sorted(sharing.intersection(dist.get_process_group_ranks(group)) - {dist.get_rank()})
    if others:
        raise ConfigError(
            f"The module of stage {stage_index} is sharded over the ranks {sorted(sharing)}, of which {others} have "
            f"other stages of this pipeline (rank {dist.get_rank()}). Shard it over those that share the stage: "
            "ShardConfig(mesh=mesh['dp']); for one rank alone, over a dimension of size 1."
        )


def _share_streams(root: Root) -> None:
    """Let ``root`` use the streams of another stage on its device, unless it has run already."""
    device = root.collectives.device
    if (
        device.type != "cuda"
        or not isinstance(root.streams, CudaStreams)
        or any(u.gathered.prepared for u in root.units)
    ):
        return
    for other in _STAGES:
        if isinstance(other.streams, CudaStreams) and other.collectives.device == device:
            root.use_streams(other.streams)
            return


def _in_order(stages: Sequence[PipelineStage]) -> list[PipelineStage]:
    """``stages`` by number: ranks that share them have one order. Raises ConfigError: there is none."""
    if not stages:
        raise ConfigError("stages is empty. Give those that this rank has.")
    return sorted(stages, key=lambda stage: stage.stage_index)


def _location(stage: PipelineStage, name: str) -> ParameterLocation:
    named = dict(stage.submod.named_parameters(remove_duplicate=False))
    found = live_roots.find([named[name]])[0] if name in named else None
    where = f"'{name}' of stage {stage.stage_index} (rank {stage._root.rank})"
    if found is None:
        raise ConfigError(f"{where} is no sharded parameter. Name one of stage.submod.named_parameters().")
    if found.unit.held.flat is not None:
        raise UnsupportedError(
            f"{where} is part of a flat parameter, whose gradient is all of its unit's. Give the optimizer "
            "model.parameters() instead of polyshard.flat_parameters(model)."
        )
    return found


def _signature(found: ParameterLocation) -> tuple[Any, str]:
    """Which elements of a parameter this rank holds, and a digest of their values."""
    parameter = found.parameter.detach()
    local = (local_of(parameter) if is_dtensor(parameter) else parameter).cpu().contiguous()
    part = found.unit.parameters[found.slot or 0].part
    cut = None if part is None else (tuple(part.shape), tuple(part.offset), tuple(part.sizes))
    digest = hashlib.sha256(local.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return (cut, tuple(local.shape), str(local.dtype)), digest


def _receiver(found: ParameterLocation) -> nn.Parameter:
    return dict(found.unit.held.slots_of_receivers())[found.slot]


def _gradient(found: ParameterLocation) -> torch.Tensor:
    """Where this rank's elements of the gradient are; zeros where the stage had none."""
    receiver = _receiver(found)
    gradient = gradient_of(receiver)
    if gradient is None:
        receiver.grad = torch.zeros_like(receiver)
        gradient = gradient_of(receiver)
    assert gradient is not None
    return gradient
