"""The drop-in's names, signatures and settings beside those of ``torch.distributed.fsdp``, and what trainers read."""

from __future__ import annotations

import importlib
import inspect
from datetime import timedelta
from enum import Enum
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed.fsdp as theirs
from parity import Block, Net, draw, on_ranks, seeded, square_step
from polyshard.errors import ConfigTypeError, ParameterChangedError, UnsupportedError
from polyshard.interfaces import PluginContext
from polyshard_backends.fake import FakeCollectives
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp import wrap
from polyshard_fsdp._common_utils import TrainingState
from torch import nn

CONTEXT = PluginContext("test", torch.device("cpu"), timeout=timedelta(seconds=10))
OWN = {"FullyShardedDataParallel", "FlatParameter", "ShardedGradScaler"}
SUBMODULES = ["api", "wrap", "sharded_grad_scaler", "fully_sharded_data_parallel"]


def group(rank: int = 0, size: int = 2) -> FakeCollectives:
    return FakeCollectives(CONTEXT, rank=rank, world_size=size)


class TestBesideTorch:
    """What a script that changes its import line meets."""

    @pytest.mark.parametrize("module", ["", *(f".{name}" for name in SUBMODULES)])
    def test_names_are_torchs_or_the_drop_ins_own(self, module: str) -> None:
        ours = importlib.import_module(f"polyshard_fsdp{module}")
        other = importlib.import_module(f"torch.distributed.fsdp{module}")
        if module:
            names = getattr(other, "__all__", None) or ["ShardedGradScaler"]
        else:
            fsdp2 = ("FSDPModule", "UnshardHandle", "DataParallelMeshDims", "GradientReductionHandle")
            names = [name for name in other.__all__ if not name.endswith("Policy") and name not in fsdp2]
            names = ["FlatParameter", *(name for name in names if name[0].isupper() and "FSDP" not in name)]
        assert len(names) > 0
        for name in names:
            assert (getattr(ours, name) is getattr(other, name)) == (name not in OWN)
            assert name in ours.__all__

    @pytest.mark.parametrize("class_name", ["FullyShardedDataParallel", "ShardedGradScaler"])
    def test_class_has_the_same_methods(self, class_name: str) -> None:
        module = "sharded_grad_scaler" if class_name == "ShardedGradScaler" else "fully_sharded_data_parallel"
        ours = getattr(importlib.import_module(f"polyshard_fsdp.{module}"), class_name)
        other = getattr(importlib.import_module(f"torch.distributed.fsdp.{module}"), class_name)
        public = [name for name in vars(other) if not name.startswith("_") or name in ("__init__", "__getitem__")]
        assert {"__init__", "state_dict_type" if class_name != "ShardedGradScaler" else "unscale_"} <= set(public)
        assert [name for name in public if not hasattr(ours, name)] == []
        for name in public:
            if callable(getattr(other, name)):
                assert _arguments(getattr(ours, name)) == _arguments(getattr(other, name)), name

    @pytest.mark.parametrize(
        ("argument", "value", "kind"),
        [
            ("sharding_strategy", "FULL_SHARD", "ShardingStrategy"),
            ("sharding_strategy", theirs.BackwardPrefetch.BACKWARD_PRE, "ShardingStrategy"),
            ("backward_prefetch", "BACKWARD_PRE", "BackwardPrefetch"),
            ("cpu_offload", True, "CPUOffload"),
            ("mixed_precision", theirs.MixedPrecisionPolicy(param_dtype=torch.bfloat16), "MixedPrecision"),
        ],
    )
    def test_other_settings_are_refused_and_the_model_is_unchanged(self, argument: str, value: Any, kind: str) -> None:
        model = seeded(Net)
        with pytest.raises(ConfigTypeError, match=rf"`{argument}` should be a {kind} but got "):
            FSDP(model, group(), auto_wrap_policy=wrap.ModuleWrapPolicy({Block}), **{argument: value})
        assert [type(each) for each in model.blocks] == [Block] * 3
        assert FSDP(model, group()).rank == 0

    @pytest.mark.parametrize("device_id", [torch.device("cpu", 0), "cpu:0", torch.device("cpu"), "cpu"])
    def test_a_cpu_with_an_index_is_the_cpu(self, device_id: Any) -> None:
        model = FSDP(seeded(Net), group(), device_id=device_id, auto_wrap_policy=wrap.ModuleWrapPolicy({Block}))
        assert model.compute_device == torch.device("cpu")
        square_step(model, 0, 0)


class TestStates:
    def test_a_call_in_another_state_of_the_step_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        for rank in (0, 1):
            model = FSDP(seeded(Net), group(rank))
            with pytest.raises(ValueError, match=r"expected to be in states .*FORWARD.* but current state is .*IDLE"):
                model._assert_state([TrainingState.FORWARD_BACKWARD])
            assert ("ERROR: expected to be in states" in capsys.readouterr().out) == (rank == 0)
            model._assert_state(TrainingState.IDLE)


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
                    auto_wrap_policy=wrap.ModuleWrapPolicy({Block}),
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

    def test_modules_that_ranks_leave_out_are_refused(self) -> None:
        model = FSDP(seeded(Net), group())
        square_step(model, 0, 0)
        with pytest.raises(UnsupportedError, match=r"'\(root\)' is in a wrapper of its own"):
            polyshard.agree_on_use(model, {model: True})


def _arguments(function: Any) -> list[tuple[str, str, object]]:
    """Name, kind and default of each argument."""
    parameters = inspect.signature(function).parameters.values()
    return [
        (each.name, each.kind.name, str(each.default) if isinstance(each.default, Enum) else each.default)
        for each in parameters
    ]
