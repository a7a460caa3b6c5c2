"""Torch's own functions, made right for parameters of which each rank holds a piece.

[Note: torch's functions]
``torch.nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler`` read the tensors that they get. Of a sharded model these
are this rank's pieces: each rank would clip by a norm of its own, and step or skip by an overflow of its own.
``parameters_to_vector`` or an initialiser would return other elements, or the same random numbers on every rank,
without an error. Programs have imported these names long before a model is sharded. So the first ``shard()`` exchanges
the functions behind the names, once in a process: each looks for parameters of sharded models among its arguments, and
calls torch's own where there are none. A tensor subclass is no alternative: torch's foreach and fused optimizers take
plain tensors alone. ``restore_torch`` puts torch's own functions back.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import GeneratorType
from typing import Any
from weakref import WeakSet

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from .. import _torch_private
from ..errors import ConfigError, StateError, UnsupportedError
from ..interfaces import ReduceOp
from ..planning.parts import is_dtensor
from ..runtime.activation_checkpoint import Checkpointed
from ..runtime.guards import forget_registrations
from ..runtime.live_roots import ParameterLocation, live_roots
from ..runtime.root import Root
from ..runtime.unit import Unit
from .norms import (
    GradientsByHolders,
    agreed_norm,
    check_norm_type,
    count_outside,
    count_parts,
    groups_of,
    norm_dtype,
    norm_text,
    readable_scales,
)
from .optimizers import OptimizerCheck
from .whole import guard_state_dicts

_installing = threading.Lock()
_checks: list[OptimizerCheck] = []
_guarded: WeakSet[Unit] = WeakSet()


def follow(root: Root) -> None:
    """Let torch's functions and optimizers find the parameters of ``root``; guard its state dicts."""
    with _installing:
        if not _checks:
            _install()
        _checks[0].forget()
        live_roots.add(root)
        # Modules that become part of a larger model have their guards.
        new = [unit for unit in root.units if unit not in _guarded]
        _guarded.update(new)
    guard_state_dicts(new)


def exchanged_functions() -> tuple[str, ...]:
    """Names of torch's functions whose bodies are polyshard's now; empty before the first ``shard()``."""
    return _torch_private.exchanged()


def restore_torch() -> None:
    """Put torch's own functions back, and take polyshard's hooks off its optimizers and module registration.

    For a process that goes on without sharded models. The next ``shard()`` exchanges them again. Models that are still
    sharded work on, but torch's functions take their pieces for whole parameters.
    """
    with _installing:
        _torch_private.restore_exchanged()
        for hook in _hooks:
            hook.remove()
        _hooks.clear()
        _checks.clear()
        forget_registrations()


#: Removed by ``restore_torch``.
_hooks: list[RemovableHandle] = []


def _install() -> None:
    GradientUtilities().install()
    _guard_whole_functions()
    _follow_inner_backwards()
    _follow_checkpoints()
    check = OptimizerCheck(live_roots)
    _hooks.append(register_optimizer_step_pre_hook(check.before_step))
    _checks.append(check)


@contextmanager
def replacing_values(root: Root, context: str, values: str) -> Iterator[None]:
    """Inside of ``context``, masters of ``root`` hold other ``values``: steps and backwards of it raise."""
    before, root.replaced = root.replaced, (context, values)
    # Optimizers that were let through are looked at again. Nobody looks where ``shard`` was never called: FSDP's face.
    for check in _checks:
        check.forget()
    try:
        yield
    finally:
        root.replaced = before


