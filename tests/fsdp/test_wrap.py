"""Wrapping: the constructor's policies, ``wrap`` inside ``enable_wrap``, what they leave out and what they refuse."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fsdp_parity.models import (
    CUDAInitMode,
    DummyProcessGroup,
    FSDPInitMode,
    TransformerWithSharedParams,
    expected_warnings,
    wrap_fsdp,
)
from fsdp_parity.ranks import Ranks, across
from fsdp_parity.subtests import named, subtests
from parity import chain
from polyshard_fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from polyshard_fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from polyshard_fsdp._common_utils import clean_tensor_name
from polyshard_fsdp._traversal_utils import _get_fsdp_handles, _get_fsdp_states
from polyshard_fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _or_policy,
    _Policy,
    _wrap_module_cls_individually,
    always_wrap_policy,
    enable_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from torch import nn
from torch.nn import TransformerDecoderLayer, TransformerEncoderLayer
from torch.nn.modules.batchnorm import _BatchNorm

NORMS = ("bn1", "bn2", "bn3", "sync_bn")


class BatchNormNet(nn.Module):
    """A linear layer and a batch norm of each kind; never run."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10, bias=False)
        self.bn1 = nn.BatchNorm1d(10)
        self.bn2 = nn.BatchNorm2d(10)
        self.bn3 = nn.BatchNorm3d(10)
        self.sync_bn = nn.SyncBatchNorm(10)


class LoraAttention(nn.Module):
    """Frozen projections of 4096 elements, and 512 trainable ones beside them."""

    def __init__(self) -> None:
        super().__init__()
        for name in "qkvo":
            self.register_module(f"{name}_proj", nn.Linear(32, 32, bias=False).requires_grad_(False))
        self.lora_A = nn.Linear(32, 8, bias=False)
        self.lora_B = nn.Linear(8, 32, bias=False)


class LoraMLP(nn.Module):
    """Frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 128, bias=False).requires_grad_(False)


class LoraDecoder(nn.Module):
    """Frozen but for the attention's adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = LoraAttention(), LoraMLP()
        self.norm = nn.LayerNorm(32).requires_grad_(False)


