"""What polyshard_accelerate refuses, on one process: by name, with the model as it was."""

from __future__ import annotations

import copy
import json
import os
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accelerate
import polyshard
import polyshard_fsdp
import polyshard_fsdp2
import pytest
import torch
import torch.distributed as dist
from accelerate.utils import (
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelPlugin,
)
from accelerate_ranks import forget, loader_of, pairs, same
from parity import Block, Net, local, seeded, units_of
from polyshard import ShardConfig
from polyshard.errors import (
    AlreadyShardedError,
    ConfigError,
    ParameterError,
    PolyshardError,
    StateError,
    UnsupportedError,
)
from polyshard.interfaces import PluginContext
from polyshard_accelerate import Accelerator
from polyshard_plugins.precision import Mixed
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

ALONE = ShardConfig(strategy="no_shard", policy=units_of(Block))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Accelerate knows nothing, and neither does its environment."""
    forget()
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    yield
    forget()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def still_trains(model: nn.Module) -> None:
    """``model`` is whole, and prepared and trained like any other."""
    parameters = list(model.parameters())
    assert [tuple(each.shape) for each in parameters] == [tuple(each.shape) for each in Net().parameters()]
    accelerator = Accelerator(shard=ALONE, cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = local(model.last.bias).detach().clone()
    accelerator.backward(prepared(torch.ones(2, 3).double()).square().sum())
    optimizer.step()
    assert not torch.equal(local(model.last.bias), before)
    accelerator.free_memory()


# Other engines.


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("ACCELERATE_USE_FSDP", "FSDP"),
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
        ("ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "ParallelismConfig"),
    ],
)
def test_an_environment_that_asks_for_another_engine(monkeypatch: pytest.MonkeyPatch, name: str, engine: str) -> None:
    monkeypatch.setenv(name, "true")
    with pytest.raises(ConfigError, match=rf"{engine} \({name}=true\), but polyshard shards"):
        Accelerator(cpu=True)
    monkeypatch.setenv(name, "false")
    Accelerator(cpu=True)


def test_arguments_that_ask_for_another_engine() -> None:
    plugins: dict[str, Any] = {
        "fsdp_plugin": FullyShardedDataParallelPlugin(),
        "parallelism_config": ParallelismConfig(),
        "deepspeed_plugin": DeepSpeedPlugin.__new__(DeepSpeedPlugin),
        "torch_tp_plugin": TorchTensorParallelPlugin.__new__(TorchTensorParallelPlugin),
    }
    for name, plugin in plugins.items():
        with pytest.raises(ConfigError, match=f"{name}={type(plugin).__name__}.*Leave {name} out"):
            Accelerator(cpu=True, **{name: plugin})
    hooked = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
    with pytest.raises(ConfigError, match=r"communication hook 'fp16'.*ShardConfig\.precision"):
        Accelerator(cpu=True, kwargs_handlers=[hooked])
    with pytest.raises(ConfigError, match=r"shard is a dict\. Give a polyshard\.ShardConfig"):
        Accelerator(cpu=True, shard={"policy": "never"})  # type: ignore[arg-type]


class PretendedGroup:
    """Of two ranks."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


def test_ranks_that_accelerate_does_not_count(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    Accelerator(cpu=True)
    forget()
    part = PretendedGroup()
    with pytest.raises(ConfigError, match=r"collectives is of 2 ranks, but Accelerate divides its data between 1"):
        Accelerator(cpu=True, shard=ShardConfig(collectives=part))
    forget()
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 4)
    with pytest.raises(StateError, match=r"torch\.distributed has 4 ranks, but Accelerate counts 1 .*cpu=True"):
        Accelerator(cpu=True)


# Precision.


