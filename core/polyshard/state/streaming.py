"""Whole weights handed out unit by unit, for engines that generate, and written back into shards."""

from __future__ import annotations

import hashlib
import math
import socket
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ..errors import ConfigError, ConfigTypeError
from ..inspect import (
    ShardedModel,
    ShardedParameter,
    ShardedUnit,
    ToSome,
    WholeFlats,
    is_dtensor,
    savable_model,
    savable_part,
    whole_tensors,
)
from ..interfaces import Collectives
from ..io.boxes import Box, box_within
from .contents import (
    compared_entries,
    first_names,
    known_names,
    model_state,
    names_within,
    outside_units,
    packed_entries,
)
from .exchange import numbers_of_all, speaks, together
from .restore import Unmatched
from .source import as_known, chunks_of, in_chunks, listed

#: For each name of the unsharded model the one to hand out, or None to leave it out.
Renaming = Callable[[str], str | None]
#: Who gets weights; see ``stream``.
Ranks = Collection[int] | Literal["all", "hosts"]
#: Names, and whole tensors on the device that computes, in one order.
Weights = tuple[list[str], list[torch.Tensor]]

_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def stream(
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    bucket_nbytes: int | None = None,
    names: Renaming | None = None,
    ranks: Ranks = "all",
) -> Generator[Weights, None, None]:
    """Hand out the whole weights of a sharded model, unit by unit: ``(names, tensors)``, two lists of equal length.

    For an engine that generates, ``for names, tensors in polyshard.stream(model): engine.load(zip(names, tensors))``.
    A unit is one gather, and the next one's is on its way while the caller handles this one's. Every rank calls it and
    goes through it alike, between steps; the model is as it was afterwards, also where the caller leaves the loop
    early. Parameters come first, by unit in module order, the smallest of each last; then, as one more list, what is
    outside of units: ignored parameters and persistent buffers. A tied parameter comes once, under its first name.
    Parameters that are parts of larger tensors by tensor or expert parallelism come whole, by one more gather for those
    of a unit that are cut evenly, and one for each other.

    A rank has at most two units whole at a time. The list of tensors is emptied when the next one is asked for. A
    tensor that the caller still refers to then is moved to memory of its own and stays valid; a view of one keeps its
    whole unit.

    Args:
        model: A sharded model, or any module inside one, the same on every rank: names are relative to it then.
        dtype: In which floating-point tensors are handed out; None for the dtype in which they are kept. Ranks send the
            narrower of the two: the values are those of a cast behind the gather, to the bit.
        bucket_nbytes: Hand out neighbouring units together, and gather them by one launch for each group of ranks,
            while all of their tensors have at most so many bytes; a larger unit comes alone, and none is divided. Two
            buckets take the place of two units of memory. None to hand out each unit by itself.
        names: Given the name of a parameter or buffer in the unsharded ``model``, the name to hand out, or None to
            leave it out: a unit of which nothing is wanted is not gathered. None for all names as they are.
        ranks: Who gets tensors: ``"all"``, ``"hosts"`` for the first rank of each host, or the numbers of some. Others
            take part in the loop as well, and get empty lists.

    Raises:
        ConfigError: an argument cannot be; ``names`` gives one name twice.
        StateError: inside a step, or ``model`` is in no sharded model. While a stream is open, a forward, a backward,
            an optimizer's step, another stream and whatever saves or loads raise it.
        UnsupportedError: ranks have other parameters under the same names.
        RankMismatchError: another rank failed, or was given other arguments.
        CollectiveError: another rank did not arrive.
    """
    sharded, module = savable_part(model, "stream()")
    called: dict[str, object] = {}
    with together(sharded.collectives, "Preparing a stream of weights", called):
        _refuse_arguments(dtype, bucket_nbytes, names, ranks, sharded)
        wanted = _wanted(sharded, module, dtype, names)
        called.update(
            model=sharded.name_of(module),
            dtype=dtype,
            bucket_nbytes=bucket_nbytes,
            ranks=ranks if isinstance(ranks, str) else sorted(ranks),
            names=_digest(name for each in wanted for name in each.names),
        )
    return _handed_out(sharded, _buckets(wanted, bucket_nbytes), _Receivers(sharded, ranks))


