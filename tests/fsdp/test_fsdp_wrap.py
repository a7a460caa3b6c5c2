"""Wrapping: the constructor's policies, ``wrap`` inside ``enable_wrap``, what they leave out and what they refuse."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fsdp_parity import wrapping as bodies
from fsdp_parity.models import (
    CUDAInitMode,
    DummyProcessGroup,
    FSDPInitMode,
    TransformerWithSharedParams,
    expected_warnings,
    wrap_fsdp,
)
from fsdp_parity.ranks import Pools
from fsdp_parity.wrapping import LoraAttention, LoraDecoder, LoraModel, NestedSequentialModel, WrapMethod
from polyshard_fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp._traversal_utils import _get_fsdp_handles, _get_fsdp_states
from polyshard_fsdp._wrap_utils import _validate_frozen_params
from polyshard_fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    always_wrap_policy,
    enable_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from torch import nn
from torch.nn import TransformerDecoderLayer, TransformerEncoderLayer

OFFLOADS = [
    pytest.param(CPUOffload(False), id="on_device"),
    pytest.param(CPUOffload(offload_params=True), id="offload"),
]
LAYERS: set[type[nn.Module]] = {TransformerEncoderLayer, TransformerDecoderLayer}
FORTY = functools.partial(size_based_auto_wrap_policy, min_num_params=40)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of tests in one process; those that do not ask for its value wrap a model on the CPU beside it."""
    return torch.device(request.param)


@pytest.fixture
def group() -> DummyProcessGroup:
    """Rank 0 of one; nothing can be sent through it."""
    return DummyProcessGroup(rank=0, size=1)


class TestFSDPWrap:
    """On two ranks."""

    @pytest.mark.parametrize("nested", [True, False])
    def test_error_already_wrapped(self, ranks: Pools, nested: bool) -> None:
        ranks.run(2, bodies.refuse_wrapped_children, nested)

    @pytest.mark.parametrize("use_or_policy", [True, False])
    def test_wrap_batchnorm_individually(self, ranks: Pools, use_or_policy: bool) -> None:
        ranks.run(2, bodies.wrap_batchnorm_individually, use_or_policy)

    def test_bn_always_wrapped_individually(self, ranks: Pools) -> None:
        ranks.run(2, bodies.wrap_batchnorm_in_wrapped_container)

    @pytest.mark.parametrize("cpu_offload", OFFLOADS)
    @pytest.mark.parametrize("backward_prefetch", [BackwardPrefetch.BACKWARD_POST, BackwardPrefetch.BACKWARD_PRE])
    @pytest.mark.parametrize("forward_prefetch", [False, True])
    def test_main_wrap_api(
        self, ranks: Pools, cpu_offload: CPUOffload, backward_prefetch: BackwardPrefetch, forward_prefetch: bool
    ) -> None:
        ranks.run(2, bodies.train_wrapped_by_policy, cpu_offload, backward_prefetch, forward_prefetch)

    @pytest.mark.parametrize("as_function", [True, False])
    def test_module_in_two_places(self, ranks: Pools, as_function: bool) -> None:
        ranks.run(2, bodies.train_module_in_two_places, as_function)

    @pytest.mark.parametrize("as_function", [True, False])
    def test_batchnorm_apart_under_mixed_precision(self, ranks: Pools, as_function: bool) -> None:
        ranks.run(2, bodies.batchnorm_apart_under_mixed_precision, as_function)


