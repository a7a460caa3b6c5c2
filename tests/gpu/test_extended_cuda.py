"""Tensor subclasses that gather themselves over NCCL; the CPU twins are ``test_extended.py`` and others."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path

import polyshard
import pytest
import torch
from extended_models import IN, Layer, Net, Reference
from parity import seed_all, units_of
from processes import KeptRanks, device_of, gpu_ranks, settle_on_device
from qlora import Block, adapted, base_bytes, train
from torchao_tensors import trains_and_is_saved

pytestmark = pytest.mark.gpu

WORLD_SIZE = gpu_ranks()

RANKS = KeptRanks("nccl")

run = partial(RANKS.run, WORLD_SIZE)


def batch(step: int, rank: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, IN, dtype=torch.float64, generator=generator).to(device)


def trained(rank: int) -> float:
    """How far losses of three steps are off those of the unsharded model."""
    warnings.simplefilter("ignore")
    device = device_of(rank)
    seed_all(0)
    model = Net()
    alone = Reference(copy.deepcopy(model)).to(device)
    alone.decoded = alone.decoded.to(device)
    # From the host: the cut brings it to the device.
    polyshard.shard(model, polyshard.ShardConfig(collectives="nccl", policy=units_of(Layer), device=device))
    assert all(each.is_cuda for each in model.parameters())
    of_all, own = (
        torch.optim.AdamW([each for each in net.parameters() if each.requires_grad], lr=1e-2) for net in (alone, model)
    )
    off = 0.0
    for step in range(3):
        losses = [alone(batch(step, each, device)).square().mean() for each in range(WORLD_SIZE)]
        torch.stack(losses).mean().backward()
        loss = model(batch(step, rank, device)).square().mean()
        loss.backward()
        off = max(off, abs(loss.item() - losses[rank].item()))
        for optimizer in (of_all, own):
            optimizer.step()
            optimizer.zero_grad()
    polyshard.close(model)
    return off


def test_trains_as_the_unsharded_model() -> None:
    assert all(off < 1e-12 for off in run(trained))


def of_torchao(rank: int, kind: str, folder: str) -> tuple[list[float], list[float]]:
    device = settle_on_device(rank)
    return trains_and_is_saved(rank, kind, WORLD_SIZE, device, folder)[:2]


@pytest.mark.parametrize("kind", ["float8", "nf4"])
def test_torchaos_classes_train_and_are_saved(kind: str, tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):
        pytest.importorskip("torchao")
    for found, wanted in run(of_torchao, kind, str(tmp_path)):
        assert found == pytest.approx(wanted, rel=2e-2)


with warnings.catch_warnings(action="ignore"):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")


#: Bytes of the four 4-bit weights.
PACKED = 4 * 64 * 192 // 2


def quiet() -> None:
    # Of bitsandbytes and PEFT about each other, and of one GPU being a world of one.
    warnings.simplefilter("ignore")


def of_twenty_steps(rank: int, storage: torch.dtype, begins: str) -> tuple[list[float], list[float], bool, int]:
    """Losses, those of the unsharded model, whether the base stayed the same to the bit, and bytes of this rank."""
    quiet()
    device = device_of(rank)
    plain = adapted(storage, device)
    wanted = [step[rank] for step in train(plain, list(range(WORLD_SIZE)), device=device)]
    # Quantized on the host, what its bytes mean moves to the device with them.
    model = adapted(storage, device if begins == "device" else "cpu")
    if begins == "host":
        for module in model.modules():
            if hasattr(module, "quant_state"):
                assert module.weight.quant_state.absmax.device.type == "cpu"
    before = base_bytes(model)
    polyshard.shard(model, polyshard.ShardConfig(collectives="nccl", policy=units_of(Block), device=device))
    losses = [loss for (loss,) in train(model, [rank], device=device)]
    packed = polyshard.report(model).packed_nbytes
    with polyshard.unsharded(model):
        found = base_bytes(model)
    same = all(torch.equal(found[name], value) for name, value in before.items())
    polyshard.close(model)
    return losses, wanted, same, packed


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16], ids=str)
def test_twenty_steps_are_the_unsharded_models(storage: torch.dtype) -> None:
    for losses, wanted, same, packed in run(of_twenty_steps, storage, "device"):
        assert losses == pytest.approx(wanted, rel=1e-4, abs=1e-4)
        assert same
        assert packed <= PACKED / WORLD_SIZE + 2 * 16


def test_what_was_quantized_on_the_host_computes_on_the_device() -> None:
    # Either quantises, and nearly alike.
    for losses, wanted, same, _ in run(of_twenty_steps, torch.uint8, "host"):
        assert losses == pytest.approx(wanted, rel=5e-2)
        assert same