def whole_weights(
    sharded: ShardedModel, ranks: Ranks, wanted: Collection[str] | None = None
) -> Generator[Weights, None, None]:
    """As ``stream`` to ``ranks``, of the names in ``wanted`` or of all, for arguments that were compared."""
    names = None if wanted is None else {name: name for name in wanted}.get
    return _handed_out(
        sharded, _buckets(_wanted(sharded, sharded.module, None, names), None), _Receivers(sharded, ranks)
    )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is wanted of one unit; or what is wanted outside of units."""

    names: Sequence[str]
    """Those that are handed out."""
    parameters: Sequence[ShardedParameter]
    """Of the unit, in the order of ``names``."""
    outside: Sequence[torch.Tensor]
    """Tensors outside of units, in the order of ``names``."""
    unit: ShardedUnit | None
    dtype: torch.dtype | None
    """In which floating-point tensors are handed out; None for the one in which they are kept."""

    @property
    def nbytes(self) -> int:
        """Of what is handed out: the same on every rank."""
        sizes = [(each.shape, each.tensor.dtype) for each in self.parameters]
        sizes += [(tuple(each.shape), each.dtype) for each in self.outside]
        return sum(math.prod(shape) * _cast(dtype, self.dtype).itemsize for shape, dtype in sizes)


def _handed_out(
    sharded: ShardedModel, buckets: Sequence[Sequence[_Wanted]], receivers: _Receivers
) -> Generator[Weights, None, None]:
    coming: WholeFlats | None = None
    with sharded.handing_out():
        try:
            coming = receivers.gather(buckets[0]) if buckets else None
            for number, bucket in enumerate(buckets):
                arriving, coming = coming, None
                flats = [] if arriving is None else arriving.wait()
                del arriving
                if number + 1 < len(buckets):
                    coming = receivers.gather(buckets[number + 1])
                chosen, tensors = _weights(bucket, flats, receivers)
                del flats
                kept = [weakref.ref(tensor) for tensor in tensors]
                yield chosen, tensors
                tensors.clear()
                copy_kept(kept)
        finally:
            if coming is not None:
                # Its memory is written until it ends.
                coming.wait()


@torch.no_grad()
def _weights(bucket: Sequence[_Wanted], flats: list[torch.Tensor], receivers: _Receivers) -> Weights:
    """What ``bucket`` hands out of its units, which arrived in ``flats``. Every rank goes through it."""
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    receives = receivers.receives
    arrived = iter(flats)
    with torch.inference_mode(False):
        for each in bucket:
            found = [_copied(tensor, each.dtype) for tensor in each.outside if receives or is_dtensor(tensor)]
            if each.unit is not None and each.unit.extended:
                found += [
                    # The numbers inside of a parameter mean something in their own dtypes.
                    whole if stored.inner is None or stored.inner.name else whole.to(_cast(whole.dtype, each.dtype))
                    for stored, whole in zip(
                        each.parameters, receivers.sharded.gather_stored(each.unit, each.parameters), strict=True
                    )
                    if receives
                ]
            elif each.unit is not None and receivers.take_part(each):
                flat = next(arrived)
                flat = flat.to(_cast(flat.dtype, each.dtype))
                parts = [(one.part, one.within(flat)) for one in each.parameters if one.part is not None]
                # Those that are parts need all ranks.
                wholes = iter(whole_tensors(*zip(*parts, strict=True)) if parts else ())
                if receives:
                    found += [next(wholes) if one.part is not None else one.within(flat) for one in each.parameters]
                del parts, wholes
                del flat
            if receives:
                names += each.names
                tensors += found
            del found
    return names, tensors


@torch.no_grad()
def copy_kept(kept: Sequence[weakref.ref[torch.Tensor]]) -> None:
    """Give tensors that the caller still has memory of their own, and so the unit's back."""
    with torch.inference_mode(False):
        for reference in kept:
            tensor = reference()
            if tensor is not None and tensor.untyped_storage().nbytes() > tensor.nbytes:
                tensor.data = tensor.clone()