class TestAutoWrap:
    """In one process, with a group through which nothing can be sent."""

    @pytest.mark.parametrize("wrap_method", list(WrapMethod))
    def test_wrap(self, device: torch.device, group: DummyProcessGroup, wrap_method: WrapMethod) -> None:
        linear = nn.Linear(5, 5).to(device)
        if wrap_method is WrapMethod.WRAP_API:
            with expected_warnings(), enable_wrap(wrapper_cls=FSDP, process_group=group):
                layer: Any = wrap(linear)
        else:
            policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1)
            layer = wrap_fsdp(linear, process_group=group, auto_wrap_policy=policy)
        assert isinstance(layer, FSDP)
        assert layer.module is linear
        assert (layer.rank, layer.world_size) == (0, 1)

    def test_wrap_disabled_outside_context(self, device: torch.device, group: DummyProcessGroup) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin = wrap(nn.Linear(5, 5), process_group=group)

        plain = Model().to(device)
        with expected_warnings(), enable_wrap(wrapper_cls=FSDP, process_group=group):
            model: Any = wrap(plain)
        assert isinstance(model, FSDP)
        assert type(model.lin) is nn.Linear
        assert wrap(plain) is plain

    def test_wrap_override_defaults(self, device: torch.device, group: DummyProcessGroup) -> None:
        other = DummyProcessGroup(rank=0, size=2)
        with expected_warnings(), enable_wrap(wrapper_cls=FSDP, process_group=group):
            layer: Any = wrap(nn.Linear(5, 5).to(device), process_group=other)
        assert isinstance(layer, FSDP)
        assert layer.process_group is other
        assert (layer.rank, layer.world_size) == (0, 2)

    def test_always_wrap(self, device: torch.device, group: DummyProcessGroup) -> None:
        plain = NestedSequentialModel.get_model(device)
        model = wrap_fsdp(plain, process_group=group, auto_wrap_policy=always_wrap_policy)
        NestedSequentialModel.verify_model_all_wrapped(model)

    def test_transformer_auto_wrap_policy(self, device: torch.device, group: DummyProcessGroup) -> None:
        self._check_transformer(
            device, group, functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=LAYERS)
        )

    def test_module_wrap_policy(self, device: torch.device, group: DummyProcessGroup) -> None:
        self._check_transformer(device, group, ModuleWrapPolicy(LAYERS))

    def test_module_wrap_policy_callable(self, device: torch.device, group: DummyProcessGroup) -> None:
        self._check_transformer(device, group, functools.partial(_or_policy, policies=[ModuleWrapPolicy(LAYERS)]))

    def _check_transformer(self, device: torch.device, group: DummyProcessGroup, policy: object) -> None:
        """The root and the four layers are wrapped, and nothing else."""
        model = TransformerWithSharedParams.init(
            group, FSDPInitMode.RECURSIVE, CUDAInitMode.CUDA_BEFORE, {"auto_wrap_policy": policy}, device=device
        )
        transformer = model.module.transformer
        expected = {model, *transformer.encoder.layers, *transformer.decoder.layers}
        assert len(expected) == 5
        assert {module for module in model.modules() if isinstance(module, FSDP)} == expected
        assert _get_fsdp_states(model) == FSDP.fsdp_modules(model)
        assert set(_get_fsdp_states(model)) == expected
        assert len(set(_get_fsdp_handles(model))) == 5

    @pytest.mark.parametrize("use_uniform_kwargs", [False, True])
    def test_custom_policy(self, device: torch.device, use_uniform_kwargs: bool) -> None:
        group = DummyProcessGroup(rank=0, size=2)  # with one rank, every strategy would become NO_SHARD
        low = MixedPrecision(param_dtype=torch.float16)
        plain = TransformerWithSharedParams.init(
            group, FSDPInitMode.NO_FSDP, CUDAInitMode.CUDA_BEFORE, deterministic=True, device=device
        )

        def uniform(module: nn.Module) -> bool:
            return module is plain.bn or isinstance(module, tuple(LAYERS))

        def by_kind(module: nn.Module) -> bool | dict[str, Any]:
            if module is plain.bn:
                return {"sharding_strategy": ShardingStrategy.NO_SHARD}
            if isinstance(module, TransformerDecoderLayer):
                return {
                    "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
                    "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
                }
            return {} if isinstance(module, nn.Linear) else isinstance(module, TransformerEncoderLayer)

        model = wrap_fsdp(
            plain,
            process_group=group,
            auto_wrap_policy=CustomPolicy(uniform if use_uniform_kwargs else by_kind),
            mixed_precision=low,
        )
        as_root = (ShardingStrategy.FULL_SHARD, BackwardPrefetch.BACKWARD_PRE, low)
        of_norm = (ShardingStrategy.NO_SHARD, BackwardPrefetch.BACKWARD_PRE, MixedPrecision())
        of_decoder = (ShardingStrategy.SHARD_GRAD_OP, BackwardPrefetch.BACKWARD_POST, low)
        if use_uniform_kwargs:
            # Batch norm keeps full precision whatever the policy says.
            of_norm = (*as_root[:2], MixedPrecision())
            of_decoder = as_root
        expected = {model: as_root, model.module.bn: of_norm}
        expected |= dict.fromkeys(model.module.transformer.encoder.layers, as_root)
        expected |= dict.fromkeys(model.module.transformer.decoder.layers, of_decoder)
        settings = {
            module: (module.sharding_strategy, module.backward_prefetch, module.mixed_precision)
            for module in model.modules()
            if isinstance(module, FSDP)
        }
        assert len(expected) == 6
        assert settings == expected
        assert all(module.process_group is group for module in settings)

    @pytest.mark.usefixtures("device")
    def test_auto_wrap_api(self, group: DummyProcessGroup) -> None:
        model = wrap_fsdp(NestedSequentialModel.get_model(), process_group=group, auto_wrap_policy=FORTY)
        NestedSequentialModel.verify_model(model)

    @pytest.mark.usefixtures("device")
    def test_auto_wrap_preset_exclude_wrap(self, group: DummyProcessGroup) -> None:
        pair = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        with _container_warning():
            model: Any = wrap_fsdp(pair, process_group=group, auto_wrap_policy=FORTY)
        assert isinstance(model, FSDP)
        assert [type(model[0]), type(model[1])] == [nn.Linear, nn.Linear]

    @pytest.mark.usefixtures("device")
    def test_auto_wrap_preset_exclude_wrap_include_children(self, group: DummyProcessGroup) -> None:
        single = nn.ModuleList([nn.Linear(10, 10)])
        with _container_warning():
            model: Any = wrap_fsdp(single, process_group=group, auto_wrap_policy=FORTY)
        assert isinstance(model, FSDP)
        assert isinstance(model[0], FSDP)

    @pytest.mark.usefixtures("device")
    def test_auto_wrap_preset_force_leaf(self, group: DummyProcessGroup) -> None:
        plain = nn.Sequential(nn.Linear(10, 10), nn.MultiheadAttention(100, 1))
        model: Any = wrap_fsdp(plain, process_group=group, auto_wrap_policy=FORTY)
        assert isinstance(model.module[0], FSDP)
        assert type(model.module[1]) is nn.MultiheadAttention
        assert isinstance(model.module[1].out_proj, nn.Linear)

    @pytest.mark.usefixtures("device")
    def test_auto_wrap_preset_force_leaf_custom(self, group: DummyProcessGroup) -> None:
        leaves = size_based_auto_wrap_policy.FORCE_LEAF_MODULES.union({nn.Linear})  # type: ignore[attr-defined]
        policy = functools.partial(FORTY, force_leaf_modules=leaves)
        plain = nn.Sequential(nn.Linear(10, 10), nn.ModuleList([nn.Linear(10, 10)]))
        model: Any = wrap_fsdp(plain, process_group=group, auto_wrap_policy=policy)
        assert [module for module in model.modules() if isinstance(module, FSDP)] == [model]
        assert [type(model.module[0]), type(model.module[1])] == [nn.Linear, nn.ModuleList]

    @pytest.mark.parametrize("cpu_offload", OFFLOADS)
    @pytest.mark.parametrize("use_device_id", [True, False])
    def test_auto_wrap_smoke_test(self, ranks: Pools, cpu_offload: CPUOffload, use_device_id: bool) -> None:
        ranks.run(1, bodies.auto_wrap_smoke, cpu_offload, use_device_id)

    @pytest.mark.usefixtures("device")
    @pytest.mark.parametrize("wrap_method", list(WrapMethod))
    def test_auto_wrap_with_ignored_modules(self, group: DummyProcessGroup, wrap_method: WrapMethod) -> None:
        plain = NestedSequentialModel.get_model()
        ignored = [plain[1], plain[2][0]]
        settings: dict[str, Any] = {
            "process_group": group,
            "auto_wrap_policy": FORTY,
            "ignored_modules": ignored,
        }
        if wrap_method is WrapMethod.WRAP_API:
            with expected_warnings(), enable_wrap(wrapper_cls=FSDP, **settings):
                model: Any = wrap(plain)
        else:
            model = wrap_fsdp(plain, **settings)
        assert isinstance(model, FSDP)
        assert [type(module) for module in model.module] == [nn.Linear, nn.Linear, nn.Sequential]
        assert [type(module) for module in model.module[2]] == [nn.Linear, nn.Linear]
        # What is ignored stays as it is: 30 elements each.
        assert sum(p.numel() for module in ignored for p in module.parameters()) == 60
        assert not any(p is model._flat_param for module in ignored for p in module.parameters())

    @pytest.mark.parametrize("policy", bodies.lora_policies().values(), ids=bodies.lora_policies())
    def test_frozen_params_with_original_parameters(
        self, device: torch.device, group: DummyProcessGroup, policy: Any
    ) -> None:
        match = _mixed("We do not recommend wrapping such modules")
        with expected_warnings(), pytest.warns(UserWarning, match=match) as caught:
            model = FSDP(LoraModel().to(device), process_group=group, auto_wrap_policy=policy, use_orig_params=True)
        texts = [str(warning.message) for warning in caught if re.match(match, str(warning.message))]
        # Four frozen projections of 32 x 32 and two trainable adapters of 8 x 32.
        assert ["4608 numel instead of 512 numel" in text for text in texts] == [True] * 4
        assert [text.split(" ")[0] for text in texts] == [f"layers.{index}.attn" for index in range(4)]
        assert "requires_grad=True:\n['layers.0.attn.lora_A.weight', 'layers.0.attn.lora_B.weight']\n" in texts[0]
        assert len(FSDP.fsdp_modules(model)) == 13

    @pytest.mark.parametrize("policy", bodies.lora_policies().values(), ids=bodies.lora_policies())
    def test_frozen_params_with_flat_parameters(
        self, device: torch.device, group: DummyProcessGroup, policy: Any
    ) -> None:
        model = LoraModel().to(device)
        match = _mixed("FSDP does not support wrapping such modules when use_orig_params=False.")
        with expected_warnings(), pytest.raises(ValueError, match=match) as caught:
            FSDP(model, process_group=group, auto_wrap_policy=policy, use_orig_params=False)
        assert str(caught.value).startswith("layers.0.attn has both")
        assert not FSDP.fsdp_modules(model)