def test_mixed_precision_and_the_configuration_must_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    half = ShardConfig(precision="fp16")
    wide = ShardConfig(precision={"name": "mixed", "param": "torch.bfloat16", "reduce": "fp32"})
    for asked, config, computes in (("bf16", half, "fp16"), ("no", half, "fp16"), ("fp16", wide, "bf16")):
        with pytest.raises(ConfigError, match=f"mixed_precision='{asked}'.*which computes in '{computes}'"):
            Accelerator(cpu=True, mixed_precision=asked, shard=config)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigError, match="ACCELERATE_MIXED_PRECISION of the environment counts"):
        Accelerator(cpu=True, shard=half)
    # The launcher says so where its user said nothing.
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    accelerator = Accelerator(cpu=True, shard=wide)
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.shard_config.precision == wide.precision
    # It is settled for the process.
    with pytest.raises(ConfigError, match="mixed_precision='bf16'"):
        Accelerator(cpu=True, shard=ShardConfig(precision="fp32"))
    with pytest.raises(UnsupportedError, match="fp8"):
        Accelerator(cpu=True, mixed_precision="fp8")
    with pytest.raises(ConfigError, match="'int4' is none of"):
        Accelerator(cpu=True, mixed_precision="int4")


def test_a_precision_of_the_configuration_is_told_to_accelerate() -> None:
    made = Mixed(PluginContext("mine", torch.device("cpu")), param="fp16")
    named = {"none": "no", "fp32": "no", "bf16": "bf16", made: "fp16"}
    for config, told in ((ShardConfig(precision=given), told) for given, told in named.items()):
        assert Accelerator(cpu=True, shard=config).mixed_precision == told
        forget()


# Models.


def test_models_that_others_have_wrapped(group: None) -> None:
    with warnings.catch_warnings():
        # FSDP on one rank, and on a CPU.
        warnings.simplefilter("ignore")
        wrapped: dict[str, nn.Module] = {
            "DistributedDataParallel": DistributedDataParallel(seeded(Net)),
            "FSDP1": FullyShardedDataParallel(seeded(Net), device_id=torch.device("cpu")),
            "FSDP2": fully_shard(seeded(Net), mesh=dist.device_mesh.init_device_mesh("cpu", (1,))),
            "drop-in polyshard_fsdp ": polyshard_fsdp.FullyShardedDataParallel(seeded(Net)),
            "drop-in polyshard_fsdp2 ": polyshard_fsdp2.fully_shard(seeded(Net)),
        }
        inside = seeded(Net)
        inside.blocks[1] = DistributedDataParallel(inside.blocks[1])
        wrapped["'blocks.1' of Net is wrapped already, by DistributedDataParallel"] = inside
    accelerator = Accelerator(shard=ALONE, cpu=True)
    for words, model in wrapped.items():
        fine = seeded(Net)
        with pytest.raises(AlreadyShardedError, match=words):
            accelerator.prepare(fine, model)
        assert [tuple(each.shape) for each in fine.parameters()] == [tuple(each.shape) for each in Net().parameters()]
    still_trains(fine)


def test_a_model_of_which_a_part_is_sharded() -> None:
    model = seeded(Net)
    polyshard.shard(model.blocks[0], ShardConfig(strategy="no_shard", collectives={"name": "fake", "world_size": 1}))
    with pytest.raises(AlreadyShardedError, match=r"'blocks\.0' of this Net is sharded already"):
        Accelerator(shard=ALONE, cpu=True).prepare(model)