def _copied(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A whole copy of a tensor outside of units."""
    whole: Any = tensor.detach()
    if is_dtensor(whole):
        whole = whole.full_tensor()
    found: torch.Tensor = whole.to(_cast(whole.dtype, dtype), copy=True)
    return found


def _cast(kept: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return kept if wanted is None or not kept.is_floating_point else wanted


def _wanted(
    sharded: ShardedModel, module: nn.Module, dtype: torch.dtype | None, names: Renaming | None
) -> list[_Wanted]:
    """Of what is in ``module``, by unit, and last what is outside.

    Raises ConfigError: ``names`` answers no name, or one for two tensors.
    """
    given: dict[str, str] = {}
    within = None if module is sharded.module else names_within(sharded, module)

    def name_for(first: str) -> str | None:
        name = first if within is None else within.get(first, (None,))[0]
        if name is None:
            return None
        found: object = name if names is None else names(name)
        if found is not None and not isinstance(found, str):
            raise ConfigTypeError(
                f"stream(): names('{name}') is {found!r} (rank {sharded.rank}). Return a name, or None to leave it out."
            )
        if found is not None:
            other = given.setdefault(found, name)
            if other != name:
                raise ConfigError(
                    f"stream(): names gives '{found}' to '{other}' and to '{name}' (rank {sharded.rank}). Give each "
                    "tensor a name of its own."
                )
        return found

    sharded.refuse_moved()
    wanted = []
    for unit in sharded.units:
        chosen = [(new, each) for each in unit.stored if (new := name_for(each.name)) is not None]
        if chosen:
            # The caller's loop still refers to the last tensor when it asks for the next list, which copies that one.
            smallest = min(range(len(chosen)), key=lambda number: math.prod(chosen[number][1].shape))
            chosen.append(chosen.pop(smallest))
            as_kept = None if unit.packed else dtype
            wanted.append(_Wanted([new for new, _ in chosen], [each for _, each in chosen], (), unit, as_kept))
    # What says how bytes are meant is not cast, as the bytes are not.
    packed = packed_entries(sharded).keys()
    outside: dict[torch.dtype | None, dict[str, torch.Tensor]] = {}
    for name, value in outside_units(sharded).items():
        if (new := name_for(name)) is not None:
            outside.setdefault(None if name in packed else dtype, {})[new] = value
    wanted += [_Wanted(list(each), (), list(each.values()), None, as_kept) for as_kept, each in outside.items()]
    return wanted


def _buckets(wanted: Sequence[_Wanted], nbytes: int | None) -> list[list[_Wanted]]:
    """Neighbours of at most ``nbytes`` together, or one that is larger."""
    if nbytes is None:
        return [[each] for each in wanted]
    buckets: list[list[_Wanted]] = []
    filled = 0
    for each in wanted:
        size = each.nbytes
        if not buckets or filled + size > nbytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(each)
        filled += size
    return buckets


def _digest(names: Iterable[str]) -> str:
    found = list(names)
    return f"{len(found)} names of digest {hashlib.sha256(repr(found).encode()).hexdigest()[:16]}"


class _Receivers:
    """Who gets weights, and the gathers that reach them."""

    def __init__(self, sharded: ShardedModel, ranks: Ranks) -> None:
        self.sharded = sharded
        #: Whether this rank does.
        self.receives = True
        # Of groups some of whose ranks do not: who does, and gathers that reach these.
        self._receivers: dict[Collectives, list[int]] = {}
        self._among: dict[Collectives, Collectives] = {}
        if ranks == "all":
            return
        world = sharded.collectives
        if ranks == "hosts":
            host = socket.gethostname()
            self.receives = not speaks(world) or world.all_gather_object(host).index(host) == world.rank
        else:
            self.receives = world.rank in ranks
        for group in dict.fromkeys(unit.shard for unit in sharded.units):
            if group is not None and speaks(group) and group.capabilities.exchanges:
                answers = numbers_of_all(group, [self.receives])
                found = self._receivers[group] = [rank for rank, (receives,) in enumerate(answers) if receives]
                if len(found) < group.world_size:
                    self._among[group] = ToSome(group, found)

    def take_part(self, wanted: _Wanted) -> bool:
        """Whether this rank takes part in a gather of a unit: where any of its ranks needs it."""
        assert wanted.unit is not None
        group = wanted.unit.shard
        if _has_parts(wanted):
            return True
        return self.receives if group is None else bool(self._receivers.get(group, True))

    def gather(self, bucket: Sequence[_Wanted]) -> WholeFlats | None:
        """Issue the gathers of ``bucket``; None where this rank takes part in none."""
        units: list[tuple[ShardedUnit, torch.dtype, Collectives | None]] = []
        for each in bucket:
            if each.unit is not None and not each.unit.extended and self.take_part(each):
                group = each.unit.shard
                among = group if group is None or _has_parts(each) else self._among.get(group, group)
                kept, cast = each.unit.master.dtype, _cast(each.unit.master.dtype, each.dtype)
                units.append((each.unit, cast if cast.itemsize <= kept.itemsize else kept, among))
        return self.sharded.gather_together(units) if units else None


def _has_parts(wanted: _Wanted) -> bool:
    """Whether other ranks need what this one has of a unit, to put whole tensors together."""
    return any(each.part is not None for each in wanted.parameters)


def _refuse_arguments(dtype: Any, bucket_nbytes: Any, names: Any, ranks: Any, sharded: ShardedModel) -> None:
    where = f"(rank {sharded.rank})"
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"stream(): dtype must be float64, float32, float16 or bfloat16, not {dtype!r} {where}.")
    if bucket_nbytes is not None and (type(bucket_nbytes) is not int or bucket_nbytes < 1):
        raise ConfigError(f"stream(): bucket_nbytes must be a number of bytes, not {bucket_nbytes!r} {where}.")
    if names is not None and not callable(names):
        raise ConfigTypeError(
            f"stream(): names must be a function of a name, not {names!r} {where}. For some names alone, give "
            "lambda name: name if name in wanted else None."
        )
    if isinstance(ranks, str):
        fits = ranks in ("all", "hosts")
    else:
        world_size = sharded.collectives.world_size
        fits = isinstance(ranks, Collection) and all(type(each) is int and 0 <= each < world_size for each in ranks)
        fits = fits and len(ranks) > 0
    if not fits:
        raise ConfigError(
            f"stream(): ranks must be 'all', 'hosts' or numbers of the model's {sharded.collectives.world_size} ranks, "
            f"not {ranks!r} {where}."
        )


def load_stream(model: nn.Module, pairs: Iterable[tuple[str, torch.Tensor]], *, strict: bool = True) -> Unmatched:
    """Write whole tensors into the shards of ``model``, in any order; returns the names that did not match, if not
    ``strict``.

    The way back from ``stream``: each rank takes its part of each tensor, in place, so that optimizers and captured
    steps stay valid. Every rank calls it between steps, with all tensors on each: no elements travel, and ranks
    exchange only whether all of them are done. Values are converted to the model's dtypes, as ``load_state_dict`` does.
    A tied parameter is taken from any of its names. Of pairs in a collection (a list, ``state_dict().items()``) all are
    looked at before the first is written; of an iterator each is looked at before it is written itself, and one that is
    refused leaves those before it in the model.

    Args:
        model: The outermost sharded module.
        pairs: Names of the unsharded model, parameters' and persistent buffers', and whole tensors on any device.
        strict: Whether names that the model lacks, and those of the model that do not come, are errors.

    Raises:
        ConfigError: a name is unknown, comes twice or is missing, or a tensor has another shape. Missing ones are known
            at the end of an iterator, when the rest is written.
        StateError: inside a step, or ``model`` is not the outermost sharded module.
        RankMismatchError: another rank failed, or was given other names.
    """
    sharded = savable_model(model, "load_stream()")
    called: dict[str, object] = {}
    with together(sharded.collectives, "Loading a stream of weights", called):
        if isinstance(pairs, Mapping):
            raise ConfigTypeError(f"load_stream() got a mapping (rank {sharded.rank}). Give its items().")
        if isinstance(pairs, Collection):
            _Loading(sharded, strict=strict, writes=False).take(pairs)
        loading = _Loading(sharded, strict=strict, writes=True)
        unmatched = loading.take(pairs)
        called["names"] = _digest(sorted(loading.seen))
    return unmatched


class _Loading:
    """Whole tensors on their way into a model by name, or looked at alone."""

    def __init__(self, sharded: ShardedModel, *, strict: bool, writes: bool) -> None:
        self._sharded, self._strict, self._writes = sharded, strict, writes
        self._where = f"(rank {sharded.rank})"
        self._targets = model_state(sharded)
        #: Names of settings, which must be as they are.
        self._compared = compared_entries(sharded)
        self._first = first_names(sharded)
        self._known = known_names(sharded)
        #: The names that came.
        self.seen: set[str] = set()

    @torch.no_grad()
    def take(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> Unmatched:
        """Write all ``pairs``, each after a look at it, or look at them; returns the names that did not match.

        Raises ConfigError: one is unknown, comes twice or is missing, where that is not allowed, or does not fit.
        """
        #: By first name, what tells which values came.
        came: dict[str, torch.Tensor] = {}
        unexpected: list[str] = []
        for given, tensor in pairs:
            name = as_known(given, self._known) if isinstance(given, str) else given
            target = self._find(name, tensor)
            if target is None:
                unexpected.append(name)
                continue
            first = self._first[name]
            if first in came or first in self._compared:
                self._refuse_other(name, came.get(first, target), tensor)
            elif self._writes:
                chunks = list(chunks_of(target))
                parts = [box_within(tensor.detach(), Box.whole(tensor.shape), each.box) for each in chunks]
                self._sharded.copy_into_masters(parts, [each.view for each in chunks])
            came.setdefault(first, target if self._writes else tensor)
        missing = [name for name in self._targets if name not in came]
        if missing and self._strict:
            raise ConfigError(
                f"load_stream() got no {listed(missing)} {self._where}. Give all names of the unsharded model, or "
                "strict=False."
            )
        return Unmatched(tuple(missing), tuple(unexpected))

    def _find(self, name: str, tensor: object) -> torch.Tensor | None:
        """The model's tensor that ``tensor`` is for; None for no such one, where that is allowed.

        Raises ConfigError: it is unknown, came already, or does not fit.
        """
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ConfigTypeError(
                f"load_stream() got a pair of {type(name).__name__} and {type(tensor).__name__} {self._where}. Give "
                "names and tensors."
            )
        if name in self.seen:
            raise ConfigError(f"load_stream() got '{name}' twice {self._where}. Give each name once.")
        self.seen.add(name)
        target = self._targets.get(self._first.get(name, name))
        if target is None:
            if self._strict:
                raise ConfigError(
                    f"load_stream() got '{name}', which the model lacks {self._where}. Give names of the unsharded "
                    "model, or strict=False."
                )
            return None
        if in_chunks(tensor):
            raise ConfigError(
                f"load_stream() got a {type(tensor).__name__} for '{name}' {self._where}, of which this rank has a "
                "part. Give whole tensors, or all of them to polyshard.state.set_model_state_dict."
            )
        if tuple(tensor.shape) != tuple(target.shape):
            raise ConfigError(
                f"load_stream() got '{name}' in shape {tuple(tensor.shape)}, and the model has {tuple(target.shape)} "
                f"{self._where}. Give the whole tensor."
            )
        return target

    def _refuse_other(self, name: str, known: torch.Tensor, tensor: torch.Tensor) -> None:
        """Raise ConfigError where ``tensor`` is not what is ``known`` of it here."""
        for each in chunks_of(known):
            given = box_within(tensor, Box.whole(tensor.shape), each.box)
            if not torch.equal(given.to(each.view.device, each.view.dtype), each.view):
                raise ConfigError(
                    f"load_stream() got other values for '{name}' than "
                    f"{'the model has' if name in self._compared else 'under another name of the same tensor'} "
                    f"{self._where}. Give tied tensors once, or alike; of quantized ones, what was quantized alike."
                )
