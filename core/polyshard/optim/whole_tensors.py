"""Optimizers that need whole tensors, over parameters that each rank holds a piece of."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from .. import _torch_private
from ..errors import CollectiveError, PluginContractError, UnsupportedError
from ..inspect import is_dtensor
from .plan import Plan, Round, SentPiece, Whole, plan_for

_STATE_DICTS = "torch.distributed.checkpoint.state_dict"
Parameters = Iterable[nn.Parameter] | Iterable[dict[str, Any]] | Iterable[tuple[str, nn.Parameter]]


class WholeTensorOptimizer(torch.optim.Optimizer, ABC):
    """Brings whole tensors together, each at one rank, and what that rank makes of them back to everybody's pieces.

    A subclass says three things: what of a piece is brought together (``contribute``), what is made of the whole
    (``transform``), and how that updates a piece (``update``). The same code serves unsharded models and every
    strategy, beside tensor parallelism too: of a sharded model, pieces are ``DTensor`` as its parameters are. Tensors
    of one group and shape are given to ``transform`` together, and the exchange of the next ones runs beside it.
    Tensors are spread over ranks by ``work``.

    Every rank calls ``step``, whether or not it has a gradient, with the same parameters in the same order. A parameter
    for which no rank has a gradient brings zeros, and is not updated.

    Args:
        params: as for every optimizer of torch. Not flat parameters.
        defaults: as for every optimizer of torch.
        dtype: in which tensors travel, and are given to ``transform``; None for the dtype of gradients.
    """

    def __init__(self, params: Parameters, defaults: dict[str, Any], dtype: torch.dtype | None = None) -> None:
        self._plans: list[Plan] | None = None
        self._dtype = dtype
        # The state that ``transform`` keeps of tensors in pieces, on the rank that owns each.
        self._kept: dict[nn.Parameter, dict[str, Any]] = {}
        super().__init__(params, defaults)
        self.register_state_dict_pre_hook(_refuse_shared_state)

    def contribute(
        self,
        group: Mapping[str, Any],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[torch.Tensor],
        places: Sequence[torch.Tensor],
    ) -> None:
        """Write the contributions of pieces into ``places``, one a piece, of its shape, in ``dtype``: the gradients.

        Pieces know nothing of each other: what is written to an element may follow from that element alone.
        """
        _torch_private.foreach_copy_([*map(own_values, places)], [*map(own_values, gradients)])

    @abstractmethod
    def transform(
        self, group: Mapping[str, Any], wholes: torch.Tensor, states: Sequence[dict[str, Any]]
    ) -> torch.Tensor:
        """What becomes of ``wholes``, ``[count, *shape]``, which may be overwritten: a tensor of the same shape.

        ``states``: a dict for each, which stays with its tensor: ``state[parameter]`` where this rank holds all of it,
        else one that only the rank has that owns the tensor. Checkpoints cannot hold the latter and refuse to.
        """

    @abstractmethod
    def update(
        self,
        group: Mapping[str, Any],
        shape: tuple[int, ...],
        parameters: Sequence[nn.Parameter],
        results: Sequence[torch.Tensor],
    ) -> None:
        """Update pieces of tensors of ``shape`` in place. ``results``: each of its piece's shape, in ``dtype``."""

    def is_stack(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
        """Whether ``transform`` treats each index of dimension 0 by itself: experts, say. False.

        Tensor or expert parallelism that cuts between these leaves them whole: ``transform`` gets this rank's, and the
        others are not sent. ``shape``: of the whole parameter.
        """
        return False

    def work(self, group: Mapping[str, Any], shape: tuple[int, ...]) -> float:
        """How long ``transform`` takes for a tensor of ``shape``, in any unit; its number of elements."""
        return float(math.prod(shape))

    @property
    def keeps_at_owners(self) -> bool:
        """Whether ``transform`` keeps anything that only this rank has, and that no state dict holds."""
        return any(self._kept.values())

    def drop_outdated_state(self) -> None:
        """Drop what a load gave this rank of pieces that another replica brings: steps have left it behind since."""
        for plan in self._plans or ():
            brought = {each.index for round_ in plan.rounds for each in round_.sends}
            for index, whole in enumerate(plan.wholes):
                if index not in brought:
                    self.state.pop(whole.parameter, None)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._plans = None

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_dtype": self._dtype, "_kept": self._kept}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        # ``load_state_dict`` calls it too, and an exchange of plans would need all ranks.
        self.__dict__.setdefault("_plans", None)
        super().__setstate__(state)

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step. ``closure``: as for every optimizer of torch.

        Raises:
            ConfigError: it was given a flat parameter.
            UnsupportedError: the model's collectives cannot exchange pieces, or a DTensor cannot be put together.
            RankMismatchError: in the first step, where ranks gave it different parameters.
            StateError: a model was closed, or a communication of it failed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._plans is None:
            self._plans = plan_for(
                self,
                lambda group, shape: self.work(self.param_groups[group], shape),
                lambda group, shape: self.is_stack(self.param_groups[group], shape),
                self._dtype,
            )
        if not self.state and _gives_shared_state(self):
            # Torch steps optimizers that have none yet, and of replicas some may have none at all.
            return loss
        plans = self._plans
        for plan in plans:
            model = plan.model()
            if model is not None:
                model.refuse_ended(f"{type(self).__name__}.step()")
        for plan in plans:
            try:
                # Triton launches kernels where the current device is, wherever their tensors are.
                with torch.cuda.device(plan.device) if plan.device.type == "cuda" else nullcontext():
                    self._run(plan)
            except CollectiveError as error:
                model = plan.model()
                if model is not None:
                    model.fail(error)
                raise
        return loss

    def _run(self, plan: Plan) -> None:
        """All rounds of ``plan``, one apart from the next: one travels while another is computed with."""
        coming: _Passage | None = None
        going: _Passage | None = None
        for each in (*plan.rounds, None, None):
            passage = None if each is None else _Passage(self, plan, each)
            if coming is not None:
                coming.transform()
            if going is not None:
                going.update()
            coming, going = passage, coming

    def _contribute(self, plan: Plan, held: Sequence[SentPiece], outgoing: torch.Tensor) -> None:
        """Write what this rank brings of each piece to where it is sent from."""
        groups: dict[int, list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]] = {}
        for each in held:
            whole = plan.wholes[each.index]
            parameter, place = whole.parameter, outgoing.narrow(0, each.offset, each.numel)
            if parameter.grad is None:
                place.zero_()
            else:
                groups.setdefault(whole.group, []).append((parameter, parameter.grad, piece_like(parameter, place)))
        for number, members in groups.items():
            parameters, gradients, places = (list(each) for each in zip(*members, strict=True))
            self.contribute(self.param_groups[number], parameters, gradients, places)

    def _transformed(self, plan: Plan, own: Sequence[int], flat: torch.Tensor) -> torch.Tensor:
        """What becomes of the tensors in ``flat``, ``[count, numel]`` in storage order, in the same form."""
        wholes = [plan.wholes[index] for index in own]
        first = wholes[0]
        shaped = flat.as_strided((len(wholes), *first.shape), (flat.stride(0), *first.stride))
        states = [
            self.state[each.parameter] if plan.owners == 1 else self._kept.setdefault(each.parameter, {})
            for each in wholes
        ]
        result = self.transform(self.param_groups[first.group], shaped, states)
        if result.shape != shaped.shape:
            raise PluginContractError(
                f"transform of {type(self).__name__} returned {tuple(result.shape)} for tensors of "
                f"{tuple(shaped.shape)}. It returns what it is given, changed: one tensor of the same shape."
            )
        if result.stride() == shaped.stride() and result.dtype == shaped.dtype:
            return result.as_strided(flat.shape, flat.stride())
        shaped.copy_(result)
        return flat

    def _update_pieces(self, plan: Plan, results: Mapping[int, torch.Tensor]) -> None:
        kinds: dict[object, list[tuple[Whole, torch.Tensor]]] = {}
        for index, flat in results.items():
            whole = plan.wholes[index]
            if whole.parameter.grad is not None:
                kinds.setdefault(whole.kind, []).append((whole, flat))
        for members in kinds.values():
            parameters = [whole.parameter for whole, _ in members]
            # An offloaded shard is updated where it is.
            shaped = [piece_like(each.parameter, flat.to(own_values(each.parameter).device)) for each, flat in members]
            first = members[0][0]
            self.update(self.param_groups[first.group], first.shape, parameters, shaped)