class TestWrapUtils:
    """The check of frozen parameters by itself."""

    @pytest.mark.parametrize("use_orig_params", [True, False])
    def test_validate_frozen_params(self, use_orig_params: bool) -> None:
        model = LoraModel()
        lora_a = {module for name, module in model.named_modules() if name.endswith("lora_A")}
        lora_b = {module for name, module in model.named_modules() if name.endswith("lora_B")}
        attentions = {module for module in model.modules() if isinstance(module, LoraAttention)}
        decoders = {module for module in model.modules() if isinstance(module, LoraDecoder)}
        # The adapters wrapped apart leave their parents frozen throughout.
        for chosen in (lora_a | lora_b, lora_a | lora_b | attentions, lora_a | lora_b | attentions | decoders):
            _validate_frozen_params(model, chosen, set(), use_orig_params)

        chosen = lora_b | attentions | decoders
        if use_orig_params:
            # The attention would hold its frozen projections (4 x 1024) and lora_A (256).
            with pytest.warns(
                UserWarning, match=_mixed("We do not recommend.*4352 numel instead of 256 numel")
            ) as seen:
                _validate_frozen_params(model, chosen, set(), use_orig_params)
            assert len(seen) == 4
        else:
            match = _mixed("FSDP does not support wrapping such modules when use_orig_params=False.")
            with pytest.raises(ValueError, match=match) as caught:
                _validate_frozen_params(model, chosen, set(), use_orig_params)
            frozen = [f"layers.0.attn.{name}_proj.weight" for name in "qkvo"]
            assert "requires_grad=True:\n['layers.0.attn.lora_A.weight']\n" in str(caught.value)
            assert str(caught.value).endswith(f"requires_grad=False:\n{frozen}")

        ignored = {p for module in lora_a for p in module.parameters()}
        _validate_frozen_params(model, chosen, ignored, use_orig_params)

    def test_the_first_module_in_order_is_named(self) -> None:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)))
        for pair in model:
            pair[0].requires_grad_(False)
        with pytest.raises(ValueError, match=r"^0 has both parameters with requires_grad=True and False\."):
            _validate_frozen_params(model, {model, *model}, set(), use_orig_params=False)


def _mixed(rest: str) -> str:
    return r"layers\.\d\.attn has both parameters with requires_grad=True and False\. " + rest


@pytest.fixture(autouse=True)
def _no_context_is_left() -> Iterator[None]:
    """No test leaves an open ``enable_wrap``."""
    yield
    linear = nn.Linear(1, 1)
    assert wrap(linear) is linear


def _container_warning() -> Any:
    return pytest.warns(UserWarning, match="FSDP will not all-gather parameters for containers that do not implement")
