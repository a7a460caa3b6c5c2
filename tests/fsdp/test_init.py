"""What the constructor refuses, warns about and chooses."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_parity.models import DummyProcessGroup
from fsdp_parity.ranks import Pools, Ranks, across
from polyshard.errors import StateError
from polyshard.interfaces import PluginContext
from polyshard_backends.fake import FakeCollectives
from polyshard_fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy, _state
from polyshard_fsdp import _init_utils as init
from polyshard_fsdp._common_utils import clean_tensor_name
from polyshard_fsdp._init_utils import materialize
from polyshard_fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class Filled(nn.Module):
    """A parameter and a buffer that ``reset_parameters`` fills with ``value``."""

    scale: torch.Tensor

    def __init__(self, value: float, device: str = "cpu") -> None:
        super().__init__()
        self.value = value
        self.weight = nn.Parameter(torch.zeros(3, device=device))
        self.register_buffer("scale", torch.zeros(2, device=device))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.fill_(self.value)
            self.scale.fill_(self.value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum() * self.scale.sum()


def values_of(model: nn.Module) -> dict[str, list[float]]:
    """Every whole parameter and buffer, by clean name."""
    with FullyShardedDataParallel.summon_full_params(model):
        named = [*model.named_parameters(), *model.named_buffers()]
        return {clean_tensor_name(name): tensor.flatten().tolist() for name, tensor in named}


def _destroy(*groups: Any) -> None:
    for group in groups:
        dist.destroy_process_group(group)


@across(4)
def test_groups_are_those_that_the_arguments_name(ranks: Ranks) -> None:
    """Which groups instances have for each way to name them; 4 ranks."""
    fsdp = FullyShardedDataParallel
    model = fsdp(nn.Linear(2, 2, device=ranks.device))
    assert model.process_group is ranks.group
    assert (model.rank, model.world_size) == (ranks.rank, 4)

    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][ranks.rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][ranks.rank % 2]
    model = fsdp(nn.Linear(2, 2, device=ranks.device), half)
    assert (model.rank, model.world_size) == (ranks.rank % 2, 2)

    line = init_device_mesh(ranks.device.type, (4,))
    model = fsdp(nn.Linear(2, 2, device=ranks.device), device_mesh=line)
    assert model.process_group is line.get_group()

    hybrid = ShardingStrategy.HYBRID_SHARD
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(ranks.device)
    model = fsdp(two, (half, across), hybrid, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    for instance in fsdp.fsdp_modules(model):
        assert instance.process_group is half
        assert instance._groups.replicate_group is across
        assert (instance.rank, instance.world_size) == (ranks.rank % 2, 2)
        assert instance.sharding_strategy is hybrid

    model = fsdp(
        nn.Sequential(nn.Linear(2, 2)).to(ranks.device), None, hybrid, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    )
    # All ranks are of one host.
    assert [dist.get_world_size(each) for each in (model.process_group, model._inter_node_pg)] == [4, 1]

    square = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fsdp(nn.Linear(2, 2, device=ranks.device), sharding_strategy=hybrid, device_mesh=square)
    assert model.process_group is square.get_group("shard")
    assert model._groups.replicate_group is square.get_group("replicate")
    with pytest.raises(ValueError, match="Expected device_mesh to have ndim=2 but got 1"):
        fsdp(nn.Linear(2, 2, device=ranks.device), sharding_strategy=hybrid, device_mesh=line)
    with pytest.raises(ValueError, match="Cannot pass both process_group and device_mesh at the same time"):
        fsdp(nn.Linear(2, 2, device=ranks.device), half, device_mesh=line)
    # A rank outside of a new group gets a number for it.
    outside = dist.new_group([ranks.world_size - 1])
    if ranks.rank < ranks.world_size - 1:
        with pytest.raises(ValueError, match="not a process group that this process is in"):
            fsdp(nn.Linear(2, 2, device=ranks.device), outside)
    else:
        _destroy(outside)
    groups = {half, across, line.get_group(), *square.get_all_groups()} - {ranks.group}
    _destroy(*sorted(groups, key=lambda group: group.group_name))


class Mixed(nn.Module):
    """Parameters of two dtypes at two depths, and buffers of two more."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.inner = nn.Linear(3, 2)
        self.outer = nn.Linear(2, 2)
        self.register_buffer("counts", torch.arange(4) + 10 * rank)
        self.register_buffer("floats", torch.full((2, 2), float(rank)).t())
        self.inner.register_buffer("empty", torch.zeros(0))


