"""What a script or a trainer passes that imports torch's own settings, and the private attributes that it reads."""

from __future__ import annotations

import copy
import functools
import warnings
from datetime import timedelta
from typing import Any

import polyshard_fsdp as ours
import pytest
import torch
import torch.distributed.fsdp as theirs
from parity import Block, Net, draw, on_ranks, seeded, square_step
from polyshard.errors import ConfigTypeError, ParameterChangedError
from polyshard.interfaces import PluginContext
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import api
from polyshard_fsdp._composable import fully_shard
from torch import nn
from torch.distributed.fsdp import _flat_param as torch_flat_param
from torch.distributed.fsdp import api as torch_api
from torch.distributed.fsdp import wrap as torch_wrap

CONTEXT = PluginContext("test", torch.device("cpu"), timeout=timedelta(seconds=10))
ENUMS = ["ShardingStrategy", "BackwardPrefetch", "StateDictType"]
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "FULL_STATE_DICT": ("Full", {"rank0_only": True}),
    "LOCAL_STATE_DICT": ("Local", {}),
    "SHARDED_STATE_DICT": ("Sharded", {}),
}


def group(rank: int = 0, size: int = 2) -> FakeCollectives:
    return FakeCollectives(CONTEXT, rank=rank, world_size=size)


def members(name: str) -> list[Any]:
    return [(getattr(ours, name)[each], getattr(theirs, name)[each]) for each in getattr(theirs, name).__members__]


@pytest.mark.parametrize("name", ENUMS)
def test_members_equal_torchs_of_the_same_name(name: str) -> None:
    for mine, other in members(name):
        assert mine == other
        assert other == mine
        assert hash(mine) == hash(other)
        assert mine in (other,)
        assert other in {mine}
        assert mine != other.value
        assert mine != other.name
        assert copy.deepcopy(mine) is mine
        assert [each for each, _ in members(name) if each == other] == [mine]
    assert ours.ShardingStrategy.FULL_SHARD != theirs.StateDictType.FULL_STATE_DICT


@pytest.mark.parametrize("strategy", list(theirs.ShardingStrategy.__members__))
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated:FutureWarning")
def test_every_strategy_of_torchs_is_that_of_ours(strategy: str, use_orig_params: bool) -> None:
    groups: Any = (group(), group(size=1)) if "HYBRID" in strategy else group()
    model = FSDP(
        seeded(Net), groups, theirs.ShardingStrategy[strategy], use_orig_params=use_orig_params, auto_wrap_policy=None
    )
    assert model.sharding_strategy is ours.ShardingStrategy[strategy]
    square_step(model, 0, 0)
    assert all(p.grad is not None for p in model.parameters() if p.numel())


@pytest.mark.parametrize("composable", [False, True])
def test_settings_of_torchs_have_their_values(composable: bool) -> None:
    low = theirs.MixedPrecision(torch.bfloat16, torch.float32, torch.float16, True, True, False, (nn.LayerNorm,))
    settings: dict[str, Any] = {"mixed_precision": low, "cpu_offload": theirs.CPUOffload(offload_params=True)}
    if composable:
        state: Any = (
            fully_shard(seeded(Net), process_group=group(), strategy=theirs.ShardingStrategy.SHARD_GRAD_OP, **settings)
            .__dict__["_polyshard_module_state"]
            .instance
        )
    else:
        state = FSDP(
            seeded(Net),
            group(),
            theirs.ShardingStrategy.SHARD_GRAD_OP,
            backward_prefetch=theirs.BackwardPrefetch.BACKWARD_POST,
            **settings,
        )
        assert state.backward_prefetch is ours.BackwardPrefetch.BACKWARD_POST
    assert state.sharding_strategy is ours.ShardingStrategy.SHARD_GRAD_OP
    assert state.cpu_offload == ours.CPUOffload(offload_params=True)
    assert state.mixed_precision == ours.MixedPrecision(
        torch.bfloat16, torch.float32, torch.float16, True, True, False, (nn.LayerNorm,)
    )


def test_a_class_derived_from_torchs_is_taken() -> None:
    class Low(theirs.MixedPrecision):
        """As some trainers have one."""

    model = FSDP(seeded(Net), group(), mixed_precision=Low(param_dtype=torch.bfloat16))
    assert model.mixed_precision == ours.MixedPrecision(param_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "policy",
    [
        torch_wrap.ModuleWrapPolicy({Block}),
        torch_wrap.CustomPolicy(lambda module: isinstance(module, Block)),
        torch_wrap.CustomPolicy(
            lambda module: isinstance(module, Block) and {"sharding_strategy": theirs.ShardingStrategy.SHARD_GRAD_OP}
        ),
        functools.partial(torch_wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        functools.partial(torch_wrap.size_based_auto_wrap_policy, min_num_params=77),
        functools.partial(torch_wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)),
        functools.partial(torch_wrap._or_policy, policies=[torch_wrap.ModuleWrapPolicy({Block})]),
    ],
)
def test_policies_of_torchs_wrap_what_they_choose(policy: Any) -> None:
    model = FSDP(seeded(Net), group(), auto_wrap_policy=policy)
    inside = FSDP.fsdp_modules(model)[1:]
    assert [type(each.module) for each in inside] == [Block] * 3
    overrides = isinstance(policy, torch_wrap.CustomPolicy) and isinstance(policy._lambda_fn(Block()), dict)
    assert {each.sharding_strategy.name for each in inside} == {"SHARD_GRAD_OP" if overrides else "FULL_SHARD"}


