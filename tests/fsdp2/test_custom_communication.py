"""Objects and hooks of a program that move a module's bytes are called as FSDP2 calls them, with the same results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2_models import OURS, WIDTH, beside_torch, cpu_mesh, loss_of, make, shard_all, train, wholes
from processes import KeptRanks
from torch import nn
from torch.distributed.tensor import Shard


class _Comm:
    """Notes what it is called with, and has torch move the bytes."""

    name = older = ""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.given: list[torch.Tensor] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.given.append(torch.full(tuple(size), 3, dtype=dtype, device=device))
        return self.given[-1]

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False, **op: Any
    ) -> Any:
        self.given = [each for each in self.given if each is not output_tensor]
        sizes = output_tensor.numel(), input_tensor.numel(), output_tensor.dtype, input_tensor.dtype
        self.calls.append((*sizes, dist.get_process_group_ranks(group), async_op, *map(str, op.values())))
        # The newer name where there is one: the older warns there.
        move = getattr(dist, self.name, None) or getattr(dist, self.older)
        return move(output_tensor, input_tensor, group=group, async_op=async_op, **op)


class _Gathers(_Comm):
    name, older = "all_gather_single", "all_gather_into_tensor"

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # One piece of memory for all calls.
        known = [each for each in self.given if each.shape == tuple(size) and each.dtype == dtype]
        return known[0] if known else super().allocate(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, **options: Any) -> Any:
        mine = output_tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)]
        assert mine.data_ptr() == input_tensor.data_ptr()
        before = list(self.given)
        super().__call__(output_tensor, input_tensor, group, **options)
        self.given = before


class _Reductions(_Comm):
    name, older = "reduce_scatter_single", "reduce_scatter_tensor"


def _by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.shape[1:] == (WIDTH,) else None


def _modules(model: Any) -> list[Any]:
    return [*model.blocks, model]


def _sums_by_three(model: Any) -> None:
    for module in _modules(model):
        module.set_gradient_divide_factor(3.0)
        module.set_force_sum_reduction_for_comms(True)


def _waits(model: Any) -> None:
    model.set_requires_gradient_sync(False)
    loss_of(model, torch.arange(8).view(2, 4)).backward()
    model.set_requires_gradient_sync(True)


def _waits_for_replicas(model: Any) -> None:
    model.set_requires_all_reduce(False)
    loss_of(model, torch.arange(8).view(2, 4)).backward()
    model.set_requires_all_reduce(True)


def _made(package: ModuleType, settings: dict[str, Any]) -> Any:
    """A model whose blocks and rest are sharded, and what ``settings`` leave of themselves."""
    settings = dict(settings)
    dtype, prepare = settings.pop("dtype", torch.float32), settings.pop("prepare", None)
    settings["mesh"] = cpu_mesh(*settings.pop("shape", ()))
    if "policy" in settings:
        settings["mp_policy"] = package.MixedPrecisionPolicy(*settings.pop("policy"))
    return make(dtype=dtype), prepare, settings


def _by_objects(package: ModuleType, settings: dict[str, Any]) -> Any:
    model, prepare, settings = _made(package, settings)
    modules = _modules(model)
    gathers, reductions = [_Gathers() for _ in modules], [_Reductions() for _ in modules]
    for module, gather, reduction in zip(modules, gathers, reductions, strict=True):
        # Before the model around a block is sharded.
        package.fully_shard(module, **settings)
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduction)
    if prepare is not None:
        prepare(model)
    told: list[Any] = train(model, 2)
    with torch.no_grad():
        told.append(loss_of(model, torch.arange(8).view(2, 4)).item())
    calls = [each.calls for each in (*gathers, *reductions)]
    assert all(calls)
    return told, calls, wholes(model)


def _exactly(rank: int, body: Callable[..., Any], *cases: dict[str, Any]) -> None:
    for settings in cases:
        beside_torch(rank, body, settings, rtol=0, atol=0)


_MIXED = (torch.bfloat16, torch.float32)


def objects_move_the_bytes_of_a_module(rank: int) -> None:
    """As often, of as many elements of the same dtype, with the same operation, over the same ranks."""
    _exactly(
        rank,
        _by_objects,
        {},
        {"policy": _MIXED, "prepare": _waits},
        {"dtype": torch.float64, "shard_placement_fn": _by_columns, "prepare": _sums_by_three},
    )


def objects_beside_replicas(rank: int) -> None:
    _exactly(
        rank,
        _by_objects,
        {"shape": (2, 2), "policy": _MIXED, "prepare": _waits_for_replicas},
        {"shape": (2, 2), "dtype": torch.float64, "prepare": _sums_by_three},
        {"reshard_after_forward": 2},
    )


def _by_hooks(package: ModuleType, settings: dict[str, Any]) -> Any:
    model, prepare, settings = _made(package, settings)
    seen: list[list[torch.Tensor]] = []
    for module in _modules(model):
        package.fully_shard(module, **settings)
        theirs: list[torch.Tensor] = []

        def hook(reduced: torch.Tensor, its: list[torch.Tensor] = theirs) -> None:
            # Without what lies between parameters on one rank.
            its.append(reduced[reduced != 0])
            dist.all_reduce(reduced)
            reduced.mul_(1.5)

        module.set_all_reduce_hook(hook)
        seen.append(theirs)
    if prepare is not None:
        prepare(model)
    told = train(model, 2)
    assert all(seen)
    return told, seen, wholes(model)


def hooks_see_what_is_reduced(rank: int) -> None:
    """In whatever order ranks wait for what they sent, they call hooks in one, which may communicate."""
    _exactly(rank, _by_hooks, {}, {"policy": _MIXED, "prepare": _waits}, {"dtype": torch.float64})
    sums = {"dtype": torch.float64, "prepare": _sums_by_three}
    beside_torch(rank, _by_hooks, sums, rtol=0, atol=1e-14)


def hooks_see_it_behind_replicas(rank: int) -> None:
    # Sums over four ranks are added up in another order.
    for prepare in (None, _waits_for_replicas, _sums_by_three):
        settings = {"shape": (2, 2), "dtype": torch.float64, "prepare": prepare}
        beside_torch(rank, _by_hooks, settings, rtol=0, atol=1e-13)


def hooks_on_one_rank(rank: int) -> None:
    _exactly(rank, _by_hooks, {}, {"policy": _MIXED, "prepare": _waits})


def hooks_on_another_stream(rank: int) -> None:
    model: Any = shard_all(OURS, make())
    stream, seen = torch.cpu.Stream(), list[Any]()
    for module in _modules(model):
        module.set_all_reduce_hook(lambda _: seen.append(torch.cpu.current_stream()), stream=stream)
    train(model, 1)
    assert [each is stream for each in seen] == [True] * 3


def what_cannot_be_called_is_refused(rank: int) -> None:
    model: Any = make()
    for module in _modules(model):
        OURS.fully_shard(module, mesh=cpu_mesh(2, 1))
    words = torch.arange(8).view(2, 4)
    expected = model(words)
    with pytest.raises(TypeError, match=r"set_custom_all_gather of 'blocks.1' \(rank .\) got .*which has no allocate"):
        model.blocks[1].set_custom_all_gather(print)
    with pytest.raises(TypeError, match=r"set_custom_reduce_scatter of '\(root\)' \(rank .\) got 3"):
        model.set_custom_reduce_scatter(3)
    with pytest.raises(TypeError, match=r"set_all_reduce_hook of '\(root\)' \(rank .\) got 'mean'. Give a function"):
        model.set_all_reduce_hook("mean")
    with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
        model.set_all_reduce_hook(print, stream=torch.cpu.Stream())
    assert torch.equal(model(words), expected)
    # None: as before.
    seen: list[torch.Tensor] = []
    model.set_all_reduce_hook(seen.append)
    model(words).sum().backward()
    model.set_all_reduce_hook(None)
    model(words).sum().backward()
    assert len(seen) == 1


#: Bodies, and on how many ranks each runs.
BODIES: dict[Callable[[int], object], int] = {
    objects_move_the_bytes_of_a_module: 2,
    objects_beside_replicas: 4,
    hooks_see_what_is_reduced: 2,
    hooks_see_it_behind_replicas: 4,
    hooks_on_one_rank: 1,
    hooks_on_another_stream: 2,
    what_cannot_be_called_is_refused: 2,
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_on_ranks(ranks: KeptRanks, body: Callable[[int], object]) -> None:
    ranks.run(BODIES[body], body)
