"""Gradient norms over all shards, and scales of a gradient scaler for gradients in host memory.

[Note: scales that arrive late]
``torch.amp.GradScaler`` and torch's fused optimizers copy scale and finding to the gradients' memory, which may be
pinned host memory: the host does not wait for these copies, and reads too early. Gradients are then multiplied by older
values, and a copy that arrives later overwrites an infinity that was found. Copies from host memory that is not pinned
end before the call returns, and within the host none are made. So scales are moved to the host first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup, get_process_group_ranks

from .. import _torch_private
from ..errors import ConfigError, NonFiniteError, RankMismatchError
from ..interfaces import Collectives, ReduceOp
from ..planning.groups import UnitRanks
from ..planning.parts import gradient_of, is_dtensor
from ..runtime.root import Root
from ..runtime.unit import Unit


def clip_grad_norm(
    root: Root, module: nn.Module, max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients so that their norm, over every rank's shards, is at most ``max_norm``.

    Norms are accumulated in fp32 (fp64 for fp64 gradients), with one all-reduce. Trained parameters outside of units
    count once, and must have one gradient on all ranks, but for those that each rank owns. Errors as ``_agreed_norm``;
    NonFiniteError: ``error_if_nonfinite``, and the norm is infinite or not a number; on all ranks.
    """
    if root.backward_step is not None:
        root.backward_step.before_change("clip_grad_norm_()")
    gradients = ModelGradients(root, module)
    total = gradients.norm(norm_type, max_norm, error_if_nonfinite=error_if_nonfinite)
    if error_if_nonfinite:
        _refuse_not_finite(root, total, gradients.outside)
    gradients.clip(max_norm, total)
    return total


