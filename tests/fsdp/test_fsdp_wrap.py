"""Wrapping: the constructor's policies, ``wrap`` inside ``enable_wrap``, what they leave out and what they refuse."""

from __future__ import annotations

import functools
import re
import warnings
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
from fsdp_parity.wrapping import LoraAttention, LoraDecoder, LoraModel, nested_sequential
from polyshard_fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp._common_utils import clean_tensor_name
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
LEAVES = size_based_auto_wrap_policy.FORCE_LEAF_MODULES.union({nn.Linear})  # type: ignore[attr-defined]
#: A model, a policy, and the names of the modules that are wrapped.
CHOICES: list[Any] = [
    pytest.param(nested_sequential, always_wrap_policy, ["", "0", "1", "2", "2.0", "2.1"], id="always"),
    pytest.param(nested_sequential, FORTY, ["", "2"], id="by_size"),
    pytest.param(nested_sequential, FORTY, ["", "ignored"], id="ignored_do_not_count"),
    pytest.param(lambda: nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)]), FORTY, [""], id="container"),
    pytest.param(lambda: nn.ModuleList([nn.Linear(10, 10)]), FORTY, ["", "0"], id="child_of_a_container"),
    pytest.param(lambda: nn.Sequential(nn.Linear(10, 10), nn.MultiheadAttention(100, 1)), FORTY, ["", "0"], id="leaf"),
    pytest.param(
        lambda: nn.Sequential(nn.Linear(10, 10), nn.ModuleList([nn.Linear(10, 10)])),
        functools.partial(FORTY, force_leaf_modules=LEAVES),
        [""],
        id="leaf_of_the_user",
    ),
]


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

    def test_main_wrap_api(self, ranks: Pools) -> None:
        ranks.run(2, bodies.train_wrapped_by_policy)

    @pytest.mark.parametrize("as_function", [True, False])
    def test_module_in_two_places(self, ranks: Pools, as_function: bool) -> None:
        ranks.run(2, bodies.train_module_in_two_places, as_function)

    @pytest.mark.parametrize("as_function", [True, False])
    def test_batchnorm_apart_under_mixed_precision(self, ranks: Pools, as_function: bool) -> None:
        ranks.run(2, bodies.batchnorm_apart_under_mixed_precision, as_function)


class TestAutoWrap:
    """In one process, with a group through which nothing can be sent."""

    @pytest.mark.parametrize("by_hand", [False, True])
    def test_wrap(self, device: torch.device, group: DummyProcessGroup, by_hand: bool) -> None:
        linear = nn.Linear(5, 5).to(device)
        if by_hand:
            with expected_warnings(), enable_wrap(wrapper_cls=FSDP, process_group=group):
                layer: Any = wrap(linear)
                other: Any = wrap(nn.Linear(5, 5), process_group=DummyProcessGroup(rank=0, size=2))
            assert (other.rank, other.world_size) == (0, 2)
        else:
            policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1)
            layer = wrap_fsdp(linear, process_group=group, auto_wrap_policy=policy)
        assert isinstance(layer, FSDP)
        assert layer.module is linear
        assert (layer.rank, layer.world_size) == (0, 1)
        assert wrap(linear) is linear

    @pytest.mark.parametrize(("make", "policy", "wrapped"), CHOICES)
    @pytest.mark.parametrize("by_hand", [False, True])
    def test_policies_choose(
        self, group: DummyProcessGroup, make: Any, policy: Any, wrapped: list[str], by_hand: bool
    ) -> None:
        plain = make()
        ignored = [plain[1], plain[2][0]] if wrapped == ["", "ignored"] else []
        settings: dict[str, Any] = {"process_group": group, "auto_wrap_policy": policy, "ignored_modules": ignored}
        # A container as a root is warned about.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP will not all-gather parameters for containers", UserWarning)
            if by_hand:
                with expected_warnings(), enable_wrap(wrapper_cls=FSDP, **settings):
                    model: Any = wrap(plain)
            else:
                model = wrap_fsdp(plain, **settings)
        found = [clean_tensor_name(f"{name}.") for name, module in model.named_modules() if isinstance(module, FSDP)]
        assert [name.rstrip(".") for name in found] == [name for name in wrapped if name != "ignored"]
        # Ignored modules stay as they are: 30 elements each.
        assert sum(p.numel() for module in ignored for p in module.parameters()) == 30 * len(ignored)

    @pytest.mark.parametrize(
        "policy",
        [
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=LAYERS),
            ModuleWrapPolicy(LAYERS),
            functools.partial(_or_policy, policies=[ModuleWrapPolicy(LAYERS)]),
        ],
        ids=["function", "object", "object_in_or"],
    )
    def test_transformer_policies(self, device: torch.device, group: DummyProcessGroup, policy: object) -> None:
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

    @pytest.mark.parametrize("cpu_offload", OFFLOADS)
    @pytest.mark.parametrize("use_device_id", [True, False])
    def test_auto_wrap_smoke_test(self, ranks: Pools, cpu_offload: CPUOffload, use_device_id: bool) -> None:
        ranks.run(1, bodies.auto_wrap_smoke, cpu_offload, use_device_id)

    @pytest.mark.parametrize("policy", bodies.lora_policies().values(), ids=bodies.lora_policies())
    def test_frozen_params(self, device: torch.device, group: DummyProcessGroup, policy: Any) -> None:
        match = _mixed("We do not recommend wrapping such modules")
        with expected_warnings(), pytest.warns(UserWarning, match=match) as caught:
            model = FSDP(LoraModel().to(device), process_group=group, auto_wrap_policy=policy, use_orig_params=True)
        texts = [str(warning.message) for warning in caught if re.match(match, str(warning.message))]
        # Four frozen projections of 32 x 32 and two trainable adapters of 8 x 32.
        assert ["4608 numel instead of 512 numel" in text for text in texts] == [True] * 4
        assert [text.split(" ")[0] for text in texts] == [f"layers.{index}.attn" for index in range(4)]
        assert "requires_grad=True:\n['layers.0.attn.lora_A.weight', 'layers.0.attn.lora_B.weight']\n" in texts[0]
        assert len(FSDP.fsdp_modules(model)) == 13
        plain = LoraModel().to(device)
        match = _mixed("FSDP does not support wrapping such modules when use_orig_params=False.")
        with expected_warnings(), pytest.raises(ValueError, match=match) as refused:
            FSDP(plain, process_group=group, auto_wrap_policy=policy, use_orig_params=False)
        assert str(refused.value).startswith("layers.0.attn has both")
        assert not FSDP.fsdp_modules(plain)


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