def synchronised(ranks: Ranks, use_orig_params: bool) -> None:
    """All ranks have rank 0's values after wrapping with ``sync_module_states``, and their own without."""
    for sync in (True, False):
        model = Mixed(ranks.rank).to(ranks.device)
        expected = {
            name: tensor.flatten().tolist() for name, tensor in Mixed(0 if sync else ranks.rank).state_dict().items()
        }
        wrapped = FullyShardedDataParallel(
            model,
            auto_wrap_policy=CustomPolicy(partial(operator.is_, model.inner)),
            sync_module_states=sync,
            use_orig_params=use_orig_params,
        )
        found = values_of(wrapped)
        assert found.keys() == expected.keys()
        for name in expected:
            if not sync and name.endswith(("weight", "bias")):
                # Every rank keeps its own part of what it had: sharding sends nothing.
                continue
            assert found[name] == expected[name], f"sync={sync}: {name}"


@across(4)
def test_rank_0s_values_reach_all_ranks_of_two_groups(ranks: Ranks) -> None:
    """With a hybrid strategy rank 0's values reach all four ranks."""
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][ranks.rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][ranks.rank % 2]
    wrapped = FullyShardedDataParallel(
        Mixed(ranks.rank).to(ranks.device), (half, across), ShardingStrategy.HYBRID_SHARD, sync_module_states=True
    )
    expected = {name: tensor.flatten().tolist() for name, tensor in Mixed(0).state_dict().items()}
    assert values_of(wrapped) == expected
    _destroy(half, across)


@pytest.mark.parametrize("with_function", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
@across(2)
def test_meta_modules_get_their_values(ranks: Ranks, use_orig_params: bool, with_function: bool) -> None:
    """Meta modules get values when they are wrapped, each from the instance that manages it, and once."""
    calls: list[nn.Module] = []

    def initialise(module: nn.Module) -> None:
        calls.append(module)
        if isinstance(module, Filled):
            module.to_empty(device=ranks.device, recurse=False)
            module.reset_parameters()

    model = nn.Sequential(Filled(1.0, "meta"), nn.Sequential(Filled(2.0, "meta"), Filled(3.0, "meta")))
    inside = list(model.modules())
    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=CustomPolicy(lambda module: module is inside[2]),
        param_init_fn=initialise if with_function else None,
        use_orig_params=use_orig_params,
    )
    expected = {}
    for prefix, value in (("0", 1.0), ("1.0", 2.0), ("1.1", 3.0)):
        expected[f"{prefix}.weight"] = [value] * 3
        expected[f"{prefix}.scale"] = [value] * 2
    assert values_of(wrapped) == expected
    # The inner instance is made first, and each module is initialised by the instance that manages it, and once.
    assert calls == ([inside[2], inside[3], inside[4], inside[0], inside[1]] if with_function else [])