class ModelGradients:
    """The gradients of one model on this rank: their norm over all ranks, and a factor for all of them.

    Raises ConfigError: other parts of a ``DTensor`` are on ranks of another model, or one is in no unit.
    """

    def __init__(self, root: Root, module: nn.Module, uncounted: Collection[torch.Tensor] = frozenset()) -> None:
        """``uncounted``: parameters whose gradients another model counts. They are scaled all the same."""
        self._root, self._module = root, module
        self._held: GradientsByHolders = {}
        self._uncounted = [each for each in map(gradient_of, uncounted) if each is not None]
        self._managed: set[nn.Parameter] = set()
        ranks: UnitRanks | None = None
        copies: tuple[int, ...] = ()
        groups: list[list[torch.Tensor]] = []
        for unit in root.units:
            self._managed.update(unit.held.tensors)
            if unit.ranks is not ranks or unit.copies != copies:
                ranks, copies = unit.ranks, unit.copies
                groups = _groups_of(self._held, unit)
            if len(groups) == 1 and not uncounted:
                groups[0] += [each for each in map(gradient_of, unit.held.receivers) if each is not None]
                continue
            for slot, receiver in unit.held.slots_of_receivers():
                gradient = None if receiver in uncounted else gradient_of(receiver)
                if gradient is None:
                    continue
                if len(groups) == 1:
                    groups[0].append(gradient)
                elif slot is not None:
                    groups[slot].append(gradient)
                else:
                    for piece in unit.pieces:
                        groups[piece.slot].append(gradient.narrow(0, piece.shard_offset, piece.numel))
        #: Parameters in no unit.
        self.outside = [parameter for parameter in module.parameters() if parameter not in self._managed]
        self._trained = [each for each in self.outside if each.requires_grad or each.grad is not None]
        for parameter in self._trained:
            if parameter not in uncounted:
                self._count_outside(parameter)

    def _count_outside(self, parameter: nn.Parameter) -> None:
        root = self._root
        owned = parameter in root.owned_locally
        if is_dtensor(parameter) and not owned:
            raise ConfigError(
                f"The norm got a DTensor of shape {tuple(parameter.shape)} that is in no unit (rank {root.rank}): "
                "nothing averages its gradient over the data ranks. Let it be sharded with the others, freeze it, or "
                "say in ignored_parameters that it is 'local'."
            )
        group = self._held.setdefault(THIS_RANK if owned else EVERY_RANK, [])
        gradient = gradient_of(parameter)
        if gradient is not None:
            group.append(gradient)

    def norm(
        self, norm_type: float, max_norm: float | None = None, *, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """The norm over all ranks, the same on each, which compare ``max_norm``. Errors as ``_agreed_norm``."""
        root = self._root
        check_norm_type(norm_type, "clip_grad_norm_", root.rank)
        wide = norm_dtype(root.units, self._trained)
        # What ranks compare. Reading a tensor would wait for the device.
        most = f", at most {float(max_norm)}" if isinstance(max_norm, int | float) else ""
        text = f" of order {float(norm_type)}{most}{', finite or an error' if error_if_nonfinite else ''}"
        return _agreed_norm(root, self._held, norm_type, wide, text, self._named)

    def clip(self, max_norm: float, total: torch.Tensor) -> None:
        """Scale all gradients by what brings the norm ``total`` down to ``max_norm``."""
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        by_place: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for gradients in (*self._held.values(), self._uncounted):
            for gradient in gradients:
                by_place.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        for (place, dtype), tensors in by_place.items():
            scale = factor.to(device=place, dtype=dtype)
            # Host memory is slow, and the host may look.
            if place.type != "cpu" or scale != 1:
                _torch_private.foreach_mul_(tensors, scale)

    def _named(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        return (
            (name, each.grad)
            for name, each in self._module.named_parameters()
            if each not in self._managed and each not in self._root.owned_locally
        )


class Holders(NamedTuple):
    """The ranks that hold the gradients of a norm."""

    ranks: UnitRanks | None
    """Those of the unit; None outside of units."""
    copies: int
    """How many ranks hold each element; 0 outside of units for all of them."""


#: The gradients of a norm, by who holds them.
GradientsByHolders = dict[Holders, list[torch.Tensor]]
#: What the program averages: each rank of the model has the same.
EVERY_RANK = Holders(None, 0)
#: What each rank has of its own.
THIS_RANK = Holders(None, 1)


def _groups_of(held: GradientsByHolders, unit: Unit) -> list[list[torch.Tensor]]:
    """Where in ``held`` the gradients of ``unit`` belong: one list for all, or one for each of its parameters.

    Raises ConfigError: other parts of a parameter are on ranks that are none of the model's.
    """
    ranks, copies = unit.ranks, unit.copies
    if not all(copies):
        name = next(each.names[0] for each in unit.parameters if not ranks.copies(each.part))
        raise ConfigError(
            f"The norm needs all parts of '{name}', a DTensor, but some are on ranks outside of the model (rank "
            f"{ranks.world.rank}). Shard over a dimension of the whole mesh: ShardConfig(mesh=mesh, shard='dp'), "
            "instead of mesh=mesh['dp']."
        )
    # A rank without an element of any parameter still takes part in the reduction.
    return [held.setdefault(Holders(ranks, each), []) for each in copies]


def _agreed_norm(
    root: Root,
    held: GradientsByHolders,
    norm_type: float,
    wide: torch.dtype,
    text: str,
    outside: Outside,
) -> torch.Tensor:
    """The norm over all of ``held``, 0-dim on the compute device, the same on every rank.

    ``text``: what ranks compare of the call; ``outside``: of parameters outside of units.

    [Note: one norm]
    An element counts once, however many ranks hold it: each rank adds what it holds, divided by the number of those
    that hold the same, and one all-reduce over the model's ranks makes the sum. Where all ranks hold parts of the same
    parameters, the owners of one copy have the whole sum among them, and no other rank is asked.

    The reduction makes a unit's gradients those of all its ranks. Nothing does that for a parameter outside of units,
    nor between the worlds of units that are sharded over different ranks. All ranks count a mean of the first and the
    largest of the second, so that they scale alike. Norms that differ are an error, where the host can see it without
    waiting for the device: on the CPU at each call, on other devices at the first that has gradients (of the first
    three), and at each with ``check_ranks="always"``.

    Raises RankMismatchError: the ranks' norms of one gradient differ; on all ranks.
    """
    device = root.collectives.device
    reach = {holders.ranks: holders.ranks.everyone for holders in held if holders.ranks is not None}
    # In one order on all ranks, unlike a set.
    first = _first_of_each(dict.fromkeys(reach.values()))
    # Most ranks last, which then have one norm.
    worlds = sorted(dict.fromkeys(first.values()), key=_number_of) or [()]
    several, ignored = len(worlds) > 1, EVERY_RANK in held
    if several or ignored:
        text += ", with parameters outside of units" if ignored else ", of units over different ranks"
    only = next(iter(held), EVERY_RANK).ranks if len(held) == 1 else None
    if only is not None and only.alike:
        worlds = [() if only.owner is None else (only.owner,)]
    with root.meeting("norm of gradients", dict.fromkeys(group for each in worlds for group in each), text):
        if only is not None and only.alike:
            (tensors,) = held.values()
            return _root_of(_over(worlds[0], _power(tensors, norm_type, wide, device), norm_type), norm_type)
        rest = _power(held[EVERY_RANK], norm_type, wide, device) if ignored else None
        reads = (several or ignored) and _may_read(root, device)
        for everyone in worlds:
            own = []
            for holders, tensors in held.items():
                of_model = everyone is worlds[-1] if holders.ranks is None else first[reach[holders.ranks]] is everyone
                if of_model and holders is not EVERY_RANK:
                    power = _power(tensors, norm_type, wide, device)
                    own.append(power if math.isinf(norm_type) else power / holders.copies)
            if rest is not None:
                if reads and everyone:
                    _refuse_different(root, everyone, _root_of(rest, norm_type), outside)
                if several:
                    rest = _over(everyone, rest, math.inf)
                own.append(rest if math.isinf(norm_type) else rest / _number_of(everyone))
            together = own[0] if len(own) == 1 else torch.stack(own)
            rest = _over(everyone, together.max() if math.isinf(norm_type) else together.sum(), norm_type)
    return torch.zeros((), dtype=wide, device=device) if rest is None else _root_of(rest, norm_type)


def norm_dtype(units: Iterable[Unit], outside: Iterable[torch.Tensor] = ()) -> torch.dtype:
    """In which norms add up, on all ranks alike: fp64 where any gradient is, of units or ``outside``, or fp32."""
    if any(unit.dtypes.grad == torch.float64 for unit in units):
        return torch.float64
    return torch.float64 if any(each.dtype == torch.float64 for each in outside) else torch.float32


def check_norm_type(norm_type: float, call: str, rank: int) -> None:
    """Raise where norms of shards do not make a norm of the whole.

    Raises ConfigError: ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ConfigError(
            f"{call} got norm_type={norm_type} (rank {rank}): norms of shards combine for positive orders alone. Give "
            "2.0, 1.0 or inf."
        )


#: Norms with a larger relative difference are of different gradients, and not of one that was rounded twice.
_TOLERANCE = 1e-5
#: Groups that together reach the ranks among which a unit is reduced; see ``UnitRanks.everyone``.
Everyone = tuple[Collectives, ...]
#: Names and gradients of parameters outside of units; called where ranks differ.
Outside = Callable[[], Iterable[tuple[str, torch.Tensor | None]]]


def _first_of_each(all_of_them: Collection[Everyone]) -> dict[Everyone, Everyone]:
    if len(all_of_them) < 2:
        return {each: each for each in all_of_them}
    found: dict[object, Everyone] = {}
    return {each: found.setdefault(_ranks_of(each), each) for each in all_of_them}


def _ranks_of(everyone: Everyone) -> object:
    groups = [each.process_group for each in everyone]
    if not all(isinstance(group, ProcessGroup) for group in groups):
        return everyone
    return tuple(tuple(get_process_group_ranks(group)) for group in groups)


def _number_of(everyone: Everyone) -> int:
    return math.prod(each.world_size for each in everyone)


def _may_read(root: Root, device: torch.device) -> bool:
    """Whether the host reads the ranks' norms: see [Note: one norm]."""
    if not root.check_ranks or not root.collectives.capabilities.can_communicate:
        return False
    if device.type == "cpu":
        return True
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return not capturing and (root.check_ranks == "always" or root.norms_to_compare > 0)


def _refuse_different(root: Root, everyone: Everyone, norm: torch.Tensor, outside: Outside) -> None:
    """Raise on all ranks of ``everyone`` if their ``norm`` differs, which is one that they should have in common."""
    flags = _without_nan(norm)
    most = torch.stack([*flags, -flags[0]])
    for group in everyone:
        group.all_reduce(most, op=ReduceOp.MAX).wait()
    largest, unknown, smallest = most.tolist()
    smallest = -smallest
    # Norms of zero show no difference: compare later ones too.
    root.norms_to_compare = 0 if largest > 0 else max(0, root.norms_to_compare - 1)
    # A norm that is not finite is so on all ranks.
    if unknown or math.isinf(largest) or largest - smallest <= _TOLERANCE * largest:
        return
    found: list[dict[str, float | None]] = [{name: _plain_norm(gradient) for name, gradient in outside()}]
    for group in everyone:
        found = [each for of_rank in group.all_gather_object(found) for each in of_rank]
    names = dict.fromkeys(name for each in found for name in each)
    different = [name for name in names if _differ([each.get(name) for each in found])]
    if different:
        more = f" (and of {len(different) - 1} more)" if len(different) > 1 else ""
        norms = ", ".join(
            f"{'none' if norm is None else f'{norm:.4g}'} on rank {rank}"
            for rank, norm in enumerate(each.get(different[0]) for each in found[:4])
        )
        what = f"'{different[0]}'{more}, which nothing averages,"
        values = f"its norm is {norms}{', ...' if len(found) > 4 else ''}"
    else:
        other = next((unit for unit in root.units if _ranks_of(unit.ranks.everyone) != _ranks_of(everyone)), None)
        what = f"unit '{other.name}', which is sharded over other ranks," if other is not None else "some parameter"
        values = f"the norm of all such gradients is from {smallest:.4g} to {largest:.4g}"
    raise RankMismatchError(
        f"The gradient of {what} differs between ranks, and each would clip by a norm of its own: {values} (rank "
        f"{root.rank}). Where all ranks train one parameter, average its gradient before clipping, or let it be "
        "sharded with the others. Where each rank has a parameter of its own (an expert), say so: shard(..., "
        "ignored_parameters={parameter: 'local'}). Gradients are as they were."
    )


def _plain_norm(gradient: torch.Tensor | None) -> float | None:
    if gradient is None:
        return None
    return float(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64))


def _differ(norms: Sequence[float | None]) -> bool:
    found = [0.0 if norm is None else norm for norm in norms]
    return max(found) - min(found) > _TOLERANCE * max(found)


def _refuse_not_finite(root: Root, total: torch.Tensor, outside: Sequence[nn.Parameter]) -> None:
    bad = (~total.isfinite()).to(torch.float32)
    if outside or any(unit.ranks.shard_size != root.collectives.world_size for unit in root.units):
        # Ranks that hold the same should have the same, but a fault may have hit one of them alone, and all must reach
        # the exchange below or none.
        root.collectives.all_reduce(bad, op=ReduceOp.MAX).wait()
    if not bad.item():
        return
    mine = [index for index, unit in enumerate(root.units) if not _all_finite(unit.held.receivers)]
    if not _all_finite(outside):
        mine.append(len(root.units))
    everyone: list[list[int]] = list(root.collectives.all_gather_object(mine))
    found = sorted({index for each in everyone for index in each})
    where = f"(rank {root.rank})"
    if not found:
        raise NonFiniteError(
            f"The norm of the gradients overflows although each gradient is finite {where}. Lower the loss scale or "
            "the learning rate, or clip with norm_type=float('inf'). Gradients are as they were."
        )
    first = found[0]
    ranks = [rank for rank, each in enumerate(everyone) if first in each]
    what = f"unit '{root.units[first].name}'" if first < len(root.units) else "a parameter outside of units"
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    raise NonFiniteError(
        f"The gradient of {what} is not finite on ranks {ranks}{more} {where}. Skip the step, or look for its cause in "
        "the batch, the loss scale or the learning rate. Gradients are as they were."
    )


def _all_finite(parameters: Iterable[torch.Tensor]) -> bool:
    return all(bool(each.isfinite().all()) for each in map(gradient_of, parameters) if each is not None)


def _over(everyone: Everyone, power: torch.Tensor, norm_type: float) -> torch.Tensor:
    """The sum of ``power`` over the ranks that ``everyone`` reaches; the largest for the infinite order."""
    if not math.isinf(norm_type):
        for group in everyone:
            group.all_reduce(power, op=ReduceOp.SUM).wait()
        return power
    if everyone:
        largest = torch.stack(_without_nan(power))
        for group in everyone:
            group.all_reduce(largest, op=ReduceOp.MAX).wait()
        power = largest[0].masked_fill(largest[1] > 0, math.nan)
    return power


def _root_of(power: torch.Tensor, norm_type: float) -> torch.Tensor:
    return power if math.isinf(norm_type) else power ** (1.0 / norm_type)


def _without_nan(value: torch.Tensor) -> list[torch.Tensor]:
    """``value`` or 0, and whether it is not a number, which a maximum over ranks may drop."""
    return [value.nan_to_num(nan=0.0, posinf=math.inf), value.isnan().to(value.dtype)]


def _power(
    gradients: Sequence[torch.Tensor], norm_type: float, wide: torch.dtype, device: torch.device
) -> torch.Tensor:
    present = [gradient for gradient in gradients if gradient.numel()]
    if not present:
        return torch.zeros((), dtype=wide, device=device)
    places: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in present:
        places.setdefault(gradient.device, []).append(gradient)
    # One launch for each device, which a mixed list would not have, and one copy of offloaded gradients' norms.
    parts = [torch.stack(_torch_private.foreach_norm(each, norm_type, wide)).to(device) for each in places.values()]
    norms = parts[0] if len(parts) == 1 else torch.cat(parts)
    return norms.max() if math.isinf(norm_type) else (norms**norm_type).sum()


def readable_scales(scales: torch.Tensor, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """``scales``, on the host where a gradient is there: [Note: scales that arrive late]. Waits for the device then."""
    hosted = (each.grad is not None and each.grad.device.type == "cpu" for each in parameters)
    return scales.cpu() if scales.device.type != "cpu" and any(hosted) else scales


def make_scales_readable(optimizer: torch.optim.Optimizer) -> None:
    """Move the scales that a scaler left with an optimizer that unscales by itself; called before its step."""
    if not isinstance(getattr(optimizer, "grad_scale", None), torch.Tensor):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for name in ("grad_scale", "found_inf"):
        value = getattr(optimizer, name, None)
        if isinstance(value, torch.Tensor):
            setattr(optimizer, name, readable_scales(value, parameters))
