"""QLoRA: 4-bit layers of bitsandbytes as a sharded base, adapters of PEFT trained over it, by every road."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from parity import on_ranks, threaded, units_of
from polyshard.errors import ConfigError, ParameterError, ParameterMovedError
from polyshard_backends.threaded import ThreadedWorld
from processes import KeptRanks
from qlora import Block, Net, adapted, base, base_bytes, bytes_of, loss_of, on_meta, train
from torch import nn

with warnings.catch_warnings(action="ignore"):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")

#: Bytes of the four 4-bit weights.
PACKED = 4 * 64 * 192 // 2
CLOSE = {"rel": 1e-5, "abs": 1e-5}

RANKS = KeptRanks()


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters() if each.requires_grad}


@pytest.mark.parametrize(("world_size", "storage"), [(2, torch.uint8), (3, torch.bfloat16)], ids=str)
def test_twenty_steps_are_the_unsharded_models(world_size: int, storage: torch.dtype) -> None:
    start = adapted(storage)
    plain = copy.deepcopy(start)
    wanted = train(plain, list(range(world_size)))

    def on_rank(rank: int, world: ThreadedWorld) -> list[float]:
        with world.lock:
            model = copy.deepcopy(start)
        polyshard.shard(model, threaded(world, rank, policy=units_of(Block)))
        losses = train(model, [rank])
        report = polyshard.report(model)
        # Each of two units is cut at a block of 16 bytes or finer.
        assert PACKED / world_size <= report.packed_nbytes <= PACKED / world_size + 2 * 16
        assert 0 < report.beside_nbytes < PACKED / 2
        with polyshard.unsharded(model):
            found, adapters = base_bytes(model), trained(model)
        expected = base_bytes(plain)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        torch.testing.assert_close(adapters, trained(plain), rtol=1e-4, atol=1e-5)
        return [loss for (loss,) in losses]

    for rank, losses in enumerate(on_ranks(world_size, on_rank)):
        assert losses == pytest.approx([step[rank] for step in wanted], **CLOSE)


@pytest.mark.filterwarnings("ignore:Merge lora module to 4-bit")
def test_merged_inside_unsharded_as_on_the_whole_model() -> None:
    start = adapted()
    plain = copy.deepcopy(start)
    plain.merge_adapter()
    wanted = base_bytes(plain)

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = copy.deepcopy(start)
        before = base_bytes(model)
        polyshard.shard(model, threaded(world, rank, policy=units_of(Block)))
        with polyshard.unsharded(model), world.lock:
            model.merge_adapter()
        with polyshard.unsharded(model):
            assert all(torch.equal(each, before[name]) for name, each in base_bytes(model).items())
        for module in model.modules():
            getattr(module, "merged_adapters", []).clear()
        with polyshard.unsharded(model, writeback=True), world.lock:
            model.merge_adapter()
        with polyshard.unsharded(model):
            found = base_bytes(model)
        assert all(torch.equal(found[name], value) for name, value in wanted.items())
        assert loss_of(model, 0, 0).item() == pytest.approx(loss_of(plain, 0, 0).item(), **CLOSE)

    on_ranks(2, on_rank)


def llama(folder: Path, **settings: Any) -> Any:
    """A small Llama, read and quantized by Transformers. ``folder``: holds it in full precision."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32, **settings,
    )  # fmt: skip
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantization)


