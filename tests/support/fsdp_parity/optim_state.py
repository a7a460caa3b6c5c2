"""Optimizer state of sharded models against that of the same model, trained whole by the same optimizer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from polyshard_fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp._composable import fully_shard
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_parity.ranks import Ranks
from fsdp_parity.subtests import named, run_subtests

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
#: Rows of the whole batch: every world size that is tested divides it.
BATCH = 12
STEPS_BEFORE, STEPS_AFTER = 3, 2


class CountingMomentum(torch.optim.Optimizer):
    """Momentum, with state of every kind beside it: a zero-dim tensor, a number, a flag and nothing."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "label": "momentum"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(step=torch.tensor(0.0), count=0, started=True, none=None)
                    state["sum"] = torch.zeros_like(parameter)
                state["count"] += 1
                state["step"] += 1
                state["sum"].mul_(0.9).add_(parameter.grad)
                # Resumed without its counters, it would take another step.
                parameter.add_(state["sum"], alpha=-group["lr"] / (state["count"] + float(state["step"])))


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda params, lr: torch.optim.Adam(params, lr=lr, amsgrad=True, foreach=False),
    "adamw_foreach": lambda params, lr: torch.optim.AdamW(params, lr=lr, foreach=True),
    "sgd": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=0.01),
    "counting": CountingMomentum,
}


