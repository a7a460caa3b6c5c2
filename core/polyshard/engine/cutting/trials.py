"""Plugins are tried on values before a model changes: what would silently be computed wrongly is refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ...errors import PluginContractError
from ...interfaces import Collectives, OffloadManager, PrecisionCaster
from ..planning.answers import place, plugin_name
from ..planning.draft import Draft, DraftedUnit

#: Elements of a shard that are compared: reading all of a large one back would double what parking takes.
_COMPARED = 1024
#: The least cosine between values and what encoding and decoding leaves of them. Signs alone have 0.87.
_ALIKE = 0.5
#: By how much they may grow or shrink.
_SCALE = 4.0


def park(offload: OffloadManager, unit: DraftedUnit, shard: torch.Tensor, rank: int) -> torch.Tensor:
    """Where ``offload`` parks ``shard`` (``[shard_numel]``, master dtype), with its values, which it can bring back.

    Raises:
        PluginContractError: ``place`` returned what no parameter can view, or other values; or ``fetch`` does not write
            them.
    """
    spec = unit.spec
    wanted = _sample(shard)
    master = place(offload, spec, shard, rank)
    if shard.is_meta:
        return master
    found = _sample(master)
    if not _equal(found, wanted):
        raise PluginContractError(
            f"place of {plugin_name(offload)} returned other values than it was given for unit '{spec.label}' (rank "
            f"{rank}): {_first_difference(found, wanted)}. Return a copy of the shard, or the shard itself."
        )
    # A gather in compute dtype is written by it; one that is encoded reads the master as it is.
    dtype = unit.dtypes.compute if unit.wire is None else master.dtype
    own = torch.full((spec.shard_numel,), float("nan"), dtype=dtype, device=spec.device)
    offload.fetch(spec, master, own)
    found, wanted = _sample(own), wanted.to(dtype)
    if not _equal(found, wanted):
        raise PluginContractError(
            f"fetch of {plugin_name(offload)} did not write the master of unit '{spec.label}' (rank {rank}): "
            f"{_first_difference(found, wanted)}. Copy all of it into own_slice, on the current stream."
        )
    return master


def try_codecs(drafts: Iterable[Draft], collectives: Collectives, shards: int) -> None:
    """Encode and decode a ramp, once for each caster that encodes, as its smallest unit.

    Raises:
        PluginContractError: what was decoded has little to do with what was encoded.
    """
    smallest: dict[int, tuple[PrecisionCaster, DraftedUnit]] = {}
    for draft in drafts:
        for unit in draft.units:
            unreal = unit.spec.device.type == "meta" or unit.spec.master_dtype.is_complex
            if unit.wire is None or not unit.spec.shard_numel or unreal:
                continue
            known = smallest.get(id(draft.caster))
            if known is None or unit.spec.shard_numel < known[1].spec.shard_numel:
                smallest[id(draft.caster)] = draft.caster, unit
    for caster, unit in smallest.values():
        _try_codec(caster, unit, collectives, shards)


def _try_codec(caster: PrecisionCaster, unit: DraftedUnit, collectives: Collectives, shards: int) -> None:
    spec = unit.spec
    assert unit.wire is not None
    ramp = torch.linspace(-1.0, 1.0, spec.shard_numel + 2, dtype=torch.float64)[1:-1]
    shard = ramp.to(device=spec.device, dtype=spec.master_dtype)
    wire = torch.zeros(shards, unit.wire.nbytes_per_rank, dtype=torch.uint8, device=spec.device)
    out = torch.full((shards, spec.shard_numel), float("nan"), dtype=unit.dtypes.compute, device=spec.device)
    with torch.no_grad():
        caster.prepare([spec], collectives)
        # As in a step: together with those that travel along, here by itself.
        caster.encode_many([spec], [wire[0]], [shard])
        wire.copy_(wire[:1].clone().expand_as(wire))
        caster.decode_many([spec], [wire], [out])
    for row, values in enumerate(out.double().cpu().unbind()):
        if not _alike(values, ramp):
            raise PluginContractError(
                f"decode of {plugin_name(caster)} made {_few(values)} of what encode had made of {_few(ramp)}, as the "
                f"shard of rank {row} in unit '{spec.label}' (rank {collectives.rank}). Let decode undo encode, for "
                "every rank's row."
            )


def _alike(values: torch.Tensor, ramp: torch.Tensor) -> bool:
    if not values.isfinite().all():
        return False
    size, wanted = float(values.norm()), float(ramp.norm())
    if not wanted:
        # One element, the middle of the ramp.
        return size <= 1.0
    return wanted / _SCALE <= size <= wanted * _SCALE and float(values @ ramp) >= _ALIKE * size * wanted


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Elements at even distances, the last one too, on the host."""
    if tensor.is_meta or not tensor.numel():
        return torch.empty(0, dtype=tensor.dtype)
    every = max(1, tensor.numel() // _COMPARED)
    return torch.cat([tensor.detach()[::every], tensor.detach()[-1:]]).cpu()


def _equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(((found == wanted) | (found.isnan() & wanted.isnan())).all())


def _first_difference(found: torch.Tensor, wanted: torch.Tensor) -> str:
    different = ~((found == wanted) | (found.isnan() & wanted.isnan()))
    first = int(different.nonzero()[0])
    return f"{found[first].item()} where {wanted[first].item()} was"


def _few(values: torch.Tensor) -> Sequence[float]:
    return [round(value, 4) for value in values[:4].tolist()]