def own_values(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's values of ``tensor``, in the same memory."""
    return _torch_private.local_tensor(tensor) if is_dtensor(tensor) else tensor


def piece_like(parameter: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """``flat`` (1-D, a piece in storage order) in the form of ``parameter``, in the same memory."""
    own = own_values(parameter)
    shaped = flat.as_strided(own.shape, own.stride(), flat.storage_offset())
    if own is parameter:
        return shaped
    spec: Any = parameter._spec  # type: ignore[attr-defined]
    return _torch_private.dtensor_maker()(shaped, spec)


def _gives_shared_state(optimizer: torch.optim.Optimizer) -> bool:
    assert isinstance(optimizer, WholeTensorOptimizer)
    shares = any(len(each.held) > 1 for plan in optimizer._plans or () for each in plan.rounds)
    return shares and _torch_private.called_from(_STATE_DICTS)


def _refuse_shared_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedError where torch's state dict functions ask for a state of which each replica has a part."""
    if _gives_shared_state(optimizer):
        raise UnsupportedError(
            f"{_STATE_DICTS} takes the state of {type(optimizer).__name__} for the same on all replicas, but they "
            "share it: each has that of some parameters. Save and load with polyshard.checkpoint."
        )


class _Passage:
    """One round on its way. Its memory is freed once it has updated the parameters."""

    def __init__(self, optimizer: WholeTensorOptimizer, plan: Plan, round_: Round) -> None:
        self._optimizer, self._plan, self._round = optimizer, plan, round_
        self._outgoing = round_.outgoing()
        optimizer._contribute(plan, round_.sends, self._outgoing)
        self._incoming = round_.incoming(self._outgoing)
        self._arrive = plan.exchanges.issue(lambda: round_.bring(self._outgoing, self._incoming))

    def transform(self) -> None:
        """Compute with the tensors that this rank owns, and send the results back."""
        self._arrive()
        round_ = self._round
        if round_.puts_together:
            results = flat = round_.wholes(self._incoming)
            if round_.own:
                results = self._optimizer._transformed(self._plan, round_.own, flat)
            round_.pack(self._incoming, results)
        self._everyone = everyone = round_.everyone(self._outgoing)
        self._arrive = self._plan.exchanges.issue(lambda: round_.bring_back(self._outgoing, self._incoming, everyone))

    def update(self) -> None:
        self._arrive()
        self._optimizer._update_pieces(self._plan, self._round.results(self._everyone))