class Net(nn.Module):
    """A nested block, a weight with two names, a parameter that nothing uses, a module that FSDP is to ignore, and a
    frozen one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.block = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 7))
        self.one = nn.Linear(7, 7, bias=False)
        self.other = nn.Linear(7, 7, bias=True)
        self.other.weight = self.one.weight
        self.unused = nn.Linear(3, 2)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.ignored = nn.Linear(7, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs).tanh()
        hidden = self.one(self.block(hidden)).tanh()
        output: torch.Tensor = self.ignored(self.frozen(self.other(hidden)))
        return output


SHARED, UNUSED, IGNORED, FROZEN = "one.weight", "unused.", "ignored.", "frozen."


@dataclass(frozen=True)
class Settings:
    """How one model is sharded and optimized."""

    use_orig_params: bool = True
    strategy: ShardingStrategy = FULL_SHARD
    optimizer: str = "adam"
    grouped: bool = False
    """Two parameter groups with different learning rates: the block, and all others."""
    offload: bool = False
    mesh: Any = None
    process_group: Any = None


def whole_model(device: torch.device) -> Net:
    """The same on every rank."""
    torch.manual_seed(5)
    return Net().to(device)


def groups_of(model: nn.Module, *, grouped: bool) -> list[Any]:
    """What an optimizer is constructed with."""
    if not grouped:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [], "lr": 0.02}, {"params": []}]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[0 if "block" in name else 1]["params"].append(parameter)
    return groups


def optimizer_of(model: nn.Module, settings: Settings, lr: float = 0.05) -> torch.optim.Optimizer:
    """The optimizer that ``settings`` name."""
    return OPTIMIZERS[settings.optimizer](groups_of(model, grouped=settings.grouped), lr=lr)


def batch(step: int, device: torch.device) -> torch.Tensor:
    """The whole batch of one step."""
    return torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(100 + step)).to(device)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of one rank, of ``NO_SHARD``, of deprecated calls and of frozen parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Reference:
    """The model in one piece, trained on whole batches by the optimizer itself."""

    def __init__(self, device: torch.device, settings: Settings) -> None:
        self.model = whole_model(device)
        self.optim = optimizer_of(self.model, settings)
        self._device = device
        self._step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optim.zero_grad()
            self.model(batch(self._step, self._device)).square().mean().backward()
            self.optim.step()
            self._step += 1

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.model.named_parameters()]

    def state(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state by parameter names; parameters without any are left out."""
        return {
            name: dict(self.optim.state[parameter])
            for name, parameter in self.model.named_parameters()
            if parameter in self.optim.state
        }

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups with names for parameters."""
        name_of = {parameter: name for name, parameter in self.model.named_parameters()}
        return [{**group, "params": [name_of[each] for each in group["params"]]} for group in self.optim.param_groups]


class Sharded:
    """The same model over ranks, each of which trains on its rows."""

    def __init__(
        self,
        ranks: Ranks,
        settings: Settings,
        *,
        parameters: Mapping[str, torch.Tensor] | None = None,
        step: int = 0,
        lr: float = 0.05,
    ) -> None:
        self.ranks = ranks
        self.settings = settings
        model = whole_model(ranks.device)
        if parameters is not None:
            model.load_state_dict(dict(parameters))
        self.model = wrapped(model, settings)
        self.optim = optimizer_of(self.model, settings, lr)
        self._step = step

    def train(self, steps: int) -> None:
        ranks, rows = self.ranks, BATCH // self.ranks.world_size
        for _ in range(steps):
            self.optim.zero_grad()
            inputs = batch(self._step, ranks.device)[ranks.rank * rows : (ranks.rank + 1) * rows]
            self.model(inputs).square().mean().backward()
            for parameter in self.model.ignored.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(ranks.world_size)
            self.optim.step()
            self._step += 1

    def parameters(self) -> dict[str, torch.Tensor]:
        """Whole values by name, in host memory."""
        with FSDP.summon_full_params(self.model, writeback=False):
            named_parameters = list(self.model.named_parameters(remove_duplicate=False))
            found = {name.replace("_fsdp_wrapped_module.", ""): each for name, each in named_parameters}
            return {name: each.detach().cpu().clone() for name, each in found.items()}

    @contextmanager
    def kind(self, kind: StateDictType, config: OptimStateDictConfig | None = None) -> Iterator[None]:
        """The state dict type for a while."""
        model_config = FullStateDictConfig() if kind is StateDictType.FULL_STATE_DICT else None
        with FSDP.state_dict_type(self.model, kind, model_config, config):
            yield

    def save(self, kind: StateDictType, config: OptimStateDictConfig | None = None) -> dict[str, Any]:
        with self.kind(kind, config):
            return FSDP.optim_state_dict(self.model, self.optim)

    def full_state(self) -> dict[str, Any]:
        """On every rank."""
        return self.save(StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig(rank0_only=False))

    def load(self, state: dict[str, Any], kind: StateDictType, config: OptimStateDictConfig | None = None) -> None:
        with self.kind(kind, config):
            self.optim.load_state_dict(FSDP.optim_state_dict_to_load(self.model, self.optim, state))


def wrapped(model: Net, settings: Settings) -> Any:
    """``model`` with instances for the block, for what nothing uses (beside others it would get gradients of zeros),
    and for what is frozen, where one flat parameter cannot hold it.
    """
    options: dict[str, Any] = {
        "sharding_strategy": settings.strategy,
        "use_orig_params": settings.use_orig_params,
        "cpu_offload": CPUOffload(offload_params=settings.offload),
        "device_id": next(model.parameters()).device if next(model.parameters()).is_cuda else None,
    }
    if settings.mesh is not None:
        options["device_mesh"] = settings.mesh
    elif settings.process_group is not None:
        options["process_group"] = settings.process_group
    model.block = FSDP(model.block, **options)
    model.unused = FSDP(model.unused, **options)
    if not settings.use_orig_params:
        model.frozen = FSDP(model.frozen, **options)
    return FSDP(model, ignored_modules=[model.ignored], **options)


def assert_same_state(state: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Same parameters, same entries, same values and shapes."""
    assert set(state) == set(expected), (sorted(state), sorted(expected))
    for name, entries in expected.items():
        assert set(state[name]) == set(entries), (name, sorted(state[name]), sorted(entries))
        for key, value in entries.items():
            got = state[name][key]
            if isinstance(value, torch.Tensor):
                assert isinstance(got, torch.Tensor), (name, key, type(got))
                torch.testing.assert_close(
                    got.cpu(), value.cpu(), rtol=2e-5, atol=2e-6, msg=lambda text, at=(name, key): f"{at}: {text}"
                )
            else:
                assert got == value, (name, key, got, value)
                assert type(got) is type(value)