def test_torchs_enable_wrap_wraps() -> None:
    with torch_wrap.enable_wrap(
        wrapper_cls=FSDP, process_group=group(), sharding_strategy=theirs.ShardingStrategy.SHARD_GRAD_OP
    ):
        wrapped = torch_wrap.wrap(nn.Linear(2, 2))
    assert isinstance(wrapped, FSDP)
    assert wrapped.sharding_strategy is ours.ShardingStrategy.SHARD_GRAD_OP


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.filterwarnings("ignore:FSDP.state_dict_type:FutureWarning")
def test_state_dict_settings_of_torchs_are_taken(kind: str) -> None:
    prefix, options = CONFIGS[kind]
    given = [
        getattr(theirs, f"{prefix}StateDictConfig")(offload_to_cpu=True, **options),
        getattr(theirs, f"{prefix}OptimStateDictConfig")(offload_to_cpu=False, **options),
    ]
    wanted = ours.StateDictSettings(
        ours.StateDictType[kind],
        getattr(ours, f"{prefix}StateDictConfig")(offload_to_cpu=True, **options),
        getattr(ours, f"{prefix}OptimStateDictConfig")(offload_to_cpu=False, **options),
    )
    model = FSDP(seeded(Net), group(), auto_wrap_policy=ours.wrap.ModuleWrapPolicy({Block}))
    with FSDP.state_dict_type(model, theirs.StateDictType[kind], *given):
        assert FSDP.get_state_dict_type(model) == wanted
        assert FSDP.get_state_dict_type(model).state_dict_type == theirs.StateDictType[kind]
    before = FSDP.set_state_dict_type(model, theirs.StateDictType[kind], *given)
    assert before.state_dict_type is ours.StateDictType.FULL_STATE_DICT
    assert FSDP.get_state_dict_type(model) == wanted
    other = theirs.FullStateDictConfig() if prefix != "Full" else theirs.ShardedStateDictConfig()
    with pytest.raises(RuntimeError, match="Expected state_dict_config of type"):
        FSDP.set_state_dict_type(model, theirs.StateDictType[kind], other)
    assert FSDP.get_state_dict_type(model) == wanted


@pytest.mark.filterwarnings("ignore:FSDP.state_dict_type:FutureWarning")
def test_a_full_state_dict_by_torchs_kind_is_whole() -> None:
    wanted = seeded(Net).state_dict()

    def on_rank(rank: int, world: ThreadedWorld) -> dict[str, torch.Tensor]:
        with world.lock:
            model = FSDP(seeded(Net), ThreadedCollectives(CONTEXT, world=world, rank=rank))
        with FSDP.state_dict_type(model, theirs.StateDictType.FULL_STATE_DICT, theirs.FullStateDictConfig()):
            return model.state_dict()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP.state_dict_type", FutureWarning)
        for got in on_ranks(2, on_rank):
            assert got.keys() == wanted.keys()
            assert all(torch.equal(got[name], value) for name, value in wanted.items())


