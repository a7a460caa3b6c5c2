"""Both drop-ins in torch's place: programs that import from torch get them, Accelerate among these."""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from fsdp2_models import (
    TENSOR_PARALLEL,
    Block,
    Mlps,
    as_unsharded,
    as_whole,
    batches,
    cpu_mesh,
    inputs,
    loss_of,
    make,
    same,
    square_of,
    unedited,
    wholes,
    without_trainers,
)
from processes import KeptRanks
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

_PROGRAM = """
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, FSDPModule, MixedPrecision, fully_shard
from torch.distributed.fsdp.fully_sharded_data_parallel import ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

def wrap(model, block):
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({block}), sharding_strategy=ShardingStrategy.FULL_SHARD)

def shard(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)
"""


def _program(name: str) -> ModuleType:
    """A program that cannot be edited, imported now."""
    module = ModuleType(name)
    sys.modules[name] = module
    exec(_PROGRAM, vars(module))
    return module


def _steps(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    told = []
    for words in batches(2):
        loss = loss_of(model, words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
    return told


@without_trainers()
def _wraps(rank: int) -> None:
    import polyshard_fsdp
    import torch.distributed.fsdp as theirs

    own = theirs.FullyShardedDataParallel
    with polyshard_fsdp.install():
        program = _program("a_program")
        wrapped = program.wrap(make(), Block)
        assert isinstance(wrapped, polyshard_fsdp.FullyShardedDataParallel)
        assert theirs.MixedPrecision is polyshard_fsdp.MixedPrecision
        assert theirs.fully_shard is program.fully_shard
        with pytest.raises(RuntimeError, match="called twice"):
            polyshard_fsdp.install()
    assert theirs.FullyShardedDataParallel is own
    told = _steps(wrapped)
    sharded = program.shard(make(), cpu_mesh())
    same(_steps(sharded), told)
    # What was imported from torch goes on being torch's, in silence.
    late = _program("a_late_program")
    with pytest.raises(RuntimeError, match=r"a_late_program \(FullyShardedDataParallel, ShardedGradScaler\)"):
        polyshard_fsdp.install()
    assert theirs.FullyShardedDataParallel is own is late.FSDP
    del sys.modules["a_late_program"], sys.modules["a_program"]
    handle = polyshard_fsdp.install()
    handle.undo()
    handle.undo()
    assert theirs.FullyShardedDataParallel is own


def test_the_wrapper_in_torchs_place(ranks: KeptRanks) -> None:
    ranks.run(2, _wraps)


_PARKS = """
from torch.distributed.fsdp._runtime_utils import _lazy_init

def offload(model, *where):
    # As trainers do to make room for another phase.
    _lazy_init(model, model)
    assert model._is_root and model._device_handle.is_available()
    for handle in model._all_handles:
        if handle._offload_params:
            continue
        flat_param = handle.flat_param
        assert flat_param.data.data_ptr() == flat_param._local_shard.data_ptr()
        assert flat_param.data.size() == flat_param._local_shard.size()
        handle.flat_param_to(*where, non_blocking=True)
        flat_param._local_shard = flat_param.data
"""


@without_trainers()
def _offloads(rank: int, use_orig_params: bool) -> None:
    import polyshard_fsdp

    with polyshard_fsdp.install():
        program = ModuleType("a_trainer")
        exec(_PARKS, vars(program))
    model = _wrapped(make(dtype=torch.float32), use_orig_params)
    program.offload(model, torch.device("cpu"))
    assert len(model._all_handles) == 3
    assert model.module.blocks[0]._all_handles == []
    before = [weakref.ref(handle.flat_param._local_shard) for handle in model._all_handles]
    # The host is where it computes: another dtype stands for another device.
    program.offload(model, torch.float64)
    gc.collect()
    assert [each() for each in before] == [None] * 3
    plain = make(dtype=torch.float32)
    for _ in range(2):
        for parameter in plain.parameters():
            # Buffers stay where they are.
            parameter.data = parameter.data.float().double()
        as_unsharded(model, plain, _released)
        program.offload(model, torch.device("cpu"), torch.float32)
        program.offload(model, torch.device("cpu"), torch.float64)


def _released(model: Any, words: torch.Tensor) -> torch.Tensor:
    """The root is not whole behind a forward, as behind one of an evaluation, which a trainer releases so."""
    loss = loss_of(model, words)
    if hasattr(model, "_handle"):
        model._handle.reshard(True)
    return loss


def _wrapped(model: nn.Module, use_orig_params: bool) -> Any:
    import polyshard_fsdp
    from polyshard_fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    return polyshard_fsdp.FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_trainer_offloads_wrapped_models(ranks: KeptRanks, use_orig_params: bool) -> None:
    ranks.run(2, _offloads, use_orig_params)


@without_trainers()
def _shards(rank: int) -> None:
    import polyshard_fsdp2
    import torch.distributed.fsdp as theirs

    own = theirs.fully_shard
    reference = _program("of_torch").shard(make(), cpu_mesh())
    with pytest.raises(RuntimeError, match=r"of_torch \(FSDPModule, fully_shard\)"):
        polyshard_fsdp2.install()
    del sys.modules["of_torch"]
    with polyshard_fsdp2.install():
        program = _program("a_program")
        older = importlib.import_module("torch.distributed._composable.fsdp")
        assert older.fully_shard is theirs.fully_shard is polyshard_fsdp2.fully_shard
        model = program.shard(make(), cpu_mesh())
        assert isinstance(model, program.FSDPModule)
        assert isinstance(model, polyshard_fsdp2.FSDPModule)
    assert theirs.fully_shard is own is older.fully_shard
    same(_steps(model), _steps(reference))
    same(wholes(model), wholes(reference))
    del sys.modules["a_program"]


def test_fully_shard_in_torchs_place(ranks: KeptRanks) -> None:
    ranks.run(2, _shards)


@without_trainers()
def _accelerated(rank: int, folder: str) -> None:
    # Accelerate's own import, and what it says of torch's settings that it passes.
    warnings.simplefilter("ignore")
    # It asks the launcher's variables whether there are several processes.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", 2)):
            patch.setenv(name, str(value))
        _both_versions(rank, folder)


def _both_versions(rank: int, folder: str) -> None:
    import polyshard_fsdp
    import polyshard_fsdp2

    for version, drop_in, lean in ((1, polyshard_fsdp, False), (2, polyshard_fsdp2, True)):
        with drop_in.install():
            told, whole = _with_accelerate(version, f"{folder}/{version}{lean}", lean)
        plain = make(dtype=torch.float32)
        reference = torch.nn.parallel.DistributedDataParallel(plain)
        same(told, _clipped_steps(reference), rtol=1e-4, atol=1e-5)
        # Accelerate gives a whole model to one rank.
        assert bool(whole) is (rank == 0)
        if whole:
            same(whole, dict(plain.named_parameters()), rtol=1e-4, atol=1e-5)


def _clipped_steps(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    told = []
    for words in batches(2):
        loss = loss_of(model, words)
        loss.backward()
        told += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    return told


def _steps_of(
    accelerator: Any,
    model: nn.Module,
    optimizer: Any,
    given: Callable[[nn.Module, int], Iterable[torch.Tensor]] = lambda _, steps: batches(steps),
    loss_by: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
) -> list[float]:
    told = []
    for x in given(model, 2):
        loss = loss_by(model, x)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        told += [loss.item(), as_whole(norm).item()]
    return told


def _with_accelerate(version: int, folder: str, lean: bool) -> tuple[list[float], dict[str, Any]]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        reshard_after_forward=True if version == 2 else "FULL_SHARD",
        # An optimizer that was made before holds the parameters.
        use_orig_params=True if version == 1 else None,
        state_dict_type="FULL_STATE_DICT",
        # Through the meta device.
        cpu_ram_efficient_loading=lean,
    )
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    try:
        # Accelerate takes up the plugin on devices other than CPUs alone.
        for state in (accelerator.state, PartialState()):
            state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
        model = make(dtype=torch.float32)
        # Accelerate takes every tensor of a state dict for a parameter.
        del model.scale
        model.scale = 1.0  # type: ignore[assignment]
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        prepared: Any
        prepared, optimizer = accelerator.prepare(model, optimizer)
        told = _steps_of(accelerator, prepared, optimizer)
        whole = accelerator.get_state_dict(prepared)
        accelerator.save_state(folder)
        after = _steps_of(accelerator, prepared, optimizer)
        accelerator.load_state(folder)
        same(_steps_of(accelerator, prepared, optimizer), after)
        return told, whole
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()


def test_accelerate(ranks: KeptRanks, tmp_path: Any) -> None:
    pytest.importorskip("accelerate")
    ranks.run(2, _accelerated, str(tmp_path))


def _with_parallelisms(rank: int, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", rank), ("WORLD_SIZE", 4), ("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", 4)):
            patch.setenv(name, str(value))
        unedited(rank, _over_a_mesh, folder)


def _over_a_mesh(folder: Path) -> Any:
    """FSDP beside tensor parallelism, and over replicas."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType
    from torch.distributed.fsdp import FSDPModule

    # Accelerate 1.15 imports from there what Transformers 5.23 has not, for parameters that tensor parallelism left.
    module: Any = SimpleNamespace(ReplicateParallel=None)
    sys.modules["transformers.integrations.tensor_parallel"] = module
    told = []
    for sizes in ({"dp_shard_size": 2, "tp_size": 2}, {"dp_replicate_size": 2, "dp_shard_size": 2}):
        PartialState(cpu=True)
        # Accelerate takes up its plugin on devices other than CPUs alone.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Mlp"],
            reshard_after_forward=True,
            state_dict_type="SHARDED_STATE_DICT",
        )
        config = ParallelismConfig(**sizes)
        try:
            accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=config)
            model = Mlps().double()
            if config.tp_enabled:
                parallelize_module(model, accelerator.torch_device_mesh["tp"], TENSOR_PARALLEL)
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
            prepared: Any
            prepared, optimizer = accelerator.prepare(model, optimizer)
            assert isinstance(prepared, FSDPModule)
            told += _steps_of(accelerator, prepared, optimizer, inputs, square_of)
            accelerator.save_state(f"{folder}/{config.tp_size}")
            after = _steps_of(accelerator, prepared, optimizer, inputs, square_of)
            accelerator.load_state(f"{folder}/{config.tp_size}")
            same(_steps_of(accelerator, prepared, optimizer, inputs, square_of), after)
            told += [*after, wholes(prepared)]
        finally:
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()
    return told


@pytest.mark.nightly
def test_accelerate_over_a_mesh(ranks: KeptRanks, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    ranks.run(4, _with_parallelisms, tmp_path)
