"""Fabric's strategy on two processes, beside plain torch on one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import polyshard
import polyshard_fsdp2
import pytest
import torch
import torch.distributed as dist
from blockwise_states import BlockwiseMomentum
from lightning_ranks import CONFIG, STEPS, Net, built, loader, mean_losses, on_ranks, reference
from parity import Block, local, units_of
from plain_states import Odd, Part
from polyshard import ShardConfig
from polyshard.errors import AlreadyShardedError, ConfigError, PolyshardError, StateError, UnsupportedError
from polyshard_lightning import PolyshardFabricStrategy
from torch import nn
from torch.nn.functional import mse_loss

#: All of them import Lightning, for seconds.
pytestmark = pytest.mark.slow


def fabric(form: str = "sharded", config: ShardConfig = CONFIG, **settings: Any) -> lightning.Fabric:
    strategy = PolyshardFabricStrategy(config, state_dict_type=form)
    made = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy, **settings)
    made.launch()
    return made


def stepping(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    named = list(model.named_parameters())
    groups = [[each for name, each in named if ("bias" in name) is biases] for biases in (False, True)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def whole(model: Any) -> dict[str, torch.Tensor]:
    with polyshard.unsharded(model.module):
        return {name: each.detach().clone() for name, each in model.module.named_parameters()}


# Steps.


def train(
    rank: int, order: str, dtype: torch.dtype, accumulates: int, clips: dict[str, float], settings: dict[str, Any]
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    runs = fabric(**settings)
    model = built().to(dtype)
    if order == "jointly":
        optimizer, scheduler = stepping(model)
        model, optimizer = runs.setup(model, optimizer)
    else:
        model = runs.setup_module(model)
        optimizer, scheduler = stepping(model)
        optimizer = runs.setup_optimizers(optimizer)
    losses, norms = [], []
    for index, (x, y) in enumerate(runs.setup_dataloaders(loader(STEPS, dtype), use_distributed_sampler=False)):
        steps = (index + 1) % accumulates == 0
        with runs.no_backward_sync(model, enabled=not steps):
            loss = mse_loss(model(x), y)
            runs.backward(loss / accumulates)
        losses.append(loss.item())
        if steps:
            if clips:
                norm = runs.clip_gradients(model, optimizer, **clips)
                norms += [] if norm is None else [norm.item()]
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return losses, whole(model), norms


LOW = {"dtype": torch.float32, "autocast": torch.bfloat16}


@pytest.mark.parametrize(
    ("order", "clips", "settings", "as_plain", "within"),
    [
        ("jointly", {}, {}, {}, 1e-10),
        ("model first", {}, {}, {}, 1e-10),
        ("jointly", {"max_norm": 0.1}, {}, {"accumulates": 4, "clip_norm": 0.1}, 1e-10),
        ("jointly", {"clip_val": 0.1}, {}, {"accumulates": 4, "clip_value": 0.1}, 1e-10),
        ("jointly", {}, {"precision": "32-true"}, {"dtype": torch.float32}, 1e-4),
        ("jointly", {}, {"precision": "bf16-mixed"}, LOW, 3e-2),
    ],
)
def test_steps_equal_those_of_the_unsharded_model(
    order: str, clips: dict[str, float], settings: dict[str, Any], as_plain: dict[str, Any], within: float
) -> None:
    losses, parameters = reference(STEPS, **as_plain)
    dtype, accumulates = as_plain.get("dtype", torch.float64), as_plain.get("accumulates", 1)
    ranks = on_ranks(train, order, dtype, accumulates, clips, settings)
    assert mean_losses([each for each, _, _ in ranks]) == pytest.approx(losses, rel=within)
    for _, found, norms in ranks:
        torch.testing.assert_close(found, parameters, rtol=within, atol=within / 3)
        assert norms == ranks[0][2]
        assert len(norms) == (STEPS // 4 if "max_norm" in clips else 0)


# Models.


class Encoder(Net):
    """Has a method beside forward."""

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.first(x))

    def fails(self, x: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("of the user's")


def marked(rank: int) -> tuple[float, list[str]]:
    runs = fabric()
    inner = built().double()
    inner.__class__ = Encoder
    model = runs.setup_module(inner)
    refusals = []
    with pytest.raises((PolyshardError, RuntimeError)) as caught:
        model.encode(torch.ones(1, 3, dtype=torch.float64))
    refusals.append(str(caught.value))
    model.mark_forward_method("encode")
    model.mark_forward_method("fails")
    with pytest.raises(ZeroDivisionError):
        model.fails(torch.ones(1, 3, dtype=torch.float64))
    found = model.encode(torch.ones(1, 3, dtype=torch.float64)).sum().item()
    # Forward is the model's own again.
    assert model(torch.ones(1, 3, dtype=torch.float64)).shape == (1, 2)
    return found, refusals


def test_marked_methods_see_whole_parameters_and_others_are_refused() -> None:
    plain = built().double()
    x = plain.blocks(plain.first(torch.ones(1, 3, dtype=torch.float64))).sum().item()
    for found, (text,) in on_ranks(marked):
        assert found == pytest.approx(x, rel=1e-12)
        assert "mixed torch.Tensor and DTensor" in text


def on_meta(rank: int) -> list[float]:
    runs = fabric()
    with runs.init_module(empty_init=True):
        model = nn.Sequential(nn.Linear(3, 5), Block(), nn.Linear(5, 2))
    assert next(model.parameters()).is_meta
    runs.seed_everything(0, verbose=False)
    model = runs.setup_module(model)
    optimizer = runs.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for x, y in loader(2, torch.float32):
        loss = mse_loss(model(x), y)
        runs.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert not any(parameter.is_meta for parameter in model.parameters())
    return losses


def test_models_on_the_meta_device_are_made_where_they_are_sharded() -> None:
    for losses in on_ranks(on_meta):
        assert all(0 < loss < 100 for loss in losses)


# Checkpoints.


def checkpoints(rank: int, folder: str, form: str) -> tuple[list[float], list[float], dict[str, Any]]:
    runs = fabric(form)
    path = Path(folder, "here", "saved")

    def made() -> tuple[Any, Any, Any]:
        inner = built().double()
        optimizer, scheduler = stepping(inner)
        return (*runs.setup(inner, optimizer), scheduler)

    def steps(model: Any, optimizer: Any, scheduler: Any) -> list[float]:
        losses = []
        for x, y in loader(4):
            loss = mse_loss(model(x), y)
            runs.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
        return losses

    straight = made()
    steps(*straight)
    for turn in range(2):
        state = dict(zip(("model", "optimizer", "scheduler"), straight, strict=True))
        runs.save(path, {**state, "step": 4 + turn, "kept": "by nobody"})
    resumed = made()
    state = {**dict(zip(("model", "optimizer", "scheduler"), resumed, strict=True)), "step": 0}
    rest = runs.load(path, state)
    loaded = runs.setup_module(built().double())
    runs.load(path, {"model": loaded})
    same = all(map(torch.equal, map(local, loaded.parameters()), map(local, straight[0].parameters())))
    return steps(*straight), steps(*resumed), {"rest": rest, "step": state["step"], "same": same}


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_a_run_that_resumes_is_the_run_that_did_not_stop(tmp_path: Path, form: str) -> None:
    for straight, resumed, found in on_ranks(checkpoints, str(tmp_path), form):
        assert resumed == straight
        assert found == {"rest": {"kept": "by nobody"}, "step": 5, "same": True}
    path = tmp_path / "here" / "saved"
    assert path.is_dir() == (form == "sharded")
    assert [each.name for each in path.parent.iterdir()] == ["saved"]


def raw(rank: int, folder: str) -> list[bool]:
    runs = fabric("full")
    torch.manual_seed(3)
    other = Net().double()
    optimizer = torch.optim.Adam(other.parameters())
    other(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    if rank == 0:
        torch.save(other.state_dict(), f"{folder}/model.pt")
        state = optimizer.state_dict()
        # As in a file of an earlier torch.
        del state["param_groups"][0]["decoupled_weight_decay"]
        torch.save(state, f"{folder}/optimizer.pt")
    runs.barrier()
    model = built().double()
    model, loaded = runs.setup(model, torch.optim.Adam(model.parameters()))
    runs.load_raw(f"{folder}/model.pt", model)
    runs.load_raw(f"{folder}/optimizer.pt", loaded)
    with polyshard.unsharded(model.module):
        same = [torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True)]
    runs.save(f"{folder}/filtered", {"model": model}, filter={"model": lambda name, _: "bias" in name})
    runs.barrier()
    names = torch.load(f"{folder}/filtered")["model"]
    runs.save(f"{folder}/whole", {"model": model, "optimizer": loaded})
    runs.barrier()
    saved = torch.load(f"{folder}/whole")["optimizer"]["state"]
    moments = [torch.equal(saved[i]["exp_avg"], each["exp_avg"]) for i, each in optimizer.state_dict()["state"].items()]
    return [*same, *moments, all("bias" in name for name in names)]


def test_raw_files_are_loaded_and_filters_are_kept_to(tmp_path: Path) -> None:
    for found in on_ranks(raw, str(tmp_path)):
        assert len(found) == 21
        assert all(found)


class Extra(Odd):
    """With state that is no tensor."""

    told: dict[str, int] | None = None

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.told = state


def extra(seed: int, *, amsgrad: bool = False) -> tuple[Extra, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Extra().double()
    named = list(model.named_parameters())
    groups = [[each for name, each in named if ("weight" in name) is weights] for weights in (False, True)]
    # The bias before the norm has a gradient of rounding alone, which Adam would make steps of.
    settings = {"amsgrad": amsgrad, "eps": 1e-3}
    return model, torch.optim.AdamW([{"params": group, "lr": 0.1 + seed} for group in groups], **settings)


def whole_file(rank: int, folder: str, settings: dict[str, Any]) -> None:
    """What plain torch would have saved of the same two steps: names, order, shapes, values; and back again."""
    runs = fabric("full", replace(CONFIG, policy=units_of(Part), **settings))
    tokens = torch.arange(6)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss = model(tokens).square().mean()
        loss.backward() if isinstance(model, Extra) else runs.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    plain = extra(0)
    model, optimizer = runs.setup(*extra(0))
    for _ in range(2):
        step(*plain)
        step(model, optimizer)
    runs.save(f"{folder}/whole", {"model": model, "optimizer": optimizer})
    runs.barrier()
    found = torch.load(f"{folder}/whole", weights_only=False)
    wanted = {"model": plain[0].state_dict(), "optimizer": plain[1].state_dict()}
    assert list(found["model"]) == list(wanted["model"])
    assert [list(each) for each in found["optimizer"]["state"].values()] == [
        list(each) for each in wanted["optimizer"]["state"].values()
    ]
    assert found["optimizer"]["param_groups"] == wanted["optimizer"]["param_groups"]
    assert found["model"]["_extra_state"] == {"version": 3}
    for part in found["model"], wanted["model"]:
        part.pop("_extra_state")
    torch.testing.assert_close(dict(found["model"]), dict(wanted["model"]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found["optimizer"]["state"], wanted["optimizer"]["state"], rtol=1e-9, atol=1e-9)

    again, resumed = runs.setup(*extra(1))
    _, other = runs.setup(*extra(1, amsgrad=True))
    with pytest.raises(ConfigError, match="'amsgrad' was False and is True"):
        runs.load(f"{folder}/whole", {"optimizer": other})
    assert not other.state_dict()["state"]
    runs.load(f"{folder}/whole", {"model": again, "optimizer": resumed})
    assert again.module.told == {"version": 3}
    step(model, optimizer)
    step(again, resumed)
    for name, each in whole(again).items():
        assert torch.equal(each, whole(model)[name]), name


@pytest.mark.parametrize("settings", [{}, {"strategy": "no_shard"}], ids=str)
def test_a_full_checkpoint_is_the_file_of_the_unsharded_model(tmp_path: Path, settings: dict[str, Any]) -> None:
    on_ranks(whole_file, str(tmp_path), settings)


# Wrong use.


def wrong(rank: int, folder: str) -> list[tuple[str, str]]:
    runs = fabric()
    found = []

    def refused(call: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(PolyshardError) as caught:
            call(*args, **kwargs)
        found.append((type(caught.value).__name__, str(caught.value)))

    foreign = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    inner = built().double()
    refused(runs.setup, inner, foreign)
    wrapped = built()
    wrapped.blocks = nn.parallel.DistributedDataParallel(wrapped.blocks)
    refused(runs.setup_module, wrapped)
    composed = built()
    for block in composed.blocks:
        torch.distributed.fsdp.fully_shard(block)
    refused(runs.setup_module, composed)
    dropped_in = built()
    polyshard_fsdp2.fully_shard(dropped_in.blocks)
    refused(runs.setup_module, dropped_in)
    alone = dist.new_group([rank], use_local_synchronization=True)
    refused(fabric(config=replace(CONFIG, collectives=alone)).setup_module, built())
    early = built()
    before = torch.optim.SGD(early.parameters(), lr=0.1)
    refused(runs.setup_optimizers, before)
    runs.setup_module(early)
    refused(runs.setup_optimizers, before)
    mine = polyshard.shard(built(), CONFIG)
    refused(runs.setup_module, mine)
    # The model that was refused was left as it was.
    right = torch.optim.SGD(inner.parameters(), lr=0.1)
    model, optimizer = runs.setup(inner, right)
    refused(runs.setup_optimizers, foreign)
    refused(runs.save, f"{folder}/x", {"optimizer": optimizer})
    refused(runs.save, f"{folder}/x", {"model": model}, filter={"model": lambda *_: True})
    refused(runs.load, f"{folder}/absent", {"model": model})
    runs.save(f"{folder}/model", {"model": model, "step": 1})
    refused(runs.load, f"{folder}/model", {"model": model, "optimizer": optimizer})
    refused(runs.load, f"{folder}/model", {"model": model, "epoch": 1})
    lenient = {"model": model, "epoch": 7}
    assert runs.load(f"{folder}/model", lenient, strict=False) == {"step": 1}
    assert lenient["epoch"] == 7
    runs.load(f"{folder}/model", {"model": model}, weights_only=True)
    refused(runs.save, "memory://here", {"model": model})
    taken = Path(folder, "taken")
    taken.mkdir(exist_ok=True)
    (taken / f"notes{rank}.txt").write_text("mine")
    refused(runs.save, taken, {"model": model})
    assert (taken / f"notes{rank}.txt").read_text() == "mine"
    other = runs.setup_module(nn.Sequential(nn.Linear(3, 5), Block()))
    refused(runs.load, f"{folder}/model", {"model": other})
    refused(runs.load, f"{folder}/model")
    refused(runs.strategy._backward_sync_control.no_backward_sync, built(), True)
    assert runs.load(f"{folder}/model", {"model": model, "step": 0}) == {}
    runs.backward(model(torch.ones(2, 3, dtype=torch.float64)).sum())
    optimizer.step()
    return found


def test_wrong_use_is_refused_by_name(tmp_path: Path) -> None:
    expected = [
        (ConfigError, "Parameter 0 of group 0 of SGD"),
        (AlreadyShardedError, "DistributedDataParallel"),
        (AlreadyShardedError, "FSDP2"),
        (AlreadyShardedError, "'blocks' of Net is wrapped already, by polyshard's drop-in polyshard_fsdp2"),
        (ConfigError, "collectives is of 1 ranks, but Lightning divides its data between 2"),
        (ConfigError, "there is none (rank"),
        (ConfigError, "or give both to fabric.setup(module, optimizer)"),
        (AlreadyShardedError, "Leave that to the strategy"),
        (ConfigError, "Parameter 0 of group 0 of SGD"),
        (ConfigError, "needs one model that was set up"),
        (UnsupportedError, "filter"),
        (ConfigError, "absent is not there"),
        (ConfigError, "has no optimizer"),
        (ConfigError, "has no 'epoch'"),
        (UnsupportedError, "state_dict_type='full'"),
        (ConfigError, "taken is a directory, and no checkpoint, where one is to be written"),
        (ConfigError, "Load it into the model that it was saved from"),
        (ConfigError, "none is given"),
        (StateError, "no_backward_sync"),
    ]
    for found in on_ranks(wrong, str(tmp_path)):
        assert len(found) == len(expected)
        for (kind, text), (wanted, words) in zip(found, expected, strict=True):
            assert kind == wanted.__name__, text
            assert words in text


def tell_before_training(rank: int, folder: str, form: str) -> None:
    runs = fabric(form)
    for jointly in (True, False):
        model: Any = built().double()
        optimizer: Any = BlockwiseMomentum(model.parameters())
        told = pytest.warns(UserWarning, match=r"fabric\.save\(\) will refuse BlockwiseMomentum.*'scales'")
        with told if rank == 0 else nullcontext():
            if jointly:
                model, optimizer = runs.setup(model, optimizer)
            else:
                model = runs.setup_module(model)
                optimizer = runs.setup_optimizers(BlockwiseMomentum(model.parameters()))
        runs.backward(model(torch.ones(2, 3).double()).sum())
        optimizer.step()
        with pytest.raises(PolyshardError, match="'scales'"):
            runs.save(f"{folder}/both", {"model": model, "optimizer": optimizer})
        runs.save(f"{folder}/model", {"model": model})


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_optimizers_that_cannot_be_saved_are_told_of_before_training(tmp_path: Path, form: str) -> None:
    on_ranks(tell_before_training, str(tmp_path), form)
