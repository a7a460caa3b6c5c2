"""The drop-in's names, signatures and settings beside those of ``torch.distributed.fsdp``; policies by themselves."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from threading import Thread
from typing import Any

import polyshard_fsdp
import pytest
import torch
from polyshard.errors import PolyshardError
from polyshard_fsdp import _common_utils, api, wrap
from polyshard_fsdp._common_utils import TrainingState, clean_tensor_name
from polyshard_fsdp.api import CPUOffload, FullStateDictConfig, MixedPrecision, ShardedStateDictConfig, ShardingStrategy
from polyshard_fsdp.wrap import CustomPolicy, ModuleWrapPolicy, enable_wrap, size_based_auto_wrap_policy
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import _common_utils as torch_common_utils
from torch.distributed.fsdp import api as torch_api
from torch.distributed.fsdp import wrap as torch_wrap

FSDP1_NAMES = sorted({*torch_api.__all__, "FullyShardedDataParallel", "FlatParameter", "OptimStateKeyType"})
PRIVATE_POLICY_NAMES = [
    "_Policy",
    "_module_wrap_policy",
    "_or_policy",
    "_post_order_apply",
    "_construct_wrap_fn",
    "_recursive_wrap",
    "_run_mixed_precision_override_policy",
    "_wrap",
    "_wrap_module_cls_individually",
]


class TestBesideTorch:
    """What a script that changes its import line meets."""

    @pytest.mark.parametrize("name", FSDP1_NAMES)
    def test_package_has_the_name(self, name: str) -> None:
        assert name in dir(torch.distributed.fsdp), "an independent reference must have it"
        ours = getattr(polyshard_fsdp, name)
        assert (name in polyshard_fsdp.__all__) >= (name in torch.distributed.fsdp.__all__)
        assert ours is not getattr(torch.distributed.fsdp, name)
        assert inspect.isclass(ours)

    @pytest.mark.parametrize(
        "name",
        ["api", "wrap", "sharded_grad_scaler", "fully_sharded_data_parallel"],
    )
    def test_submodule_has_the_names(self, name: str) -> None:
        ours = importlib.import_module(f"polyshard_fsdp.{name}")
        theirs = importlib.import_module(f"torch.distributed.fsdp.{name}")
        public = getattr(theirs, "__all__", None) or ["ShardedGradScaler"]
        assert [public_name for public_name in public if not hasattr(ours, public_name)] == []

    @pytest.mark.parametrize("name", torch_api.__all__)
    def test_setting_is_the_same(self, name: str) -> None:
        ours, theirs = getattr(api, name), getattr(torch_api, name)
        if issubclass(theirs, Enum):
            assert {member: ours[member].value for member in ours.__members__} == {
                member: theirs[member].value for member in theirs.__members__
            }
            assert str(next(iter(ours))) == str(next(iter(theirs)))
            return
        assert [(field.name, field.default) for field in dataclasses.fields(ours)] == [
            (field.name, field.default) for field in dataclasses.fields(theirs)
        ]
        assert [base.__name__ for base in ours.__mro__] == [base.__name__ for base in theirs.__mro__]
        if name != "StateDictSettings":
            assert str(ours()) == str(theirs())

    @pytest.mark.parametrize("name", [*torch_wrap.__all__, *PRIVATE_POLICY_NAMES])
    def test_policy_has_the_same_arguments(self, name: str) -> None:
        ours, theirs = getattr(wrap, name), getattr(torch_wrap, name)
        assert _arguments(ours) == _arguments(theirs)
        for method in ("__call__", "_run_policy") if inspect.isclass(theirs) else ():
            if method in vars(theirs):
                assert _arguments(getattr(ours, method)) == _arguments(getattr(theirs, method))

    @pytest.mark.parametrize("class_name", ["FullyShardedDataParallel", "ShardedGradScaler"])
    def test_class_has_the_same_methods(self, class_name: str) -> None:
        module = "sharded_grad_scaler" if class_name == "ShardedGradScaler" else "fully_sharded_data_parallel"
        ours = getattr(importlib.import_module(f"polyshard_fsdp.{module}"), class_name)
        theirs = getattr(importlib.import_module(f"torch.distributed.fsdp.{module}"), class_name)
        public = [name for name in vars(theirs) if not name.startswith("_") or name in ("__init__", "__getitem__")]
        assert {"__init__", "state_dict_type" if class_name != "ShardedGradScaler" else "unscale_"} <= set(public)
        assert [name for name in public if not hasattr(ours, name)] == []
        different = {
            name: (_arguments(getattr(ours, name)), _arguments(getattr(theirs, name)))
            for name in public
            if callable(getattr(theirs, name)) and _arguments(getattr(ours, name)) != _arguments(getattr(theirs, name))
        }
        assert different == {}

    def test_default_classes_of_the_size_policy(self) -> None:
        assert {nn.MultiheadAttention} == size_based_auto_wrap_policy.FORCE_LEAF_MODULES  # type: ignore[attr-defined]
        assert {nn.ModuleList, nn.ModuleDict} == size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES  # type: ignore[attr-defined]

    def test_training_states(self) -> None:
        for name in ("TrainingState", "HandleTrainingState"):
            ours, theirs = getattr(_common_utils, name), getattr(torch_common_utils, name)
            assert list(ours.__members__) == list(theirs.__members__)


class TestSettings:
    """Equality and text by value."""

    def test_cpu_offload(self) -> None:
        assert CPUOffload(True) == CPUOffload(offload_params=True) != CPUOffload()
        assert str(CPUOffload(True)) == "CPUOffload(offload_params=True)"

    def test_mixed_precision(self) -> None:
        low = MixedPrecision(torch.float16, torch.float32, torch.bfloat16)
        same = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16)
        assert low == same != MixedPrecision(param_dtype=torch.float16)
        assert str(low) == (
            "MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.bfloat16, "
            "keep_low_precision_grads=False, cast_forward_inputs=False, cast_root_forward_inputs=True, "
            "_module_classes_to_ignore=(<class 'torch.nn.modules.batchnorm._BatchNorm'>,))"
        )

    def test_settings_of_different_kinds_are_not_equal(self) -> None:
        assert FullStateDictConfig() != ShardedStateDictConfig()
        assert str(ShardingStrategy.FULL_SHARD) == "ShardingStrategy.FULL_SHARD"

    def test_settings_can_be_changed_before_use(self) -> None:
        low = MixedPrecision()
        low.param_dtype = torch.bfloat16
        assert low == MixedPrecision(torch.bfloat16)


class TestNames:
    """Names without what wrappers add."""

    @pytest.mark.parametrize(
        ("name", "clean"),
        [
            ("layers.0.weight", "layers.0.weight"),
            ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module.weight", "layers.0.weight"),
            ("a._checkpoint_wrapped_module._fsdp_wrapped_module.b", "a.b"),
            ("module.weight", "module.weight"),
            ("_fsdp_wrapped_module._flat_param", "_flat_param"),
        ],
    )
    def test_clean_tensor_name(self, name: str, clean: str) -> None:
        assert clean_tensor_name(name) == clean == torch_common_utils.clean_tensor_name(name)

    @pytest.mark.parametrize(("once", "of_first"), [(True, ["0.weight"]), (False, ["0.weight", "1.weight"])])
    def test_every_parameter_has_its_clean_names(self, once: bool, of_first: list[str]) -> None:
        model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2, bias=False))
        first = model[0].weight
        model[1].weight = first
        names = _common_utils._get_param_to_fqns(model, dedup_shared_params=once)
        assert names == {first: of_first, model[0].bias: ["0.bias"]}


class TestTrainingState:
    """A call in the wrong state of the step."""

    @pytest.mark.parametrize("rank", [0, 1])
    def test_refused_by_both_states(self, rank: int, capsys: pytest.CaptureFixture[str]) -> None:
        class State:
            training_state = TrainingState.FORWARD_BACKWARD

        state = State()
        state.rank = rank  # type: ignore[attr-defined]
        allowed = [TrainingState.IDLE]
        with pytest.raises(
            ValueError, match=r"expected to be in states .*IDLE.* but current state is .*FORWARD_BACKWARD"
        ):
            _common_utils._assert_in_training_states(state, allowed)  # type: ignore[arg-type]
        assert ("ERROR: expected to be in states" in capsys.readouterr().out) == (rank == 0)
        _common_utils._assert_in_training_states(state, [TrainingState.FORWARD_BACKWARD])  # type: ignore[arg-type]


class TestPolicies:
    """What policies answer and refuse."""

    @pytest.mark.parametrize("answer", [None, 1, "yes", [True]])
    def test_custom_policy_refuses_other_answers(self, answer: Any) -> None:
        policy = CustomPolicy(lambda module: answer)
        match = "The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it returned"
        with pytest.raises(ValueError, match=match) as caught:
            policy._run_policy(nn.Linear(1, 1), set(), {})
        assert f"it returned {answer} " in str(caught.value)

    def test_custom_policy_overrides_the_roots_arguments(self) -> None:
        model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Tanh(), nn.Sigmoid())
        answers = {model[0]: {"a": 2}, model[1]: True, model[2]: {}, model[3]: True}
        root_kwargs = {"a": 1, "b": 1}
        plan = CustomPolicy(lambda module: answers.get(module, False))._run_policy(model, {model[3]}, root_kwargs)
        assert plan == {model[0]: {"a": 2, "b": 1}, model[1]: {"a": 1, "b": 1}}
        plan[model[1]]["a"] = 3
        assert root_kwargs == {"a": 1, "b": 1}

    def test_module_wrap_policy_shows_its_classes(self) -> None:
        assert repr(ModuleWrapPolicy([nn.Linear])).endswith("({<class 'torch.nn.modules.linear.Linear'>})")

    def test_contexts_do_not_nest(self) -> None:
        match = "You are already within an autowrap context and we currently do not supported nested autowrap"
        with (
            enable_wrap(wrapper_cls=_Wrapper),
            pytest.raises(NotImplementedError, match=match),
            enable_wrap(wrapper_cls=_Wrapper),
        ):
            pass
        with enable_wrap(wrapper_cls=_Wrapper, setting=1):
            assert isinstance(wrap.wrap(nn.Linear(1, 1)), _Wrapper)

    def test_context_needs_a_wrapper(self) -> None:
        with (
            pytest.raises(AssertionError, match="Expected to pass in wrapper_cls arg into _ConfigAutoWrap"),
            wrap._ConfigAutoWrap(setting=1),
        ):
            pass

    def test_context_closes_when_its_body_raises(self) -> None:
        with pytest.raises(ZeroDivisionError), enable_wrap(wrapper_cls=_Wrapper):
            raise ZeroDivisionError
        linear = nn.Linear(1, 1)
        assert wrap.wrap(linear) is linear

    def test_another_thread_is_outside_the_context(self) -> None:
        linear = nn.Linear(1, 1)
        found: list[nn.Module] = []
        with enable_wrap(wrapper_cls=_Wrapper):
            thread = Thread(target=lambda: found.append(wrap.wrap(linear)))
            thread.start()
            thread.join()
        assert found == [linear]

    def test_arguments_of_wrap_win(self) -> None:
        with enable_wrap(wrapper_cls=_Wrapper, setting=1, other=2):
            wrapped: Any = wrap.wrap(nn.Linear(1, 1), setting=3)
        assert wrapped.settings == {"setting": 3, "other": 2}

    def test_function_policy_counts_what_is_left(self) -> None:
        asked: list[tuple[str, bool, int]] = []

        def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
            asked.append((type(module).__name__, recurse, nonwrapped_numel))
            return recurse or nonwrapped_numel >= 12

        model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(1, 1), nn.Linear(2, 2)), nn.Linear(4, 4))
        ignored = {model[1][1]}
        wrapped, numel = wrap._recursive_wrap(model, policy, _Wrapper, ignored, set(model[1][1].parameters()))
        assert asked == [
            ("Sequential", True, 34),
            ("Linear", True, 12),
            ("Linear", False, 12),
            ("Sequential", True, 2),
            ("Linear", True, 2),
            ("Linear", False, 2),
            ("Sequential", False, 2),
            ("Linear", True, 20),
            ("Linear", False, 20),
            ("Sequential", False, 2),
        ]
        assert wrapped is model
        assert numel == 32
        assert [type(child) for child in model] == [_Wrapper, nn.Sequential, _Wrapper]

    @pytest.mark.parametrize(
        ("policy", "wrapper", "match"),
        [
            (None, "wrapper", "Must specify auto_wrap_policy."),
            (wrap.always_wrap_policy, None, "Must specify wrapper_cls"),
            (wrap.always_wrap_policy, "wrapper", "(?s)Child module .* is already wrapped by"),
        ],
    )
    def test_recursive_wrap_refuses(self, policy: Any, wrapper: str | None, match: str) -> None:
        model = nn.Sequential(_Wrapper(nn.Linear(1, 1)))
        with pytest.raises(AssertionError, match=match) as caught:
            wrap._recursive_wrap(model, policy, _Wrapper if wrapper else None, set(), set())  # type: ignore[arg-type]
        assert isinstance(caught.value, PolyshardError)

    def test_root_is_wrapped_unless_only_children_are(self) -> None:
        for only_children in (False, True):
            model = nn.Sequential(nn.Linear(2, 2))
            policy = functools.partial(size_based_auto_wrap_policy, min_num_params=0)
            wrapped, numel = wrap._recursive_wrap(model, policy, _Wrapper, set(), set(), only_children)
            assert isinstance(wrapped, _Wrapper) != only_children
            assert isinstance(model[0], _Wrapper)
            assert numel == 6


class _Wrapper(nn.Module):
    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.module = module
        self.settings = settings


def _arguments(function: Callable[..., Any]) -> list[tuple[str, str, object]]:
    """Name, kind and default of each argument; members of enums by their text, so that two enums compare."""
    return list(_describe(inspect.signature(function)))


def _describe(signature: inspect.Signature) -> Iterator[tuple[str, str, object]]:
    for parameter in signature.parameters.values():
        default = parameter.default
        yield parameter.name, parameter.kind.name, str(default) if isinstance(default, Enum) else default