@across(2)
def test_modules_compute_where_they_are_told_to(ranks: Ranks) -> None:
    """``device_id``, and where an instance computes, on the device of this run."""
    fsdp = FullyShardedDataParallel
    on_cpu = nn.Linear(3, 3)
    on_cpu.weight.grad = torch.ones(3, 3)
    ignored = nn.Linear(1, 1)
    model = fsdp(nn.Sequential(on_cpu, ignored), device_id=ranks.device, ignored_modules=[ignored])
    assert model.compute_device == ranks.device
    assert {parameter.device for parameter in model.params} == {ranks.device}
    assert ignored.weight.device.type == "cpu"
    if ranks.on_cpu:
        # Without an accelerator nothing is moved, nothing is warned about, and any rank may send what it has.
        assert fsdp(nn.Linear(2, 2), sync_module_states=True).compute_device == torch.device("cpu")
        return
    assert fsdp(nn.Linear(2, 2), device_id=ranks.rank).compute_device == ranks.device
    with pytest.warns(UserWarning, match=r"`device_id` cuda on rank \d, which does not have an explicit index"):
        assert fsdp(nn.Linear(2, 2), device_id=torch.device("cuda")).compute_device == ranks.device
    with pytest.warns(UserWarning, match="The passed-in `module` is on CPU"):
        assert fsdp(nn.Linear(2, 2)).compute_device == ranks.device
    other = torch.device("cuda", (ranks.rank + 1) % ranks.world_size)
    with pytest.raises(ValueError, match=rf"Inconsistent compute device and `device_id` on rank {ranks.rank}: {other}"):
        fsdp(nn.Linear(2, 2, device=other), device_id=ranks.device)
    both = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device=ranks.device))
    with pytest.raises(RuntimeError, match="To support a module with both CPU and GPU params, please pass"):
        fsdp(both)
    assert [parameter.device.type for parameter in both.parameters()] == ["cpu", "cpu", "cuda", "cuda"]
    assert fsdp(both, device_id=ranks.device).compute_device == ranks.device
    with pytest.raises(RuntimeError, match="FSDP only supports single device modules but got params on"):
        fsdp(nn.Sequential(nn.Linear(2, 2, device=other), nn.Linear(2, 2, device=ranks.device)))
    with (
        pytest.warns(UserWarning, match="The passed-in `module` is on CPU"),
        pytest.raises(ValueError, match="The module has CPU parameters or buffers when `sync_module_states=True`"),
    ):
        fsdp(nn.Linear(2, 2), sync_module_states=True)