def test_optimizer_keys_of_torchs_are_taken() -> None:
    model = FSDP(seeded(Net), group(), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = [name for name, _ in seeded(Net).named_parameters()]
    by_name = {"state": {name: {} for name in names}, "param_groups": [{"lr": 0.1, "params": names}]}
    rekeyed = FSDP.rekey_optim_state_dict(by_name, theirs.OptimStateKeyType.PARAM_ID, model, optim=optimizer)
    assert rekeyed["param_groups"][0]["params"] == list(rekeyed["state"]) == list(range(len(names)))


def test_a_handle_takes_torchs_strategy() -> None:
    layer = nn.Linear(2, 3)
    handle = ours._flat_param.FlatParamHandle(
        list(layer.parameters()),
        layer,
        torch.device("cpu"),
        torch_flat_param.HandleShardingStrategy.NO_SHARD,
        False,
        None,
        None,
        False,
        group(),
        False,
    )
    assert not handle.uses_sharded_strategy


@pytest.mark.parametrize(
    ("argument", "value", "kind"),
    [
        ("sharding_strategy", "FULL_SHARD", "ShardingStrategy"),
        ("sharding_strategy", 1, "ShardingStrategy"),
        ("sharding_strategy", theirs.BackwardPrefetch.BACKWARD_PRE, "ShardingStrategy"),
        ("backward_prefetch", "BACKWARD_PRE", "BackwardPrefetch"),
        ("cpu_offload", True, "CPUOffload"),
        ("cpu_offload", theirs.CPUOffloadPolicy(), "CPUOffload"),
        ("mixed_precision", torch.bfloat16, "MixedPrecision"),
        ("mixed_precision", theirs.MixedPrecisionPolicy(param_dtype=torch.bfloat16), "MixedPrecision"),
    ],
)
def test_others_are_refused_and_the_model_is_unchanged(argument: str, value: Any, kind: str) -> None:
    model = seeded(Net)
    with pytest.raises(ConfigTypeError, match=rf"`{argument}` should be a {kind} but got .*torch\.distributed\.fsdp"):
        FSDP(model, group(), auto_wrap_policy=ours.wrap.ModuleWrapPolicy({Block}), **{argument: value})
    assert [type(each) for each in model.blocks] == [Block] * 3
    assert FSDP(model, group()).rank == 0


@pytest.mark.filterwarnings("ignore:FSDP.state_dict_type:FutureWarning")
def test_other_kinds_of_state_dict_are_refused() -> None:
    model = FSDP(seeded(Net), group())
    for kind in ("FULL_STATE_DICT", None, theirs.ShardingStrategy.FULL_SHARD):
        with pytest.raises(ConfigTypeError, match="`state_dict_type` should be a StateDictType but got"):
            FSDP.set_state_dict_type(model, kind)  # type: ignore[arg-type]
    with pytest.raises(ConfigTypeError, match="`state_dict_config` should be a StateDictConfig but got"):
        FSDP.set_state_dict_type(model, ours.StateDictType.FULL_STATE_DICT, {})  # type: ignore[arg-type]
    assert FSDP.get_state_dict_type(model).state_dict_type is ours.StateDictType.FULL_STATE_DICT


@pytest.mark.parametrize("name", [name for name in torch_api.__all__ if name not in ENUMS])
def test_every_class_of_torchs_has_no_field_that_ours_lacks(name: str) -> None:
    """What is taken by value is taken whole."""
    assert vars(getattr(torch_api, name))["__dataclass_fields__"].keys() == (
        vars(getattr(api, name))["__dataclass_fields__"].keys()
    )


@pytest.mark.parametrize("device_id", [torch.device("cpu", 0), "cpu:0", torch.device("cpu"), "cpu"])
def test_a_cpu_with_an_index_is_the_cpu(device_id: Any) -> None:
    model = FSDP(seeded(Net), group(), device_id=device_id, auto_wrap_policy=ours.wrap.ModuleWrapPolicy({Block}))
    assert model.compute_device == torch.device("cpu")
    square_step(model, 0, 0)


class TestWhatTrainersRead:
    """Private attributes that Accelerate reads, and what it does with them before a training in bf16."""

    def test_has_params(self) -> None:
        model = FSDP(nn.Sequential(FSDP(nn.Linear(2, 2), group()), nn.ReLU()), group())
        assert [each._has_params for each in FSDP.fsdp_modules(model)] == [False, True]
        assert [each._flat_param is not None for each in FSDP.fsdp_modules(model)] == [False, True]

    @pytest.mark.parametrize("use_orig_params", [False, True])
    def test_shards_may_be_cast_to_fp32(self, use_orig_params: bool) -> None:
        """A model that came in bf16, computes in bf16, and is trained in fp32."""

        def on_rank(rank: int, world: ThreadedWorld) -> list[Any]:
            with world.lock:
                model = FSDP(
                    seeded(Net).bfloat16(),
                    ThreadedCollectives(CONTEXT, world=world, rank=rank),
                    auto_wrap_policy=ours.wrap.ModuleWrapPolicy({Block}),
                    mixed_precision=theirs.MixedPrecision(param_dtype=torch.bfloat16),
                    use_orig_params=use_orig_params,
                )
            for each in FSDP.fsdp_modules(model):
                if not each._has_params:
                    continue
                flat = each._flat_param
                assert flat is not None
                if flat.dtype != torch.float32 and flat.requires_grad:
                    assert flat._fqns
                    flat.data = flat.data.to(torch.float32)
                    each._handle._orig_param_dtype = torch.float32
                assert each._handle._orig_param_dtype == torch.float32
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            loss = model(draw(4, 3, rank=rank)).float().square().mean()
            loss.backward()
            torch.optim.SGD(model.parameters(), lr=1e-4).step()
            assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
            with FSDP.summon_full_params(model):
                return [p.detach().clone() for p in model.parameters()]

        before = [p.detach().float() for p in seeded(Net).bfloat16().parameters()]
        for after in on_ranks(2, on_rank):
            changes = [(new.flatten() - old.flatten()).abs().max() for new, old in zip(after, before, strict=True)]
            # Smaller than bf16 could hold.
            assert all(0 < change < 1e-3 for change in changes)

    def test_a_dtype_that_the_data_do_not_have_is_refused(self) -> None:
        model = FSDP(seeded(Net), group())
        assert model._handle is not None
        with pytest.raises(
            ParameterChangedError, match=r"is in torch.float64, and cannot be told to be in torch.float32"
        ):
            model._handle._orig_param_dtype = torch.float32
        square_step(model, 0, 0)
        assert all(p.dtype == torch.float64 for p in model.parameters())