class LoraModel(nn.Module):
    """Four decoders of which only the attentions mix frozen and trainable parameters; never run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(100, 32).requires_grad_(False)
        self.layers = nn.ModuleList(LoraDecoder() for _ in range(4))


def lora_policies() -> dict[str, _Policy]:
    """Policies that all wrap attention, MLP and decoder each, by name."""
    classes = (LoraAttention, LoraMLP, LoraDecoder)

    def choose(module: nn.Module) -> bool:
        return isinstance(module, classes)

    def choose_with_settings(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, LoraAttention):
            return {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
        return isinstance(module, (LoraMLP, LoraDecoder))

    return {
        "classes": ModuleWrapPolicy(classes),
        "function": CustomPolicy(choose),
        "function_with_settings": CustomPolicy(choose_with_settings),
    }


def nested_sequential() -> nn.Sequential:
    """Two linear layers and a pair of them: 30 elements each."""
    pair = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), pair)


def init_modes(ranks: Ranks, *, offload: bool = False) -> list[CUDAInitMode]:
    """When to move the model: the same on the CPU; parameters that are offloaded may not move once they are wrapped."""
    if ranks.on_cpu or offload:
        return [CUDAInitMode.CUDA_BEFORE]
    return [CUDAInitMode.CUDA_AFTER, CUDAInitMode.CUDA_BEFORE]


@pytest.mark.parametrize("nested", [True, False])
@across(2)
def test_error_already_wrapped(ranks: Ranks, nested: bool) -> None:
    """A policy is refused where a module inside is FSDP; the first in module order is named."""
    name = r"lin1\.1" if nested else "lin1"
    for mode in init_modes(ranks):
        with named({"mode": mode}):
            model = _partly_wrapped(ranks, mode, nested)
            if mode is CUDAInitMode.CUDA_AFTER:
                model = model.to(ranks.device)
            before = list(model.named_modules())
            match = f"FSDP auto wrapping requires modules to not already have FSDP applied but found {name} in"
            with pytest.raises(ValueError, match=match):
                wrap_fsdp(model, auto_wrap_policy=size_based_auto_wrap_policy)
            assert list(model.named_modules()) == before


@across(2)
def test_bn_always_wrapped_individually(ranks: Ranks) -> None:
    """Batch norms are wrapped in a container that is wrapped itself, and only where the policy says so."""
    both = partial(_or_policy, policies=[_wrap_container, _batchnorm_policy()])
    for policy, norms in ((both, {*NORMS}), (_wrap_container, set())):
        with named({"norms": norms}):
            root = nn.Module()
            root.bn_container = BatchNormNet().to(ranks.device)
            model = wrap_fsdp(root, auto_wrap_policy=policy)
            assert isinstance(root.bn_container, FSDP)
            assert model.bn_container is root.bn_container
            assert _wrapped_children(model.bn_container.module) == norms
            assert all(isinstance(getattr(model.bn_container, name), FSDP) == bool(norms) for name in NORMS)


@across(2)
@subtests(
    cpu_offload=[CPUOffload(False), CPUOffload(True)],
    backward_prefetch=[BackwardPrefetch.BACKWARD_POST, BackwardPrefetch.BACKWARD_PRE],
    forward_prefetch=[False, True],
)
def test_main_wrap_api(
    ranks: Ranks, cpu_offload: CPUOffload, backward_prefetch: BackwardPrefetch, forward_prefetch: bool
) -> None:
    """Everything is wrapped and has the root's settings; six steps of SGD are those of the plain model.

    Units have one element, so that on all ranks but one the shard is empty, and one unit has no parameters.
    """
    for mode in init_modes(ranks, offload=cpu_offload.offload_params):
        with named({"mode": mode}):
            torch.manual_seed(0)
            layers: dict[str, nn.Module] = {f"lin{number}": nn.Linear(1, 1, bias=False) for number in (1, 2, 3)}
            reference = chain(**layers, lin4=chain(nested_lin=nn.Linear(1, 1, bias=False))).to(ranks.device)
            model: Any = copy.deepcopy(reference)
            if mode is CUDAInitMode.CUDA_AFTER:
                model = model.cpu()
            model = wrap_fsdp(
                model,
                auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=0),
                cpu_offload=cpu_offload,
                backward_prefetch=backward_prefetch,
                forward_prefetch=forward_prefetch,
            )
            if mode is CUDAInitMode.CUDA_AFTER:
                model = model.to(ranks.device)
            inner = model.module
            for module in (inner.lin1, inner.lin2, inner.lin3, inner.lin4.module.nested_lin, inner.lin4, model):
                assert isinstance(module, FSDP)
                assert module.cpu_offload == cpu_offload
                assert module.backward_prefetch == backward_prefetch
                assert module.forward_prefetch == forward_prefetch
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
            plain_optimizer = torch.optim.SGD(reference.parameters(), lr=1e-2, momentum=0.9)
            for _ in range(6):
                loss = _step(model, optimizer, ranks.device)
                torch.testing.assert_close(loss, _step(reference, plain_optimizer, ranks.device))
            with FSDP.summon_full_params(model):
                for mine, plain in zip(model.parameters(), reference.parameters(), strict=True):
                    torch.testing.assert_close(mine.view_as(plain).to(plain.device), plain)


@pytest.mark.parametrize("as_function", [True, False])
@across(2)
def test_batchnorm_apart_under_mixed_precision(ranks: Ranks, as_function: bool) -> None:
    """Batch norm is a unit of its own that computes in float32, between layers in bfloat16; a warning says so."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).to(ranks.device)
    policy = partial(size_based_auto_wrap_policy, min_num_params=1000) if as_function else ModuleWrapPolicy(())
    low = MixedPrecision(param_dtype=torch.bfloat16)
    # torch's words, which spell the last one in two ways.
    match = "Both mixed precision and an auto_wrap_policy were specified to FSDP.*\n.*BatchNorm1d.*\n.*FSDP inst"
    with pytest.warns(UserWarning, match=match):
        wrapped = FSDP(model, auto_wrap_policy=policy, mixed_precision=low)
    assert [type(module) for module in model] == [nn.Linear, FSDP, nn.Linear]
    assert model[1].mixed_precision == MixedPrecision()
    assert wrapped.mixed_precision == low
    seen: list[torch.dtype] = []

    def look(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        seen.extend((args[0].dtype, module.weight.dtype))

    for module in (model[0], model[1].module, model[2]):
        module.register_forward_pre_hook(look)
    x = torch.rand(4, 8, device=ranks.device, requires_grad=True)
    output = wrapped(x)
    output.sum().backward()
    assert seen == [torch.bfloat16] * 2 + [torch.float32] * 2 + [torch.bfloat16] * 2
    assert output.dtype == torch.bfloat16
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert model[1].module.running_mean.dtype == torch.float32


def _wrap_container(module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
    return recurse or isinstance(module, BatchNormNet)


def _batchnorm_policy() -> Callable[..., bool]:
    return partial(_wrap_module_cls_individually, module_classes=[_BatchNorm])


def _wrapped_children(module: nn.Module) -> set[str]:
    return {name for name, child in module.named_children() if isinstance(child, FSDP)}


def _partly_wrapped(ranks: Ranks, mode: CUDAInitMode, nested: bool) -> nn.Module:
    device = ranks.device if mode is CUDAInitMode.CUDA_BEFORE else "cpu"

    def linear() -> nn.Module:
        return nn.Linear(1, 1, bias=False).to(device)

    model = nn.Module()
    model.lin1 = nn.Sequential(linear(), wrap_fsdp(linear())) if nested else wrap_fsdp(linear())
    model.lin2 = wrap_fsdp(linear())
    model.lin3 = wrap_fsdp(linear())
    return model


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> torch.Tensor:
    optimizer.zero_grad()
    loss: torch.Tensor = model(torch.ones(1, device=device)).sum()
    loss.backward()
    optimizer.step()
    return loss.detach()


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

    @pytest.mark.parametrize("policy", lora_policies().values(), ids=lora_policies())
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


def _mixed(rest: str) -> str:
    return r"layers\.\d\.attn has both parameters with requires_grad=True and False\. " + rest
