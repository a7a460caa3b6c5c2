"""Models with optimizers, sharded and whole, whose optimizer states are compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from polyshard_fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_parity.ranks import Ranks

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
#: Rows of the whole batch: every world size that is tested divides it.
BATCH = 12
STEPS_BEFORE, STEPS_AFTER = 2, 1


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


def assert_raises(kind: type[BaseException], words: str, call: Callable[[], Any]) -> None:
    """That ``call`` raises ``kind`` with these words, which a ``KeyError`` must not quote."""
    with pytest.raises(kind) as caught:
        call()
    assert words in str(caught.value), str(caught.value)


#: Over one rank nothing is ever cut; over three, the cuts are what differs from two.
FEWER = {1: [NO_SHARD], 3: [FULL_SHARD]}


def strategies(ranks: Ranks) -> list[ShardingStrategy]:
    """Those that matter at this world size."""
    return FEWER.get(ranks.world_size, [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])


def mesh_of(ranks: Ranks) -> Any:
    """A mesh of all ranks."""
    return init_device_mesh(ranks.device.type, (ranks.world_size,))