FSDP = FullyShardedDataParallel
HYBRID = ShardingStrategy.HYBRID_SHARD
PAIR = DummyProcessGroup(0, 2)
CONTEXT = PluginContext("test", torch.device("cpu"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class WithScalar(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second.temperature = nn.Parameter(torch.tensor(1.0))


class HalfMeta(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(3, 2, device="meta")


class Inner(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = FSDP(self.first, PAIR)  # type: ignore[assignment]


REFUSED: list[Any] = [
    (
        Net,
        lambda model: {"process_group": PAIR, "device_mesh": object()},
        ValueError,
        "Cannot pass both process_group and device_mesh at the same time. Please just pass only one of them.",
    ),
    (
        Net,
        lambda model: {"sharding_strategy": HYBRID},
        ValueError,
        "Manual wrapping with ShardingStrategy.HYBRID_SHARD requires explicit specification of process group or "
        "device_mesh.",
    ),
    (
        Net,
        lambda model: {"sharding_strategy": HYBRID, "process_group": PAIR},
        ValueError,
        "Expected process_group to be passed in as either None or Tuple[dist.ProcessGroup, dist.ProcessGroup] but got "
        "<class 'fsdp_parity.models.DummyProcessGroup'>",
    ),
    (Net, lambda model: {}, ValueError, "Default process group has not been initialized"),
    (Net, lambda model: {"process_group": (PAIR, PAIR)}, ValueError, "is not a process group that this process is in"),
    (
        Net,
        lambda model: {"process_group": PAIR, "ignored_modules": [], "ignored_states": []},
        ValueError,
        "Cannot pass both ignored_modules and ignored_states at the same time. Please just pass ignored_states.",
    ),
    (
        Net,
        lambda model: {"process_group": PAIR, "ignored_states": [model.first, model.second.weight]},
        ValueError,
        "ignored_states expects all nn.Parameter or all nn.Module list elements but got types [<class "
        "'torch.nn.modules.linear.Linear'>, <class 'torch.nn.parameter.Parameter'>]",
    ),
    (
        Net,
        lambda model: {"process_group": PAIR, "ignored_modules": [model.first.weight]},
        ValueError,
        "ignored_modules expects nn.Module list elements but got types [<class 'torch.nn.parameter.Parameter'>]",
    ),
    (
        Net,
        lambda model: {"process_group": PAIR, "ignored_modules": model.first},
        TypeError,
        "'Linear' object is not iterable",
    ),
    (
        Inner,
        lambda model: {"process_group": PAIR, "ignored_modules": [model.first]},
        ValueError,
        "`ignored_modules` should not include FSDP modules",
    ),
    (
        WithScalar,
        lambda model: {"process_group": PAIR},
        ValueError,
        "FSDP doesn't support scalar parameters. Change second.temperature to a 1D tensor with numel equal to 1.",
    ),
    (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True)),
        lambda model: {"process_group": PAIR},
        ValueError,
        "'1' makes sparse gradients, which cannot be reduced in a flat buffer (rank 0). Construct it with sparse=False",
    ),
    (
        lambda: nn.Sequential(Net(), nn.EmbeddingBag(3, 2, max_norm=1.5)),
        lambda model: {"process_group": PAIR, "auto_wrap_policy": ModuleWrapPolicy({Net})},
        ValueError,
        "'1' scales rows of its weight to max_norm=1.5 in forward, where they are a copy that is lost (rank 0).",
    ),
    (
        HalfMeta,
        lambda model: {"process_group": PAIR},
        RuntimeError,
        "To support a module with both CPU and GPU params, please pass in device_id argument.",
    ),
    (
        HalfMeta,
        lambda model: {"process_group": PAIR, "param_init_fn": 42, "device_id": torch.device("cpu")},
        ValueError,
        "Expected 42 to be callable but got <class 'int'>",
    ),
]


@pytest.mark.parametrize(("make", "arguments", "kind", "text"), REFUSED)
def test_bad_arguments_are_refused_and_the_model_is_unchanged(
    make: Callable[[], nn.Module], arguments: Callable[[Any], dict[str, Any]], kind: type[Exception], text: str
) -> None:
    model = make()
    options = arguments(model)
    before = [(name, id(parameter), parameter.shape) for name, parameter in model.named_parameters()]
    with pytest.raises(kind, match=re.escape(text)):
        FSDP(model, **options)
    assert [(name, id(parameter), parameter.shape) for name, parameter in model.named_parameters()] == before


@pytest.mark.parametrize("settings", [{"sparse": True}, {"max_norm": 0.5}])
def test_an_embedding_whose_weight_is_ignored_computes_as_it_does(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    table, words = nn.Embedding(3, 2, **settings), torch.tensor([0, 2])
    weight = table.weight.detach().clone()
    model = FSDP(nn.Sequential(table, nn.Linear(2, 2)), PAIR, ignored_states=[table.weight])
    model.module[0](words).sum().backward()
    twin = nn.Embedding(3, 2, _weight=weight, **settings)
    twin(words).sum().backward()
    for mine, its in ((table.weight, twin.weight), (table.weight.grad, twin.weight.grad)):
        assert mine is not None
        assert its is not None
        assert mine.is_sparse == its.is_sparse
        assert torch.equal(mine.to_dense(), its.to_dense())


def test_an_accelerator_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    text = "FSDP needs a non-CPU accelerator device, but no accelerator device is detected."
    with pytest.raises(RuntimeError, match=re.escape(text)):
        FSDP(Net(), PAIR, device_id=torch.device("cuda", 0))


def test_one_rank_does_not_shard() -> None:
    text = "FSDP is switching to use `NO_SHARD` instead of ShardingStrategy.SHARD_GRAD_OP since the world size is 1."
    with pytest.warns(UserWarning, match=re.escape(text)) as caught:
        model = FSDP(Net(), DummyProcessGroup(0, 1), ShardingStrategy.SHARD_GRAD_OP)
    # It points at the line that made the wrapper.
    assert [warning.filename for warning in caught] == [__file__]
    assert model.sharding_strategy is ShardingStrategy.NO_SHARD
    with pytest.warns(UserWarning, match=r"instead of ShardingStrategy\.FULL_SHARD"):
        assert FSDP(Net(), DummyProcessGroup(0, 1)).sharding_strategy is ShardingStrategy.NO_SHARD
    # Nothing is switched, so nothing is said.
    FSDP(Net(), DummyProcessGroup(0, 1), ShardingStrategy.NO_SHARD)


def test_no_shard_is_deprecated_over_several_ranks() -> None:
    text = "The `NO_SHARD` sharding strategy is deprecated. If having issues, please use `DistributedDataParallel`"
    with pytest.warns(FutureWarning, match=re.escape(text)):
        model = FSDP(Net(), PAIR, ShardingStrategy.NO_SHARD)
    assert model.sharding_strategy is ShardingStrategy.NO_SHARD
    assert FSDP(Net(), PAIR).sharding_strategy is ShardingStrategy.FULL_SHARD


@pytest.mark.parametrize("container", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})])
def test_containers_without_a_forward_are_warned_about(container: nn.Module) -> None:
    text = f"FSDP will not all-gather parameters for containers that do not implement forward: {container}"
    with pytest.warns(UserWarning, match=re.escape(text)):
        FSDP(container, PAIR)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_dummy_group_of_any_size_shards_the_model(size: int) -> None:
    torch.manual_seed(0)
    whole = torch.cat([parameter.detach().flatten() for parameter in Net().parameters()])
    shards = []
    for rank in range(size):
        torch.manual_seed(0)
        model = FSDP(Net(), DummyProcessGroup(rank, size))
        assert (model.rank, model.world_size) == (rank, size)
        shards.append(model.params[0].detach())
    # 17 elements, in parts of the same size, with the padding at the end.
    assert {shard.numel() for shard in shards} == {-(-whole.numel() // size)}
    assert torch.equal(torch.cat(shards)[: whole.numel()], whole)


def test_a_dummy_group_of_several_ranks_refuses_to_compute() -> None:
    model = FSDP(Net(), PAIR)
    with pytest.raises(StateError, match="dummy"):
        model(torch.ones(4, 2))


@pytest.mark.parametrize("argument", ["ignored_modules", "ignored_states"])
def test_ignored_modules_and_parameters(argument: str) -> None:
    model = Net()
    wrapped = FSDP(model, PAIR, **{argument: iter([model.second])}, use_orig_params=True)  # type: ignore[arg-type]
    assert wrapped._ignored_modules == {model.second}
    assert wrapped._ignored_params == {model.second.weight, model.second.bias}
    assert model.second.weight.shape == (2, 3)
    assert model.first.weight.dim() == 1
    by_parameter = Net()
    wrapped = FSDP(by_parameter, PAIR, ignored_states={by_parameter.first.bias}, use_orig_params=True)
    assert not wrapped._ignored_modules
    assert wrapped._ignored_params == {by_parameter.first.bias}


def test_what_inner_instances_ignore_stays_ignored() -> None:
    model = nn.Sequential(Net(), nn.Linear(2, 2))
    net = model[0]
    assert isinstance(net, Net)
    model[0] = FSDP(net, PAIR, ignored_modules=[net.second])
    outer = FSDP(model, PAIR)
    assert outer._ignored_modules == {net.second}
    assert outer._ignored_params == {net.second.weight, net.second.bias}
    # Two instances, of a Linear each: 9 and 6 elements over two ranks. The ignored one is whole.
    assert [instance.params[0].numel() for instance in FSDP.fsdp_modules(outer)] == [3, 5]
    assert net.second.weight.shape == (2, 3)


CPU = torch.device("cpu")


@pytest.mark.slow
def managed_by(model: nn.Module, ignored: list[nn.Parameter] | None = None) -> Any:
    return init.find_managed(SimpleNamespace(), model, None, ignored)


def test_default_initialisation_is_that_of_a_module_built_on_the_device() -> None:
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.LSTM(4, 2), nn.BatchNorm1d(2))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4, device="meta"),
        nn.LayerNorm(4, device="meta"),
        nn.LSTM(4, 2, device="meta"),
        nn.BatchNorm1d(2, device="meta"),
    )
    materialize(managed_by(model), None, CPU)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    sequence = torch.ones(5, 1, 4)
    assert torch.equal(model[2](sequence)[0], expected[2](sequence)[0])