def test_a_model_that_polyshard_has_sharded_is_taken_as_it_is() -> None:
    accelerator = Accelerator(shard=ALONE, cpu=True)
    config = ShardConfig(collectives={"name": "fake", "world_size": 2})
    model = polyshard.shard(seeded(Net), config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert accelerator.prepare(model, optimizer)[0] is model
    # The accelerator's policy would have made four.
    assert polyshard.report(model).units == 1
    wrapped = polyshard.FullyShardedDataParallel(seeded(Net), config)
    assert accelerator.prepare(wrapped) is wrapped
    with accelerator.no_sync(wrapped):
        accelerator.backward(wrapped(torch.ones(2, 3).double()).sum())
    assert all(parameter.grad is None for parameter in wrapped.parameters())


def test_nothing_is_prepared_where_one_model_of_several_cannot_be() -> None:
    accelerator = Accelerator(shard=ALONE, cpu=True)
    model, whole = seeded(Net), seeded(Net)
    whole.scale = nn.Parameter(torch.tensor([1.0]).to(torch.float8_e4m3fn))
    sharing = seeded(Net)
    sharing.blocks[0].up.weight = model.blocks[0].up.weight
    tries: list[tuple[nn.Module, type[PolyshardError], str]] = [
        (whole, ParameterError, r"'scale' on rank 0 is trained, and has dtype torch\.float8_e4m3fn"),
        (sharing, AlreadyShardedError, r"'blocks\.0\.up\.weight' of Net is also 'blocks\.0\.up\.weight' of Net"),
    ]
    for other, error, words in tries:
        with pytest.raises(error, match=words):
            accelerator.prepare(model, other, loader_of(pairs()), torch.optim.SGD(model.parameters()))
    with pytest.raises(ConfigError, match="device_placement has 1 elements for 2 objects"):
        accelerator.prepare(model, loader_of(pairs()), device_placement=[True])
    placed = Accelerator(shard=ShardConfig(strategy="no_shard", device="meta"), cpu=True)
    with pytest.raises(ConfigError, match=r"device='meta'\) is not the device that Accelerate chose, 'cpu'"):
        placed.prepare(model)
    still_trains(model)


@pytest.mark.slow
def test_a_second_model_that_sharding_refuses_leaves_the_first_to_be_prepared_again(tmp_path: Path) -> None:
    accelerator = Accelerator(shard=ALONE, cpu=True)
    model, other = seeded(Net), nn.Sequential(nn.Linear(3, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="Block"):
        accelerator.prepare(optimizer, model, other)
    assert other[0].weight.shape == (2, 3)
    again, optimizer = accelerator.prepare(model, optimizer)
    assert again is model
    accelerator.backward(model(torch.ones(2, 3).double()).sum())
    optimizer.step()
    # What was prepared in vain is not saved.
    accelerator.save_state(tmp_path)
    assert json.loads((tmp_path / "polyshard.json").read_text())["models"] == ["Net"]


# Optimizers.


def test_optimizers_over_other_parameters() -> None:
    accelerator = Accelerator(shard=ALONE, cpu=True)
    model = seeded(Net)
    stranger = torch.optim.AdamW(copy.deepcopy(model).parameters())
    with pytest.raises(ConfigError, match=r"group 0 of AdamW, \(5, 3\) on cpu, is not among the parameters of Net"):
        accelerator.prepare(stranger, model)
    with pytest.raises(ConfigError, match=r"It has the shape of 'first\.weight' of Net, but is another tensor"):
        accelerator.prepare(model, stranger)
    partly = torch.optim.SGD([{"params": model.parameters()}, {"params": [nn.Parameter(torch.ones(7))]}], lr=0.1)
    with pytest.raises(ConfigError, match=r"Parameter 0 of group 1 of SGD, \(7,\) on cpu"):
        accelerator.prepare(model, partly)
    for prepare in (accelerator.prepare, accelerator.prepare_optimizer):
        with pytest.raises(ConfigError, match=r"there is none .*Give prepare\(\) the model first, or together"):
            prepare(torch.optim.SGD(model.parameters()))
    still_trains(model)
    still_trains(seeded(Net))


# Beside these.


def test_one_process_without_a_group_trains_the_whole_model() -> None:
    accelerator = Accelerator(shard=ShardConfig(policy=units_of(Block)), cpu=True)
    model = seeded(Net)
    with pytest.warns(UserWarning, match="switching to use `NO_SHARD`"):
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader_of(pairs())
        )
    reference = seeded(Net)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x, y in loader:
        for each, stepper in ((model, optimizer), (reference, plain)):
            nn.functional.mse_loss(each(x), y).backward()
            stepper.step()
            stepper.zero_grad()
    same(model, reference)
    accelerator.end_training()


def test_it_is_accelerates_and_can_be_pickled() -> None:
    accelerator = Accelerator(shard=ALONE, cpu=True, gradient_accumulation_steps=3, step_scheduler_with_optimizer=False)
    assert isinstance(accelerator, accelerate.Accelerator)
    again = pickle.loads(pickle.dumps(accelerator))
    assert again.shard_config == accelerator.shard_config
    assert again.gradient_accumulation_steps == 3
    assert not again.step_scheduler_with_optimizer
