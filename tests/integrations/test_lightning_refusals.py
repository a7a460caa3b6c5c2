"""What Lightning's strategies do not take, what they take beside a whole model, and what of Lightning is not public."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import polyshard
import pytest
import torch
from blockwise_states import BlockwiseMomentum
from lightning.fabric.plugins.precision.fsdp import FSDPPrecision as FabricsFSDPPrecision
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import StrategyRegistry
from lightning_ranks import CONFIG, Regression, lightnings_warnings, loader, mean_losses, on_ranks, reference
from lightning_ranks import trainer as trains
from polyshard import ShardConfig
from polyshard.errors import (
    AlreadyShardedError,
    ConfigError,
    ConfigTypeError,
    ParameterError,
    PolyshardError,
    StateError,
    UnsupportedError,
)
from polyshard_lightning import PolyshardFabricStrategy, PolyshardStrategy, register
from torch import nn

#: All of them import Lightning, for seconds.
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with lightnings_warnings():
        yield


# Precision, in one place.


def trainer(config: ShardConfig, **settings: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return lightning.Trainer(accelerator="cpu", devices=2, strategy=PolyshardStrategy(config), **quiet, **settings)


def fabric(config: ShardConfig, **settings: Any) -> lightning.Fabric:
    return lightning.Fabric(accelerator="cpu", devices=2, strategy=PolyshardFabricStrategy(config), **settings)


@pytest.mark.parametrize("make", [trainer, fabric])
@pytest.mark.parametrize(
    ("of_polyshard", "of_lightning", "words"),
    [
        ("fp32", "bf16-mixed", "torch.bfloat16"),
        ({"name": "mixed", "param": "fp16"}, "bf16-mixed", "torch.float16"),
        ("bf16", "64-true", "torch.float64"),
        ("bf16", "16-true", "torch.float16"),
        ("fp16", "32-true", "gradient scaler"),
        ("fp16", None, "precision='16-mixed'"),
    ],
)
def test_precisions_that_differ_are_refused(
    make: Callable[..., Any], of_polyshard: Any, of_lightning: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        make(ShardConfig(precision=of_polyshard), precision=of_lightning)


@pytest.mark.parametrize(("make", "plugin"), [(trainer, FSDPPrecision), (fabric, FabricsFSDPPrecision)])
def test_precision_plugins_that_do_something_else_are_refused(
    make: Callable[..., Any], plugin: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=r"FSDPPrecision .* is not served by polyshard"):
        make(ShardConfig(), plugins=plugin("32-true"))


@pytest.mark.parametrize("make", [trainer, fabric])
@pytest.mark.parametrize(
    ("of_polyshard", "of_lightning"),
    [("bf16", "bf16-mixed"), ({"name": "mixed", "param": "bf16"}, "bf16-mixed"), ("bf16", None), ("none", "bf16-true")],
)
def test_precisions_that_agree_are_taken_as_they_were_given(
    make: Callable[..., Any], of_polyshard: Any, of_lightning: Any
) -> None:
    config = ShardConfig(precision=of_polyshard)
    assert make(config, precision=of_lightning).strategy.shard_config == config


def test_a_kind_of_checkpoint_that_does_not_exist_is_refused() -> None:
    for cls in (PolyshardStrategy, PolyshardFabricStrategy):
        with pytest.raises(ConfigError, match="Did you mean 'sharded'"):
            cls(state_dict_type="shard")
        assert cls(state_dict_type="full") is not None


def test_names_are_registered_where_that_is_asked_for() -> None:
    assert "polyshard" not in StrategyRegistry
    assert "polyshard" not in STRATEGY_REGISTRY
    try:
        register(ShardConfig(strategy="no_shard"))
        register(ShardConfig(strategy="shard_grad_op"))
        made = [
            lightning.Trainer(accelerator="cpu", devices=2, strategy="polyshard", logger=False).strategy,
            lightning.Fabric(accelerator="cpu", devices=2, strategy="polyshard").strategy,
        ]
        assert [type(each) for each in made] == [PolyshardStrategy, PolyshardFabricStrategy]
        assert {each.shard_config.strategy for each in made} == {polyshard.Strategy.SHARD_GRAD_OP}
    finally:
        StrategyRegistry.remove("polyshard")
        STRATEGY_REGISTRY.remove("polyshard")


def test_each_strategy_is_for_its_own() -> None:
    with pytest.raises(ValueError, match="invalid strategy"):
        lightning.Trainer(accelerator="cpu", strategy=PolyshardFabricStrategy(), logger=False)
    with pytest.raises(ValueError, match="invalid strategy"):
        lightning.Fabric(accelerator="cpu", strategy=PolyshardStrategy())


def test_hooks_that_are_not_public_are_still_lightnings() -> None:
    # What polyshard/lightning/_private.py tells of: under another name nothing would call the strategies' own.
    trainers, fabrics = lightning.pytorch.strategies.DDPStrategy, lightning.fabric.strategies.DDPStrategy
    assert callable(trainers._setup_model)
    assert hasattr(trainers(), "_layer_sync")
    assert hasattr(fabrics()._backward_sync_control, "no_backward_sync")


# Modules that the Trainer does not train, and some that it does.


class WithParameter(Regression):
    """Optimizes manually, and has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scale = nn.Parameter(torch.ones(1))


class Foreign(Regression):
    """Makes an optimizer over something else, too."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.other = [nn.Parameter(torch.ones(3))]
        return torch.optim.SGD([*self.parameters(), *self.other], lr=0.1)


class Blockwise(Regression):
    """Its optimizer keeps state of other shapes than parameters have."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.optimizer = BlockwiseMomentum(self.parameters())
        return self.optimizer