def test_modules_with_values_keep_them() -> None:
    model = nn.Sequential(Filled(1.0), Filled(2.0, "meta"))
    materialize(managed_by(model), None, CPU)
    assert [part.weight.tolist() for part in model.children()] == [[0.0] * 3, [2.0] * 3]


def test_shared_and_ignored_meta_tensors() -> None:
    model = nn.Sequential(Filled(1.0, "meta"), Filled(2.0, "meta"), Filled(3.0, "meta"))
    first, second, third = model
    second.weight = first.weight
    third.weight = nn.Parameter(torch.full((3,), 7.0))
    materialize(managed_by(model, [third.weight]), None, CPU)
    assert first.weight is second.weight
    assert first.weight.tolist() == [2.0] * 3
    # Its module had to be initialised for the buffer's sake.
    assert third.scale.tolist() == [3.0] * 2
    assert third.weight.tolist() == [7.0] * 3


def test_a_module_that_cannot_be_initialised_stays_on_meta() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, device="meta"))

    model = nn.Sequential(Filled(1.0, "meta"), Bare())
    before = [*model.parameters(), *model.buffers()]
    text = (
        "Unable to call `reset_parameters()` for module on meta device with error 'Bare' object has no attribute "
        f"'reset_parameters'. Please ensure that your module oftype {Bare} implements a `reset_parameters()` method."
    )
    with (
        pytest.warns(UserWarning, match=re.escape(text)),
        pytest.raises(AttributeError, match="'Bare' object has no attribute 'reset_parameters'"),
    ):
        FSDP(model, PAIR, device_id=CPU)
    after = [*model.parameters(), *model.buffers()]
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_a_function_that_initialises_nothing_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"`param_init_fn` left tensors on the meta device: \['0.weight'\]"):
        FSDP(nn.Sequential(Filled(1.0, "meta")), PAIR, param_init_fn=lambda module: None)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_rank_0s_values_reach_all_ranks(ranks: Pools, world_size: int, use_orig_params: bool) -> None:
    ranks.run(world_size, synchronised, use_orig_params)