def assert_same_groups(groups: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> None:
    """Same settings and the same parameters, in whatever order inside a group."""
    assert len(groups) == len(expected)
    for group, other in zip(groups, expected, strict=True):
        assert set(group) == set(other)
        for key, value in other.items():
            if key == "params":
                assert sorted(group[key]) == sorted(value)
            else:
                assert group[key] == value, key


def assert_same_parameters(sharded: Sharded, reference: Reference) -> None:
    """Values after training, by name."""
    got = sharded.parameters()
    for name, parameter in reference.model.named_parameters():
        torch.testing.assert_close(
            got[name], parameter.detach().cpu(), rtol=2e-5, atol=2e-6, msg=lambda text, at=name: f"{at}: {text}"
        )


#: Over one rank nothing is ever cut; over three, the cuts are what differs from two.
_FEWER = {1: [NO_SHARD], 3: [FULL_SHARD]}


def strategies(ranks: Ranks) -> list[ShardingStrategy]:
    """Those that matter at this world size."""
    return _FEWER.get(ranks.world_size, [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])


def full_state(ranks: Ranks, use_orig_params: bool) -> int:
    """A gathered state dict is what the unsharded optimizer has, names and groups included."""

    def case(strategy: ShardingStrategy, optimizer: str, grouped: bool, offload: bool) -> None:
        settings = Settings(use_orig_params, strategy, optimizer, grouped, offload)
        reference, sharded = Reference(ranks.device, settings), Sharded(ranks, settings)
        assert sharded.full_state()["state"] == {}
        reference.train(STEPS_BEFORE)
        sharded.train(STEPS_BEFORE)
        saved = sharded.full_state()
        expected = reference.state()
        assert not any(name.startswith((UNUSED, FROZEN)) for name in expected)
        assert_same_state(saved["state"], expected)
        assert_same_groups(saved["param_groups"], reference.groups())
        tensors = [value for entries in saved["state"].values() for value in entries.values()]
        assert all(value.device.type == "cpu" for value in tensors if isinstance(value, torch.Tensor))
        # Nothing of it is the optimizer's own memory, nor a part of something larger.
        whole = saved["state"][SHARED]
        kept = {key: copy.deepcopy(value) for key, value in whole.items()}
        sizes = [value.untyped_storage().nbytes() for value in whole.values() if isinstance(value, torch.Tensor)]
        assert max(sizes) == 7 * 7 * 4
        sharded.train(1)
        assert_same_state({SHARED: whole}, {SHARED: kept})
        on_first = sharded.save(StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig(rank0_only=True))
        assert bool(on_first) == (ranks.rank == 0)
        if ranks.rank == 0:
            reference.train(1)
            assert_same_state(on_first["state"], reference.state())

    with quiet():
        return run_subtests(
            {
                "strategy": strategies(ranks),
                "optimizer": list(OPTIMIZERS),
                "grouped": [False, True],
                "offload": [False] if ranks.on_cpu else [False, True],
            },
            case,
        )


def resume(ranks: Ranks, kind: StateDictType, rank0_only: bool) -> int:
    """What is saved and loaded into a new model, sharded otherwise, goes on as if nothing had happened."""
    config = FullOptimStateDictConfig(rank0_only=rank0_only) if kind is StateDictType.FULL_STATE_DICT else None

    def case(
        saved_as: bool, strategy: ShardingStrategy, loaded_as: bool, into: ShardingStrategy, optimizer: str
    ) -> None:
        before = Settings(saved_as, strategy, optimizer, grouped=True)
        reference, sharded = Reference(ranks.device, before), Sharded(ranks, before)
        reference.train(STEPS_BEFORE)
        sharded.train(STEPS_BEFORE)
        saved = sharded.save(kind, config)
        after = Settings(loaded_as, into, optimizer, grouped=True)
        fresh = Sharded(ranks, after, parameters=sharded.parameters(), step=STEPS_BEFORE, lr=0.9)
        fresh.load(saved, kind, config)
        if not rank0_only:
            # Loading has not taken from the state dict what the optimizer goes on to change.
            kept = copy.deepcopy(saved) if kind is StateDictType.FULL_STATE_DICT else None
        reference.train(STEPS_AFTER)
        fresh.train(STEPS_AFTER)
        assert_same_parameters(fresh, reference)
        assert_same_state(fresh.full_state()["state"], reference.state())
        assert_same_groups(fresh.full_state()["param_groups"], reference.groups())
        if not rank0_only and kept is not None:
            assert_same_state(saved["state"], kept["state"])

    with quiet():
        return run_subtests(
            {
                "saved_as": [False, True],
                "strategy": _FEWER.get(ranks.world_size, [FULL_SHARD, NO_SHARD]),
                "loaded_as": [False, True],
                "into": _FEWER.get(ranks.world_size, [SHARD_GRAD_OP, NO_SHARD]),
                # The other optimizers' state has no kind of value that these two have not.
                "optimizer": ["counting" if rank0_only or ranks.world_size == 3 else "adam"],
            },
            case,
        )


def save_full(ranks: Ranks, settings: Settings) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Optimizer state and parameters after some steps."""
    with quiet():
        sharded = Sharded(ranks, settings)
        sharded.train(STEPS_BEFORE)
        return sharded.full_state(), sharded.parameters()


def resume_full(
    ranks: Ranks, settings: Settings, state: dict[str, Any], parameters: Mapping[str, torch.Tensor]
) -> None:
    """The other half, over any number of ranks: on rank 0 alone, and on all."""
    for rank0_only in (False, True):
        with named({"rank0_only": rank0_only}), quiet():
            reference = Reference(ranks.device, settings)
            reference.train(STEPS_BEFORE + STEPS_AFTER)
            fresh = Sharded(ranks, settings, parameters=parameters, step=STEPS_BEFORE, lr=0.9)
            given = state if ranks.rank == 0 or not rank0_only else {}
            fresh.load(given, StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig(rank0_only=rank0_only))
            fresh.train(STEPS_AFTER)
            assert_same_parameters(fresh, reference)
            assert_same_state(fresh.full_state()["state"], reference.state())


def mesh_of(ranks: Ranks) -> Any:
    """A mesh of all ranks."""
    return init_device_mesh(ranks.device.type, (ranks.world_size,))


def save_distributed(ranks: Ranks, settings: Settings, meshed: bool, folder: str) -> dict[str, torch.Tensor]:
    """Each rank writes its rows through ``torch.distributed.checkpoint``; returns the parameters."""
    with quiet():
        sharded = Sharded(ranks, replace(settings, mesh=mesh_of(ranks) if meshed else None))
        sharded.train(STEPS_BEFORE)
        saved = sharded.save(StateDictType.SHARDED_STATE_DICT)
        dcp.save({"optim": saved}, checkpoint_id=folder)
        return sharded.parameters()


def resume_distributed(
    ranks: Ranks, settings: Settings, meshed: bool, folder: str, parameters: Mapping[str, torch.Tensor]
) -> None:
    """Each of another number of ranks reads its rows."""
    with quiet():
        settings = replace(settings, mesh=mesh_of(ranks) if meshed else None)
        reference = Reference(ranks.device, settings)
        reference.train(STEPS_BEFORE + STEPS_AFTER)
        fresh = Sharded(ranks, settings, parameters=parameters, step=STEPS_BEFORE - 1, lr=0.05)
        # A step, for something to read into.
        fresh.train(1)
        template = {"optim": fresh.save(StateDictType.SHARDED_STATE_DICT)}
        dcp.load(template, checkpoint_id=folder)
        fresh = Sharded(ranks, settings, parameters=parameters, step=STEPS_BEFORE, lr=0.9)
        fresh.load(template["optim"], StateDictType.SHARDED_STATE_DICT)
        fresh.train(STEPS_AFTER)
        assert_same_parameters(fresh, reference)
        assert_same_state(fresh.full_state()["state"], reference.state())


def distributed_values(ranks: Ranks) -> int:
    """Each rank has its rows of every tensor, where the configuration says, and no more."""

    def case(use_orig_params: bool, meshed: bool, kind: StateDictType) -> None:
        settings = Settings(use_orig_params, mesh=mesh_of(ranks) if meshed else None)
        reference, sharded = Reference(ranks.device, settings), Sharded(ranks, settings)
        reference.train(STEPS_BEFORE)
        sharded.train(STEPS_BEFORE)
        if meshed and kind is StateDictType.LOCAL_STATE_DICT:
            assert_raises(
                RuntimeError, "DeviceMesh is not compatible with LOCAL_STATE_DICT", lambda: sharded.save(kind)
            )
            return
        saved = sharded.save(kind)["state"]
        for name, entries in reference.state().items():
            assert set(saved[name]) == set(entries)
            for key, value in entries.items():
                got = saved[name][key]
                if name.startswith(IGNORED) or not value.dim():
                    torch.testing.assert_close(got.cpu(), value.cpu(), rtol=2e-5, atol=2e-6)
                    continue
                if ranks.world_size == 1:
                    # Nothing is cut, and tensors are plain.
                    assert type(got) is torch.Tensor
                    torch.testing.assert_close(got.cpu(), value.cpu(), rtol=2e-5, atol=2e-6)
                    continue
                most = -(-value.shape[0] // ranks.world_size)
                rows = value[most * ranks.rank : most * (ranks.rank + 1)]
                assert got.shape == value.shape
                if meshed:
                    assert isinstance(got, DTensor)
                    local = got.to_local()
                else:
                    assert isinstance(got, ShardedTensor)
                    shards = got.local_shards()
                    assert len(shards) == (1 if len(rows) else 0)
                    local = shards[0].tensor if shards else rows.new_empty(rows.shape, device="cpu")
                # Only local state dicts stay where they are.
                assert local.device.type == (ranks.device.type if kind is StateDictType.LOCAL_STATE_DICT else "cpu")
                torch.testing.assert_close(local.cpu(), rows.cpu(), rtol=2e-5, atol=2e-6)

    with quiet():
        return run_subtests(
            {
                "use_orig_params": [False, True],
                "meshed": [False, True],
                "kind": [StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT],
            },
            case,
        )


def hybrid(ranks: Ranks) -> int:
    """Sharded over pairs of ranks and replicated over the pairs, with groups and with a mesh."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    def case(use_orig_params: bool, meshed: bool, kind: StateDictType) -> None:
        groups = (pairs[ranks.rank // 2], replicas[ranks.rank % 2])
        mesh = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("replicate", "shard")) if meshed else None
        settings = Settings(use_orig_params, ShardingStrategy.HYBRID_SHARD, mesh=mesh, process_group=groups)
        reference, sharded = Reference(ranks.device, settings), Sharded(ranks, settings)
        reference.train(STEPS_BEFORE)
        sharded.train(STEPS_BEFORE)
        saved = sharded.save(kind)
        if kind is StateDictType.FULL_STATE_DICT:
            assert_same_state(saved["state"], reference.state())
        fresh = Sharded(ranks, settings, parameters=sharded.parameters(), step=STEPS_BEFORE, lr=0.9)
        fresh.load(saved, kind)
        reference.train(STEPS_AFTER)
        fresh.train(STEPS_AFTER)
        assert_same_parameters(fresh, reference)

    with quiet():
        return run_subtests(
            {
                "use_orig_params": [False, True],
                "meshed": [False, True],
                "kind": [StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT],
            },
            case,
        )


def to_and_from_unsharded(ranks: Ranks) -> int:
    """A plain model's state, keyed by positions, moves to a sharded one; and back."""

    def case(use_orig_params: bool, strategy: ShardingStrategy, grouped: bool) -> None:
        settings = Settings(use_orig_params, strategy, grouped=grouped)
        reference = Reference(ranks.device, settings)
        reference.train(STEPS_BEFORE)
        by_position = copy.deepcopy(reference.optim.state_dict())
        by_name = FSDP.rekey_optim_state_dict(
            by_position, OptimStateKeyType.PARAM_NAME, reference.model, optim=reference.optim
        )
        assert_same_state(by_name["state"], reference.state())
        assert_same_groups(by_name["param_groups"], reference.groups())
        assert (
            FSDP.rekey_optim_state_dict(by_name, OptimStateKeyType.PARAM_NAME, reference.model, optim=reference.optim)
            is by_name
        )
        parameters = copy.deepcopy(reference.model.state_dict())
        sharded = Sharded(ranks, settings, parameters=parameters, step=STEPS_BEFORE, lr=0.9)
        sharded.load(by_name, StateDictType.FULL_STATE_DICT)
        reference.train(STEPS_AFTER)
        sharded.train(STEPS_AFTER)
        assert_same_parameters(sharded, reference)
        full = sharded.full_state()
        back = Reference(ranks.device, settings)
        back.model.load_state_dict(sharded.parameters())
        rekeyed = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, back.model, optim=back.optim)
        back.optim.load_state_dict(rekeyed)
        back._step = reference._step
        reference.train(STEPS_AFTER)
        back.train(STEPS_AFTER)
        assert_same_state(back.state(), reference.state())
        for mine, theirs in zip(back.model.parameters(), reference.model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)

    with quiet():
        return run_subtests(
            {"use_orig_params": [False, True], "strategy": strategies(ranks), "grouped": [False, True]}, case
        )


def legacy(ranks: Ranks) -> int:
    """The older functions: the same values, and a warning that names what has replaced each."""

    def case(use_orig_params: bool, strategy: ShardingStrategy, by_input: bool) -> None:
        settings = Settings(use_orig_params, strategy)
        reference, sharded = Reference(ranks.device, settings), Sharded(ranks, settings)
        reference.train(STEPS_BEFORE)
        sharded.train(STEPS_BEFORE)
        model, optim = sharded.model, sharded.optim
        given: Any = list(groups_of(model, grouped=False)) if by_input else None
        note = "The `optim_input` argument is deprecated" if by_input else None
        full = warned(
            "full_optim_state_dict", "optim_state_dict", note, lambda: FSDP.full_optim_state_dict(model, optim, given)
        )
        assert bool(full) == (ranks.rank == 0)
        everywhere = FSDP.full_optim_state_dict(model, optim, given, rank0_only=False)
        assert_same_state(everywhere["state"], reference.state())
        assert_same_groups(everywhere["param_groups"], reference.groups())
        pieces = warned(
            "sharded_optim_state_dict", "optim_state_dict", None, lambda: FSDP.sharded_optim_state_dict(model, optim)
        )
        reference.train(STEPS_AFTER)

        def load_shard(model: Any, optim: Any, given: Any) -> Any:
            return FSDP.shard_full_optim_state_dict(everywhere, model, given, None if by_input else optim)

        def load_pieces(model: Any, optim: Any, given: Any) -> Any:
            return FSDP.flatten_sharded_optim_state_dict(pieces, model, optim)

        def load_scattered(model: Any, optim: Any, given: Any) -> Any:
            state = full if ranks.rank == 0 else None
            return FSDP.scatter_full_optim_state_dict(state, model, given, None if by_input else optim)

        for name, load in (
            ("shard_full_optim_state_dict", load_shard),
            ("flatten_sharded_optim_state_dict", load_pieces),
            ("scatter_full_optim_state_dict", load_scattered),
        ):
            fresh = Sharded(ranks, settings, parameters=sharded.parameters(), step=STEPS_BEFORE, lr=0.9)
            again: Any = list(groups_of(fresh.model, grouped=False)) if by_input else None
            expected = note if name != "flatten_sharded_optim_state_dict" else None
            loaded = warned(
                name,
                "optim_state_dict_to_load",
                expected,
                lambda load=load, fresh=fresh, again=again: load(fresh.model, fresh.optim, again),
            )
            fresh.optim.load_state_dict(loaded)
            fresh.train(STEPS_AFTER)
            assert_same_parameters(fresh, reference)

    with quiet():
        return run_subtests(
            {"use_orig_params": [False, True], "strategy": strategies(ranks), "by_input": [False, True]}, case
        )


def warned(current: str, replacement: str, further: str | None, call: Callable[[], Any]) -> Any:
    """What ``call`` returns, if it warns as it should, and points at its caller."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    found = [each for each in caught if each.category is FutureWarning]
    expected = (
        f"``FullyShardedDataParallel.{current}``is being deprecated and is replaced by "
        f"``FullyShardedDataParallel.{replacement}``. ``FullyShardedDataParallel.{current}`` may be removed after "
        "PyTorch 2.2."
    )
    texts = [str(each.message) for each in found]
    assert expected in texts, texts
    assert all(each.filename == __file__ for each in found), [each.filename for each in found]
    assert any(further in text for text in texts) if further else len(texts) == 1, texts
    return result


def assert_raises(kind: type[BaseException], words: str, call: Callable[[], Any]) -> None:
    """That ``call`` raises ``kind`` with these words, which a ``KeyError`` must not quote."""
    with pytest.raises(kind) as caught:
        call()
    assert words in str(caught.value), str(caught.value)


def odds_and_ends(ranks: Ranks) -> None:
    """State without groups, state of a user's own, groups in another order, and loading at once."""
    with quiet():
        settings = Settings(grouped=True)
        reference, sharded = Reference(ranks.device, settings), Sharded(ranks, settings)
        reference.train(STEPS_BEFORE)
        sharded.train(STEPS_BEFORE)
        full = sharded.full_state()
        without = {"state": sharded.optim.state_dict()["state"]}
        with sharded.kind(StateDictType.FULL_STATE_DICT):
            converted = FSDP.optim_state_dict(sharded.model, sharded.optim, without)
            assert set(converted) == {"state"}
            assert_same_state(converted["state"], reference.state())
            assert set(FSDP.optim_state_dict_to_load(sharded.model, sharded.optim, converted)) == {"state"}
        own = {**without, "state": {**without["state"], "mine": {"seen": torch.arange(3)}}}
        for rank0_only in (False, True):
            config = FullOptimStateDictConfig(rank0_only=rank0_only)
            with sharded.kind(StateDictType.FULL_STATE_DICT, config), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                converted = FSDP.optim_state_dict(sharded.model, sharded.optim, own)
                loaded = FSDP.optim_state_dict_to_load(sharded.model, sharded.optim, converted)
            assert any(
                "Found a optim state, mine, that FSDP cannot process" in str(each.message) for each in caught
            ) == (ranks.rank == 0 or not rank0_only)
            assert loaded["state"]["mine"]["seen"].tolist() == [0, 1, 2]
        swapped = {"state": full["state"], "param_groups": full["param_groups"][::-1]}
        fresh = Sharded(ranks, settings, parameters=sharded.parameters(), step=STEPS_BEFORE, lr=0.9)
        with fresh.kind(StateDictType.FULL_STATE_DICT):
            FSDP.optim_state_dict_to_load(fresh.model, fresh.optim, swapped, load_directly=True)
        reference.train(STEPS_AFTER)
        fresh.train(STEPS_AFTER)
        assert_same_parameters(fresh, reference)
        # The other name of a shared weight does as well.
        renamed = copy.deepcopy(full)
        renamed["state"]["other.weight"] = renamed["state"].pop(SHARED)
        for group in renamed["param_groups"]:
            group["params"] = ["other.weight" if name == SHARED else name for name in group["params"]]
        fresh.load(renamed, StateDictType.FULL_STATE_DICT)
        assert_same_state(fresh.full_state()["state"], full["state"])


class NamedAdam(torch.optim.Adam):
    """Keys its state by the names under which the model shows its parameters."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], lr: float) -> None:
        pairs = list(named_parameters)
        self.keys = [name for name, _ in pairs]
        super().__init__([parameter for _, parameter in pairs], lr=lr)

    def state_dict(self) -> dict[str, Any]:
        plain = super().state_dict()
        groups = [
            {**group, "params": [self.keys[position] for position in group["params"]]}
            for group in plain["param_groups"]
        ]
        state = {self.keys[position]: value for position, value in plain["state"].items()}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        position = {name: index for index, name in enumerate(self.keys)}
        groups = [
            {**group, "params": sorted(position[name] for name in group["params"])}
            for group in state_dict["param_groups"]
        ]
        state = {position[name]: value for name, value in state_dict["state"].items()}
        super().load_state_dict({"state": state, "param_groups": groups})


def optimizer_keyed_by_names(ranks: Ranks) -> None:
    """An optimizer whose state dict has the model's own names for keys, prefixes included."""
    for use_orig_params in (False, True):
        with quiet(), named({"use_orig_params": use_orig_params}):
            settings = Settings(use_orig_params)
            reference, sharded = Reference(ranks.device, settings), Sharded(ranks, settings)
            reference.optim = torch.optim.Adam(groups_of(reference.model, grouped=False), lr=0.05)

            def optimize(model: Any) -> NamedAdam:
                return NamedAdam(((name, each) for name, each in model.named_parameters() if each.requires_grad), 0.05)

            sharded.optim = optimize(sharded.model)
            reference.train(STEPS_BEFORE)
            sharded.train(STEPS_BEFORE)
            full = sharded.full_state()
            assert_same_state(full["state"], reference.state())
            fresh = Sharded(ranks, settings, parameters=sharded.parameters(), step=STEPS_BEFORE)
            fresh.optim = optimize(fresh.model)
            with fresh.kind(StateDictType.FULL_STATE_DICT):
                FSDP.optim_state_dict_to_load(
                    fresh.model, fresh.optim, full, is_named_optimizer=True, load_directly=True
                )
            reference.train(STEPS_AFTER)
            fresh.train(STEPS_AFTER)
            assert_same_parameters(fresh, reference)


def refusals(ranks: Ranks) -> None:
    """Bad input, refused on every rank alike and before anything is sent."""
    full_kind = StateDictType.FULL_STATE_DICT
    with quiet():
        sharded = Sharded(ranks, Settings())
        sharded.train(1)
        full = sharded.full_state()
        flat = Sharded(ranks, Settings(use_orig_params=False))
        flat.train(1)
        for rank0_only in (False, True):
            config = FullOptimStateDictConfig(rank0_only=rank0_only)
            assert_raises(
                ValueError,
                '`optim_state_dict` must have the keys "state"to be a valid optimizer state dict',
                lambda config=config: sharded.load({"param_groups": []}, full_kind, config),
            )
        for each in (sharded, flat):
            misshapen = copy.deepcopy(full)
            misshapen["state"][SHARED]["exp_avg"] = torch.zeros(7, 8)
            assert_raises(
                ValueError,
                "does not have same shape as its parameter: torch.Size([7, 8]) torch.Size([7, 7])",
                lambda each=each, state=misshapen: each.load(state, full_kind),
            )
            unknown = copy.deepcopy(full)
            unknown["param_groups"][0]["params"][0] = "nobody"
            assert_raises(
                KeyError, "Can't find nobody from [", lambda each=each, state=unknown: each.load(state, full_kind)
            )
        by_position = {"state": {0: {}}, "param_groups": []}
        assert_raises(KeyError, "rekey_optim_state_dict", lambda: sharded.load(by_position, full_kind))
        uneven = copy.deepcopy(full)
        uneven["state"]["first.bias"]["step"] += 1
        assert_raises(ValueError, "must have scalar state with the same value", lambda: flat.load(uneven, full_kind))
        model, optim = sharded.model, sharded.optim
        bad: list[tuple[Any, type[BaseException], str]] = [
            (5, TypeError, "Optimizer input should be an iterable of Tensors or dicts, but got 5"),
            ([], ValueError, "Optimizer input should not be empty"),
            ([next(model.parameters()), {}], TypeError, "Optimizer input should be an iterable of Tensors or dicts"),
            (
                [{"lr": 1}],
                AssertionError,
                'A parameter group should map "params" to a list of the parameters in the group',
            ),
        ]
        for given, kind, words in bad:
            assert_raises(kind, words, lambda given=given: FSDP.full_optim_state_dict(model, optim, given))
        stranger = torch.optim.Adam([nn.Parameter(torch.zeros(2, 3))])
        assert_raises(
            KeyError, "Can't find a parameter of shape (2, 3)", lambda: FSDP.optim_state_dict(model, stranger)
        )
        mixed = {"state": {0: {}, "first.bias": {}}, "param_groups": []}
        assert_raises(
            ValueError,
            "Invalid parameter keys",
            lambda: FSDP.rekey_optim_state_dict(mixed, OptimStateKeyType.PARAM_ID, model, optim=optim),
        )
        # State on some ranks only: named for each rank that lacks it, and raised on all.
        given_state = flat.optim.state_dict()
        if ranks.rank == 1:
            del given_state["state"][0]
        words = "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer"
        assert_raises(RuntimeError, words, lambda: FSDP.optim_state_dict(flat.model, flat.optim, given_state))
        assert_raises(
            RuntimeError,
            "Rank 1 is missing states for the parameters: [('",
            lambda: FSDP.optim_state_dict(flat.model, flat.optim, given_state),
        )
        # State that is not of its parameter's shape, on one rank.
        given_state = copy.deepcopy(sharded.optim.state_dict())
        if ranks.rank == 1:
            next(iter(given_state["state"].values()))["exp_avg"] = torch.zeros(3, device=ranks.device)
        assert_raises(
            ValueError,
            "on rank 1. Only state of the parameter's own shape",
            lambda: FSDP.optim_state_dict(model, optim, given_state),
        )


def strides_and_recorded_names(ranks: Ranks) -> None:
    """State keeps its parameter's strides, and an optimizer that records names has those of the unwrapped model saved
    and its own loaded.
    """
    for use_orig_params in (False, True):
        with quiet(), named({"use_orig_params": use_orig_params}):
            torch.manual_seed(3)
            plain = nn.Sequential(nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(5))
            plain = plain.to(ranks.device)
            model = FSDP(copy.deepcopy(plain), use_orig_params=use_orig_params)
            optim = torch.optim.Adam(model.named_parameters())
            expected = torch.optim.Adam(plain.named_parameters())
            inputs = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(9)).to(ranks.device)
            for module, each in ((model, optim), (plain, expected)):
                for _ in range(STEPS_BEFORE):
                    each.zero_grad()
                    module(inputs).pow(3).mean().backward()
                    each.step()
            saved = FSDP.optim_state_dict(model, optim)
            for name, parameter in plain.named_parameters():
                for key in ("exp_avg", "exp_avg_sq"):
                    value = saved["state"][name][key]
                    torch.testing.assert_close(value, expected.state[parameter][key].cpu(), rtol=1e-4, atol=1e-6)
                    assert value.stride() == parameter.stride()
            group = saved["param_groups"][0]
            assert group["params"] == group["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
            before = copy.deepcopy(optim.state_dict())
            loaded = FSDP.optim_state_dict_to_load(model, optim, saved)
            assert loaded["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]
            optim.load_state_dict(loaded)
            after = optim.state_dict()
            assert after["state"].keys() == before["state"].keys()
            for position, entries in before["state"].items():
                for key, value in entries.items():
                    torch.testing.assert_close(after["state"][position][key], value, rtol=0, atol=0)


def sharded_in_place(ranks: Ranks) -> None:
    """A model whose modules were sharded without wrappers."""
    with quiet():
        torch.manual_seed(3)
        plain = nn.Sequential(nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 3))).to(ranks.device)
        model = copy.deepcopy(plain)
        fully_shard(model[1])
        fully_shard(model)
        optim, expected = torch.optim.Adam(model.parameters()), torch.optim.Adam(plain.parameters())
        inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(9)).to(ranks.device)

        def train() -> None:
            for module, each in ((model, optim), (plain, expected)):
                each.zero_grad()
                module(inputs).square().mean().backward()
                each.step()

        train()
        saved = FSDP.optim_state_dict(model, optim)
        names = {name: expected.state[parameter] for name, parameter in plain.named_parameters()}
        assert_same_state(saved["state"], names)
        optim = torch.optim.Adam(model.parameters())
        optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, saved))
        train()
        assert_same_state(FSDP.optim_state_dict(model, optim)["state"], names)