class GradientUtilities:
    """Norms and infinities of gradients, over all ranks that hold pieces of the parameters."""

    def install(self) -> None:
        self._total_norm = _torch_private.exchange_behind(torch.nn.utils.get_total_norm, self.total_norm)
        self._clip = _torch_private.exchange_behind(torch.nn.utils.clip_grad_norm_, self.clip_grad_norm)
        self._unscale = _torch_private.exchange_unscale(self.unscale)

    def clip_grad_norm(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """``torch.nn.utils.clip_grad_norm_``, by the norm over all ranks that hold pieces of ``parameters``.

        Every rank gives the same parameters, in any order, whether or not it holds elements of them. Those outside of
        units count once, and have one gradient on all ranks.

        Raises:
            ConfigError: ``norm_type`` is not positive.
            RankMismatchError: gradients of parameters outside of units differ between ranks.
            StateError: some parameters of a unit are given whose gradients arrive in its flat parameter.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not given and isinstance(parameters, GeneratorType):
            # Torch warns of those.
            return self._clip((tensor for tensor in given), max_norm, norm_type, error_if_nonfinite, foreach)
        found = live_roots.find_pieces(given)
        given, found = _as_flat(given, found)
        gradients = [tensor.grad for tensor in given]
        if _spans_ranks(found):
            total = self._norm(
                given, gradients, found, norm_type, error_if_nonfinite, foreach, "clip_grad_norm_", max_norm
            )
        else:
            # Whose gradients these are is known: nothing looks for them among those of all models.
            present = [gradient for gradient in gradients if gradient is not None]
            total = self._total_norm(present, norm_type, False, foreach)
            if error_if_nonfinite:
                total = self._total_norm([self._refusable(total, found)], norm_type, True, foreach)
        torch.nn.utils.clip_grads_with_norm_(given, max_norm, total, foreach)
        return total

    def total_norm(
        self,
        tensors: torch.Tensor | Iterable[torch.Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """``torch.nn.utils.get_total_norm`` over all ranks, of gradients or of parameters.

        Of a sharded model it needs all gradients: ranks that hold none of a selection would not know that they must
        take part.

        Raises:
            ConfigError: ``norm_type`` is not positive.
            RankMismatchError: other gradients than those of units are given, and differ between ranks.
            StateError: some gradients of a sharded model are given and others are not.
        """
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        found = live_roots.find_pieces(given)
        for index, each in enumerate(found):
            if each is not None and each.unit in each.root.unsharded:
                # Whole on every rank, as long as this lasts.
                found[index] = None
        self._find_gradients(given, found)
        if not _spans_ranks(found):
            total = self._total_norm(given, norm_type, False, foreach)
            return (
                self._total_norm([self._refusable(total, found)], norm_type, True, foreach)
                if error_if_nonfinite
                else total
            )
        return self._norm(given, given, found, norm_type, error_if_nonfinite, foreach, "get_total_norm")

    def unscale(
        self,
        scaler: torch.amp.GradScaler,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """``GradScaler._unscale_grads_``, whose finding is that of all ranks: they step alike, and scale alike.

        So do they for an optimizer that has parameters of a sharded model outside of units alone.

        Raises ConfigError: gradients are fp16, which torch does not unscale.
        """
        given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found = sorted(
            (each for each in live_roots.find_pieces(given) if each is not None), key=lambda each: each.order
        )
        units = list(dict.fromkeys(each.unit for each in found))
        root = found[0].root if found else live_roots.around(given)
        if root is None:
            findings = self._unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
            # Torch's own knows of one stage.
            beside = _find_infinities(each.root for each in live_roots.find(given) if each is not None)
            return findings if beside is None else {beside.device: beside}
        for unit in units:
            # Known on ranks without a gradient too: they would wait for those that torch's own check stops.
            if unit.dtypes.grad == torch.float16 and not allow_fp16:
                raise ConfigError(
                    f"torch.amp.GradScaler does not unscale fp16 gradients, which unit '{unit.name}' has (rank "
                    f"{unit.ranks.world.rank}). Keep the model in fp32 and shard it with precision='fp16'."
                )
        inv_scale, found_inf = readable_scales(inv_scale, given), readable_scales(found_inf, given)
        findings = self._unscale(scaler, optimizer, inv_scale, found_inf, allow_fp16)
        device = root.collectives.device
        worst = torch.zeros((), dtype=torch.float32, device=device)
        for finding in findings.values():
            worst = torch.maximum(worst, finding.to(device))
        # For parameters outside of units alone, too: one scale serves these and the model's other optimizers.
        groups = dict.fromkeys(group for unit in units or root.units[:1] for group in unit.ranks.everyone)
        with root.meeting("findings of a GradScaler", groups):
            for group in groups:
                group.all_reduce(worst, op=ReduceOp.MAX).wait()
        beside = _find_infinities([root, *(each.root for each in found)])
        if beside is not None:
            worst = torch.maximum(worst, beside.to(device))
        # A rank without any element has no finding, which is an error to torch. One finding alone: fused optimizers
        # get the sum over devices, and skip a step where that is 1.
        return {device: worst}

    def _norm(
        self,
        given: Sequence[torch.Tensor],
        tensors: Sequence[torch.Tensor | None],
        found: Sequence[ParameterLocation | None],
        norm_type: float,
        error_if_nonfinite: bool,
        foreach: bool | None,
        call: str,
        max_norm: float | None = None,
    ) -> torch.Tensor:
        """The norm of ``tensors``: those that are ``given``, or their gradients."""
        # By unit, in one order on all ranks.
        inside: dict[tuple[int, int], list[tuple[ParameterLocation, torch.Tensor | None]]] = {}
        outside: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        strange: list[torch.Tensor] = []
        for parameter, tensor, each in zip(given, tensors, found, strict=True):
            if each is not None:
                inside.setdefault(each.order, []).append((each, tensor))
            elif tensor is not None and type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
                # A subclass such as DTensor computes its own norm.
                strange.append(tensor)
            elif tensor is not None and not tensor.numel():
                # Nobody tells whose it is: a rank without experts has such gradients.
                continue
            elif tensor is not None or parameter.requires_grad:
                outside.append((parameter, tensor))
        by_unit = [inside[order] for order in sorted(inside)]
        units = [pairs[0][0].unit for pairs in by_unit]
        first = by_unit[0][0][0].root
        order = float(norm_type)
        check_norm_type(order, call, first.rank)
        held: GradientsByHolders = {}
        for unit, pairs in zip(units, by_unit, strict=True):
            count_parts(groups_of(held, unit), unit, ((each.slot, tensor) for each, tensor in pairs))
        for parameter, tensor in outside:
            count_outside(held, first, parameter, tensor)

        def named() -> Iterator[tuple[str, torch.Tensor | None]]:
            names = {
                id(p): name
                for root in live_roots.roots()
                for name, p in root.module_states[0].module.named_parameters()
            }
            for number, (parameter, tensor) in enumerate(outside):
                shape = "x".join(map(str, parameter.shape))
                yield names.get(id(parameter), f"number {number} outside of units ({shape})"), tensor

        total = agreed_norm(
            first,
            units,
            held,
            order,
            norm_dtype(units, (parameter for parameter, _ in outside)),
            norm_text(order, max_norm, error_if_nonfinite=error_if_nonfinite),
            named,
        )
        if error_if_nonfinite:
            total = self._refusable(total, found)
        # The norm of norms is the norm. Torch's own raises where that is asked for.
        return self._total_norm([total, *strange], order, error_if_nonfinite, foreach)

    def _refusable(self, total: torch.Tensor, found: Sequence[ParameterLocation | None]) -> torch.Tensor:
        """``total``, or not a number where any rank's norm is not finite: replicas raise alike."""
        here = sorted((each for each in found if each is not None), key=lambda each: each.order)
        groups = dict.fromkeys(group for each in here for group in each.unit.ranks.everyone)
        if not groups:
            return total
        root = here[0].root
        bad = (~total.isfinite()).to(root.collectives.device, torch.float32)
        with root.meeting("comparison of a norm that must be finite", groups):
            for group in groups:
                group.all_reduce(bad, op=ReduceOp.MAX).wait()
        return total.masked_fill(bad.to(total.device) > 0, math.nan)

    def _find_gradients(self, tensors: Sequence[torch.Tensor], found: list[ParameterLocation | None]) -> None:
        """Find what among ``tensors`` is a gradient of a sharded model, by where it lies: views of one count as it."""
        # Other tensors may be of any kind, without an address.
        wanted = {
            (tensor.data_ptr(), tensor.numel()): index
            for index, tensor in enumerate(tensors)
            if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel()
        }
        for age, root in enumerate(live_roots.roots()):
            seen, missing = [], None
            for number, unit in enumerate(root.units):
                for slot, receiver in () if unit.ranks.alone and unit.ranks.alike else unit.slots_of_receivers():
                    gradient = receiver.grad
                    if gradient is None or is_dtensor(gradient):
                        continue
                    index = wanted.get((gradient.data_ptr(), gradient.numel()))
                    if index is not None:
                        found[index] = ParameterLocation(root, unit, slot, (age, number))
                        if unit.ranks.owner is not None:
                            seen.append(unit)
                    elif gradient.numel() and unit.ranks.owner is not None:
                        missing = unit
            if seen and (missing is not None or not _reaches_every_rank(seen)):
                raise StateError(
                    "get_total_norm got some gradients of a sharded model, which does not tell the ranks without a "
                    f"piece of those that they must take part (rank {root.rank}, unit '{(missing or seen[0]).name}'). "
                    "Give all gradients of the model, or call torch.nn.utils.clip_grad_norm_(parameters, math.inf), "
                    "which returns the norm and changes nothing, with the parameters."
                )


def _find_infinities(roots: Iterable[Root]) -> torch.Tensor | None:
    """1 where a gradient of a model that steps with ``roots`` is no finite number, else 0; None where none does."""
    asking = [root.find_infinities for root in dict.fromkeys(roots) if root.find_infinities is not None]
    return torch.stack([ask() for ask in asking]).amax() if asking else None


def _spans_ranks(found: Sequence[ParameterLocation | None]) -> bool:
    """Whether this rank may not answer alone: others hold pieces, or may have other gradients of what is no unit's."""
    all_ranks = [each.unit.ranks for each in found if each is not None]
    if any(ranks.owner is not None or not ranks.alike for ranks in all_ranks):
        return True
    several = len(all_ranks) < len(found) or any(ranks is not all_ranks[0] for ranks in all_ranks)
    return several and not all(ranks.alone for ranks in all_ranks)


def _as_flat(
    given: list[torch.Tensor], found: list[ParameterLocation | None]
) -> tuple[list[torch.Tensor], list[ParameterLocation | None]]:
    """Replace originals by their units' flat parameters where these receive the gradients."""
    flattened: dict[Unit, set[int]] = {}
    for each in found:
        if each is not None and each.slot is not None and each.unit.flat is not None:
            flattened.setdefault(each.unit, set()).add(each.slot)
    if not flattened:
        return given, found
    for unit, slots in flattened.items():
        if len(slots) < len(unit.parameters):
            absent = next(index for index in range(len(unit.parameters)) if index not in slots)
            raise StateError(
                f"Some parameters of unit '{unit.name}' are to be clipped and '{unit.parameters[absent].names[0]}' is "
                f"not, but all of them have one gradient, that of their flat parameter (rank {unit.ranks.world.rank}). "
                "Clip all of them, or do without polyshard.flat_parameters."
            )
    tensors: dict[torch.Tensor, ParameterLocation | None] = {}
    for tensor, each in zip(given, found, strict=True):
        if each is not None and each.slot is not None and each.unit.flat is not None:
            tensors[each.unit.flat.parameter] = each._replace(slot=None)
        else:
            tensors[tensor] = each
    return list(tensors), list(tensors.values())


def _reaches_every_rank(units: Iterable[Unit]) -> bool:
    """Whether every rank has a gradient of one of ``units``."""
    backward_state: set[int] = set()
    for unit in dict.fromkeys(units):
        layout, trained = unit.layout, unit.originals.trained
        # No shard then lies between two parameters, or behind the last one.
        whole = not layout.segments
        if whole and all(trained) and all(numel < layout.shard_numel for _, numel in layout.gaps()):
            return True
        backward_state.update(
            rank
            for rank in range(layout.world_size)
            if rank not in backward_state and any(trained[piece.slot] for piece in layout.pieces(rank))
        )
        if len(backward_state) == layout.world_size:
            return True
    return False


def _follow_checkpoints() -> None:
    # A module cannot see that its forward runs under a checkpoint, and ranks have to know ([Note: recomputation]).

    def called(function: Callable[..., Any], *args: Any, use_reentrant: bool | None = None, **kwargs: Any) -> Any:
        # None means True to torch.
        known = Checkpointed(function, use_reentrant is None or bool(use_reentrant))
        return before(known, *args, use_reentrant=use_reentrant, **kwargs)

    before = _torch_private.exchange_behind(torch.utils.checkpoint.checkpoint, called)


def _follow_inner_backwards() -> None:
    # Backwards inside of a forward: ``loss.backward()`` in a ``training_step``, or a block's own loss. A module state
    # notices a backward at the tensors that its forward returned, and a module that has not returned has none. A hook
    # on every parameter would notice, and cost more than the rest of a step's Python.

    def called(*args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            hidden(*args, **kwargs)
            return
        if kwargs.get("inputs") is not None:
            kwargs["inputs"] = _leaves_of(kwargs["inputs"])
        try:
            before(*args, **kwargs)
        except Exception as error:
            for reference in live_roots.references:
                root = reference()
                if root is not None:
                    root.tell_failed_backward(error)
            raise
        for reference in live_roots.references:
            root = reference()
            # A backward inside of another one ends with that.
            if root is not None and root.active is not None and not _torch_private.in_backward():
                root.end_inner_backward()

    hidden = _torch_private.hidden_from_compile(called)
    before = _torch_private.exchange_body(torch.autograd.backward, called)


def _leaves_of(inputs: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``inputs`` of a backward, with the gathered parameters that computed in the place of sharded ones.

    Autograd knows of no other, and would leave sharded parameters without a gradient.
    """
    given = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    found = zip(live_roots.find(given), given, strict=True)
    return [leaf for place, tensor in found for leaf in ((tensor,) if place is None else place.leaves or (tensor,))]


_VECTORS = "inside of 'with polyshard.unsharded(model)'"
_INITIALISERS = (
    "uniform_",
    "normal_",
    "trunc_normal_",
    "eye_",
    "dirac_",
    "xavier_uniform_",
    "xavier_normal_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "orthogonal_",
    "sparse_",
)


def _guard_whole_functions() -> None:
    utils = torch.nn.utils
    _exchange(utils.parameters_to_vector, _to_vector)
    _exchange(utils.vector_to_parameters, _from_vector)
    for name in _INITIALISERS:
        _guard_initialiser(name)
    _exchange(parametrize.register_parametrization, partial(_parametrize, "register_parametrization"))
    _exchange(parametrize.remove_parametrizations, partial(_parametrize, "remove_parametrizations"))
    _exchange(vars(prune.BasePruningMethod)["apply"].__func__, _prune)
    # These take seconds to import, which programs without tensor parallelism are spared.
    _torch_private.when_imported("torch.distributed.tensor", _guard_distribution)
    _torch_private.when_imported("torch.distributed.tensor.parallel", _guard_parallelization)


def _guard_distribution(tensors: Any) -> None:
    _exchange(tensors.distribute_tensor, _distribute_tensor)
    _exchange(tensors.distribute_module, partial(_divide, "torch.distributed.tensor.distribute_module"))


def _guard_parallelization(parallel: Any) -> None:
    _exchange(parallel.parallelize_module, partial(_divide, "torch.distributed.tensor.parallel.parallelize_module"))


def _exchange(public: Callable[..., Any], function: Callable[..., Any]) -> None:
    """``function`` gets torch's own as its first argument."""

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(before, *args, **kwargs)

    before = _torch_private.exchange_body(public, called)


def _to_vector(torchs: Callable[..., torch.Tensor], parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    given = list(parameters)
    _refuse_pieces("torch.nn.utils.parameters_to_vector", given, f"Call it {_VECTORS}")
    return torchs(given)


def _from_vector(torchs: Callable[..., None], vec: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
    given = list(parameters)
    instead = "Call it inside of 'with polyshard.unsharded(model, writeback=True)'"
    _refuse_pieces("torch.nn.utils.vector_to_parameters", given, instead)
    torchs(vec, given)


def _guard_initialiser(name: str) -> None:
    instead = (
        "Initialise before sharding, by shard(..., initializer=...) on the meta device, or inside of 'with "
        "polyshard.unsharded(model, writeback=True)', seeded alike on all ranks"
    )

    def called(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # A model is made of thousands of calls, hardly one of them of a sharded parameter.
        if live_roots.may_hold(tensor):
            _refuse_pieces(f"torch.nn.init.{name}", [tensor], instead)
        return before(tensor, *args, **kwargs)

    before: Callable[..., torch.Tensor] = _torch_private.exchange_body(getattr(nn.init, name), called)


def _parametrize(
    name: str, torchs: Callable[..., nn.Module], module: nn.Module, tensor_name: str, *args: Any, **kwargs: Any
) -> nn.Module:
    parametrizations = getattr(module, "parametrizations", {})
    there = [module._parameters.get(tensor_name)]
    if tensor_name in parametrizations:
        there += parametrizations[tensor_name].parameters()
    found = _first(each for each in there if each is not None)
    if found is not None:
        raise UnsupportedError(
            f"torch.nn.utils.parametrize.{name} would replace '{found.name}', which is sharded (rank "
            f"{found.root.rank}): what came in its place would be no part of the sharded model. Do it before sharding."
        )
    return torchs(module, tensor_name, *args, **kwargs)


def _distribute_tensor(torchs: Callable[..., torch.Tensor], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if live_roots.may_hold(tensor):
        instead = "Call polyshard.as_dtensor for this piece as a part of a DTensor"
        _refuse_pieces("torch.distributed.tensor.distribute_tensor", [tensor], instead)
    return torchs(tensor, *args, **kwargs)


def _divide(call: str, torchs: Callable[..., nn.Module], module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    found = _first(module.parameters())
    if found is not None:
        raise StateError(
            f"{call} would divide '{found.name}', which is sharded (rank {found.root.rank}), and put what is no part "
            "of the sharded model in its place. Call it first, and polyshard.shard after it, with a mesh of both "
            "dimensions: ShardConfig(mesh=mesh, shard='dp')."
        )
    return torchs(module, *args, **kwargs)


def _prune(
    torchs: Callable[..., Any], cls: type[prune.BasePruningMethod], module: nn.Module, name: str, *a: Any, **k: Any
) -> Any:
    parameter = module._parameters.get(name)
    found = None if parameter is None else _first([parameter])
    if found is not None and found.unit not in found.root.unsharded:
        raise UnsupportedError(
            f"torch.nn.utils.prune would replace '{found.name}', which is sharded (rank {found.root.rank}). Prune "
            "before sharding, or, together with prune.remove, inside of 'with polyshard.unsharded(model, "
            "writeback=True)'."
        )
    return torchs(cls, module, name, *a, **k)


def _refuse_pieces(call: str, tensors: Iterable[torch.Tensor], instead: str) -> None:
    found = _first(tensors, lambda each: each.unit.ranks.owner is not None and each.unit not in each.root.unsharded)
    if found is not None:
        raise StateError(
            f"{call} got '{found.name}', of which this rank holds a piece (rank {found.root.rank}), and means whole "
            f"parameters. {instead}."
        )


def _first(
    tensors: Iterable[torch.Tensor], counts: Callable[[ParameterLocation], bool] = lambda _: True
) -> ParameterLocation | None:
    return next((each for each in live_roots.find_pieces(list(tensors)) if each is not None and counts(each)), None)