class Renamed(Regression):
    """Its state dict has other names."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(
            lambda module, state, prefix, metadata: state.update(other=state.pop("net.first.weight"))
        )


class Odd(Regression):
    """Has a hyperparameter that is no value."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"made": object()})


class Composed(Regression):
    """Shards its blocks by itself."""

    def configure_model(self) -> None:
        if self.net.blocks[0].up.weight.ndim == 2:
            for block in self.net.blocks:
                polyshard.fully_shard(block.double(), self.trainer.strategy.shard_config)


class Unnamed(Regression):
    """Computes with what is sharded in a hook that is no step."""

    def on_train_epoch_start(self) -> None:
        self.net.first(torch.ones(1, 3, dtype=torch.float64))


def refusals(rank: int, folder: str) -> list[tuple[str, str]]:
    found = []

    # The first argument of a function on the way is what the engine takes for its method's self.
    def refused(
        seen: list[tuple[str, str]],
        module: nn.Module,
        config: ShardConfig = CONFIG,
        form: str = "full",
        **settings: Any,
    ) -> None:
        strategy = PolyshardStrategy(config, state_dict_type=form)
        with pytest.raises((PolyshardError, RuntimeError)) as caught:
            trains(folder, strategy, max_epochs=1, **settings).fit(module, loader(1))
        seen.append((type(caught.value).__name__, str(caught.value)))

    refused(found, Regression(), callbacks=[WeightAveraging()])
    refused(found, Regression(), callbacks=[StochasticWeightAveraging(1e-2)])
    wrapped = Regression()
    wrapped.net.blocks = nn.parallel.DistributedDataParallel(wrapped.net.blocks)
    refused(found, wrapped)
    fsdp = Regression().double()
    torch.distributed.fsdp.fully_shard(fsdp.net)
    refused(found, fsdp)
    refused(found, polyshard.shard(Regression().double(), CONFIG))
    refused(found, WithParameter())
    refused(found, Foreign())
    refused(found, Composed())
    refused(found, Regression(), ShardConfig(device="meta"))
    refused(found, Unnamed(), ShardConfig())
    module = Regression()
    trains(folder, max_epochs=1).fit(module, loader(1))
    refused(found, module, ShardConfig())
    for form in ("full", "sharded"):
        module = Blockwise()
        refused(found, module, form=form, enable_checkpointing=True)
        assert not module.losses
        assert not module.optimizer.state
    module = Odd()
    refused(found, module, form="sharded", enable_checkpointing=True)
    assert not module.losses
    # What is not saved can be trained, and what is saved without the optimizer.
    trains(folder, max_epochs=1).fit(Blockwise(), loader(1))
    alone = ModelCheckpoint(folder, save_weights_only=True)
    trains(folder, max_epochs=1, enable_checkpointing=True, callbacks=[alone]).fit(Blockwise(), loader(1))
    assert Path(alone.best_model_path).is_file()
    renamed = ModelCheckpoint(f"{folder}/renamed")
    trains(folder, max_epochs=1, enable_checkpointing=True, callbacks=[renamed]).fit(Renamed(), loader(1))
    saved = torch.load(renamed.best_model_path, weights_only=True)["state_dict"]
    assert saved["other"].shape == Renamed().net.first.weight.shape
    assert "net.first.weight" not in saved
    # What was refused left everything as it was.
    module.losses.clear()
    trains(folder, max_epochs=1).fit(module, loader(1))
    assert len(module.losses) == 1
    return found


def test_wrong_use_of_the_trainer_is_refused_by_name(tmp_path: Path) -> None:
    expected = [
        (UnsupportedError, "WeightAveraging"),
        (UnsupportedError, "StochasticWeightAveraging"),
        (AlreadyShardedError, "DistributedDataParallel"),
        (AlreadyShardedError, "FSDP"),
        (AlreadyShardedError, "Leave that to the strategy"),
        (ParameterError, "'scale' lies directly in WithParameter"),
        (ConfigError, "Parameter 10 of group 0 of SGD"),
        (ConfigError, "Leave policy out"),
        (ConfigError, "is not the device that Lightning chose"),
        (RuntimeError, "mixed torch.Tensor and DTensor"),
        (ConfigError, "other settings (policy"),
        (ConfigError, "Checkpoints of this run would fail. The optimizer's state 'scales' of 'net."),
        (ConfigError, "save_weights_only=True), none by Trainer(enable_checkpointing=False)"),
        (ConfigTypeError, "extra['hyper_parameters']['made'] is of builtins.object"),
    ]
    for found in on_ranks(refusals, str(tmp_path)):
        for (kind, text), (wanted, words) in zip(found, expected, strict=True):
            assert kind == wanted.__name__, text
            assert words in text


def composed(rank: int, folder: str) -> tuple[list[float], int]:
    module = Composed()
    trains(folder, PolyshardStrategy(ShardConfig()), max_epochs=1).fit(module, loader(3))
    return module.losses, polyshard.report(module).units


def test_modules_that_the_user_sharded_become_part_of_the_whole(tmp_path: Path) -> None:
    ranks = on_ranks(composed, str(tmp_path))
    assert mean_losses([losses for losses, _ in ranks]) == pytest.approx(reference(3)[0], rel=1e-10)
    assert {units for _, units in ranks} == {3}


def closed(rank: int, folder: str) -> str:
    module = Regression()
    fits = trains(folder, max_epochs=1)
    fits.fit(module, loader(1))
    polyshard.close(module)
    with pytest.raises(StateError) as caught:
        fits.validate(module, loader(1), verbose=False)
    trains(folder, max_epochs=1).fit(Regression(), loader(1))
    return str(caught.value)


def test_a_module_that_was_closed_says_so(tmp_path: Path) -> None:
    for text in on_ranks(closed, str(tmp_path)):
        assert "came after polyshard.close" in text