@pytest.mark.filterwarnings("ignore")
def test_hugging_face_files_are_those_of_save_pretrained(tmp_path: Path) -> None:
    import polyshard_huggingface
    from safetensors.torch import load_file
    from transformers_runs import make_model

    make_model("llama").save_pretrained(tmp_path / "base")
    plain = llama(tmp_path / "base")
    plain.save_pretrained(tmp_path / "plain")
    wanted = load_file(tmp_path / "plain" / "model.safetensors")

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = llama(tmp_path / "base")
        polyshard.shard(model, threaded(world, rank, policy="transformers"))
        with pytest.raises(ConfigError, match=r"save\(\) would cast '.*_proj\.weight' to torch.bfloat16"):
            polyshard_huggingface.save(model, tmp_path / "ours", dtype=torch.bfloat16)
        polyshard_huggingface.save(model, tmp_path / "ours")
        with pytest.raises(ConfigError, match=r"_proj\.weight' is quantized.*from_pretrained"):
            polyshard_huggingface.load(model, tmp_path / "ours")

    on_ranks(2, on_rank)
    found = load_file(tmp_path / "ours" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


# Planning


def test_a_plan_counts_packed_bytes_and_scales() -> None:
    from polyshard_tools.forecast import Batch, Kind, plan

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            settings = peft.LoraConfig(r=4, target_modules=["up", "down"])
            with torch.device("meta"):
                self.model = peft.get_peft_model(on_meta(Net(torch.uint8)), settings)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.model(tokens).sum()

    config = polyshard.ShardConfig(policy=units_of(Block))
    layout = plan(config, Loss(), 8)
    # An adapter's factors, embedding and head in fp32; of each weight a byte for 64 elements, its scales, tables of 16
    # and 256 numbers, and an offset.
    adapters, plain = 4 * 4 * (64 + 192) * 4, 2 * 50 * 64 * 4
    beside = 4 * (64 * 192 // 64 + 4 * (1 + 16 + 256 + 1))
    assert layout.peak[Kind.PARAMETERS] == PACKED / 8 + adapters / 8 + plain / 8 + beside
    tokens = torch.zeros(1, 8, dtype=torch.long, device="meta")
    traced = plan(config, Loss(), 8, batch=lambda count: Batch((tokens.expand(count, 8),), {}))
    assert traced.peak[Kind.PARAMETERS] >= layout.peak[Kind.PARAMETERS]
    # Whole units of packed bytes, not of what they are unpacked to.
    assert traced.most[Kind.GATHERED] == PACKED + adapters + plain


# Wrong use


def not_quantized() -> nn.Module:
    return Block(torch.uint8)


def without_state() -> nn.Module:
    block = base().blocks[0]
    block.up.weight.quant_state = None
    return block


def trained_bytes() -> nn.Module:
    block = base(torch.bfloat16).blocks[0]
    block.up.weight.requires_grad_(True)
    return block


def eight_bits(steps: int) -> nn.Module:
    layer = bitsandbytes.nn.Linear8bitLt(64, 32, bias=False, has_fp16_weights=False).to("cpu")
    model = nn.ModuleDict({"up": layer})
    for _ in range(steps):
        with warnings.catch_warnings(action="ignore"):
            layer(torch.randn(3, 64))
    return model


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (not_quantized, r"'up\.weight' .* a Params4bit, not quantized yet: .*Call model\.to\(device\) before"),
        (without_state, r"'up\.weight' .* a Params4bit, without a quant_state: .*module\.quant_state"),
        (trained_bytes, r"'up\.weight' .* a trained Params4bit with state of its own .*requires_grad_\(False\)"),
        (
            lambda: eight_bits(0),
            r"'up\.weight' .* a Int8Params, with all of its values once more in its attribute 'CB'",
        ),
        (lambda: eight_bits(1), r"'up\.weight' .* a Int8Params, .* once more in 'state' of its Linear8bitLt"),
    ],
)
def test_what_cannot_be_sharded_is_named(make: Any, told: str) -> None:
    model = make()
    config = polyshard.ShardConfig(collectives={"name": "fake", "world_size": 2, "rank": 0})
    before = list(model.parameters())
    with pytest.raises(ParameterError, match=told):
        polyshard.shard(model, config)
    assert all(own is first for own, first in zip(model.parameters(), before, strict=True))


def test_bytes_in_the_order_of_a_processor_are_refused() -> None:
    if not bitsandbytes.functional.has_avx512bf16():
        pytest.skip("bitsandbytes turns bytes around on CPUs with AVX512-BF16 alone")

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        with world.lock:
            model = base()
        polyshard.shard(model, threaded(world, rank, policy=units_of(Block)))
        before = loss_of(model, 0, rank).item()
        model.eval()
        with torch.no_grad(), pytest.raises(ParameterMovedError, match=r"'blocks\.0\.up\.weight'.*_for_cpu = False"):
            loss_of(model, 0, rank)
        for module in model.modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                module.support_avx512bf16_for_cpu = False
        with torch.no_grad():
            assert loss_of(model, 0, rank).item() == before

    on_ranks(2, on_rank)


# Trainers


def of_trainer(rank: int, folder: str, storage: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    from transformers_runs import curve, launched, make_model, parameters, plain_trainer, sharded_trainer

    where = Path(folder, "base")
    if rank == 0:
        make_model("llama").save_pretrained(where)
    torch.distributed.barrier()

    def quantized() -> Any:
        return llama(where, bnb_4bit_quant_storage=storage)

    def given() -> Any:
        torch.manual_seed(1)
        settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(quantized(), settings)

    steps = {"max_steps": 20, "save_strategy": "steps", "save_steps": 20}
    with launched(rank, 2):
        trainer = sharded_trainer(given(), f"{folder}/run", "llama", save_frozen=False, **steps)
        trainer.train()
        report = polyshard.report(trainer.model)
        written = sorted(path.name for path in Path(f"{folder}/run/checkpoint-20").iterdir())
        read = peft.PeftModel.from_pretrained(quantized(), f"{folder}/run/checkpoint-20")
        found = {
            "curve": curve(trainer),
            "packed": report.packed_nbytes,
            "written": written,
            "read": parameters(read),
            "parameters": parameters(trainer.model),
        }
    if rank == 0:
        plain = plain_trainer(given(), f"{folder}/plain", "llama", max_steps=20)
        plain.train()
        found |= {"plain": curve(plain), "base": parameters(plain.model)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["uint8", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_polyshard_trainer_trains_and_saves_adapters(tmp_path: Path, storage: str) -> None:
    results = RANKS.run(2, of_trainer, str(tmp_path), storage)
    plain, base_of = results[0]["plain"], results[0]["base"]
    # Of each of three layers: attention over grouped heads, and the perceptron.
    packed = 3 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 48) // 2
    for found in results:
        assert len(found["curve"]) == 20
        for mine, theirs in zip(found["curve"], plain, strict=True):
            assert mine == pytest.approx(theirs, rel=2e-4, abs=2e-4)
        assert packed / 2 <= found["packed"] <= packed / 2 + 3 * 16
        assert "adapter_model.safetensors" in found["written"]
        assert "model.safetensors" not in found["written"]
        for name, value in found["parameters"].items():
            assert torch.equal(bytes_of(found["read"][name]), bytes_of(value))
            if "lora" not in name:
                assert torch.equal(bytes_of(base_of[name]), bytes_of(value))