def test_wrapping_uses_the_given_group_in_every_instance() -> None:
    model = FSDP(Net(), PAIR, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert [instance.process_group for instance in FSDP.fsdp_modules(model)] == [PAIR] * 3


class TestMisplacedParameters:
    """FSDP's sentences, whole, and what is wrong where behind them."""

    @pytest.mark.parametrize("use_orig_params", [False, True])
    def test_on_the_cpu_before_training_elsewhere(self, use_orig_params: bool) -> None:
        model = FSDP(Net(), FakeCollectives(CONTEXT, rank=1, world_size=2), use_orig_params=use_orig_params)
        model.compute_device = torch.device("cuda", 0)
        with pytest.raises(RuntimeError) as refused:
            model(torch.ones(4, 2))
        assert str(refused.value) == (
            "An FSDP-managed module unexpectedly has parameters on cpu. Make sure to move the module to cuda:0 before "
            "training. The first of them is 'first.weight' (rank 1)."
        )
        model.compute_device = torch.device("cpu")
        model(torch.ones(4, 2)).sum().backward()

    @pytest.mark.slow
    def test_away_from_the_host_although_offloaded(self) -> None:
        model = FSDP(
            Net(),
            FakeCollectives(CONTEXT, rank=0, world_size=2),
            cpu_offload=CPUOffload(offload_params=True),
            use_orig_params=True,
        )
        assert model._flat_param is not None
        # A flat parameter that says that it is on a device that is not here.
        flat = SimpleNamespace(device=torch.device("cuda", 0), _fqns=model._flat_param._fqns)
        with pytest.raises(RuntimeError) as refused:
            _state._refuse_misplaced(model, SimpleNamespace(flat_param=flat))  # type: ignore[arg-type]
        assert str(refused.value) == (
            "An FSDP-managed module with parameter CPU offloading enabled has parameters on cuda:0. Make sure to not "
            "move the module from CPU when offloading parameters. The first of them is 'first.weight' (rank 0)."
        )
