"""Methods beside ``forward``, and modules by themselves, that compute with sharded parameters."""

from __future__ import annotations

import copy
import pickle

import polyshard
import pytest
import torch
from parity import assert_all_close, on_ranks, seeded, sharded_copy, units_of
from polyshard import ShardConfig
from polyshard_backends.threaded import ThreadedWorld
from torch import nn


class Stack(nn.Module):
    """An encoder that is no unit, around blocks that are."""

    def __init__(self, shared: nn.Embedding) -> None:
        super().__init__()
        self.embed_tokens = shared
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.norm = nn.LayerNorm(6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class EncoderDecoder(nn.Module):
    """Generates as T5 does: encodes once, outside of ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(11, 6)
        self.encoder = Stack(self.shared)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, tokens: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
        encoded = self.encoder(tokens) if encoded is None else encoded
        return self.head(encoded + self.shared(tokens))

    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._steps(tokens)

    def _steps(self, tokens: torch.Tensor) -> torch.Tensor:
        encoded = self.encoder(tokens)
        for _ in range(2):
            tokens = self(tokens, encoded).argmax(-1)
        return tokens


TOKENS = torch.arange(6).view(2, 3)
MIXED = "mixed torch.Tensor and DTensor"


def sharded(rank: int, world: ThreadedWorld) -> nn.Module:
    return sharded_copy(seeded(EncoderDecoder), rank, world, policy=units_of(nn.Linear))


def step(model: nn.Module) -> None:
    model(TOKENS).square().mean().backward()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_method_computes_once_it_is_registered(steps: int) -> None:
    expected = seeded(EncoderDecoder).generate(TOKENS)

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model = sharded(rank, world)
        for _ in range(steps):
            step(model)
        with pytest.raises(RuntimeError, match=MIXED):
            model.generate(TOKENS)
        with torch.no_grad():
            model(TOKENS)
        with pytest.raises(RuntimeError, match=MIXED):
            model.generate(TOKENS)
        with pytest.raises(IndexError):
            model(TOKENS + 100)
        with pytest.raises(RuntimeError, match=MIXED):
            model.encoder.norm(torch.ones(2, 6, dtype=torch.float64))
        # The model goes on.
        step(model)
        polyshard.register_forward_method(model, "generate")
        generated: torch.Tensor = model.generate(TOKENS)
        step(model)
        return generated

    for generated in on_ranks(2, on_rank):
        assert torch.equal(generated, expected)


def test_whole_parameters_may_be_computed_with() -> None:
    plain, x = seeded(EncoderDecoder), torch.ones(2, 6, dtype=torch.float64)

    def on_rank(rank: int, world: ThreadedWorld) -> torch.Tensor:
        model = sharded(rank, world)
        with polyshard.unsharded(model):
            computed: torch.Tensor = model.encoder.norm(x)
        return computed

    assert_all_close(on_ranks(2, on_rank), plain.encoder.norm(x))


def test_recomputation_in_backward_is_no_call_at_rest() -> None:
    class Checkpointed(EncoderDecoder):
        def forward(self, tokens: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
            x: torch.Tensor = torch.utils.checkpoint.checkpoint(self._body, self.shared(tokens), use_reentrant=False)
            return x

        def _body(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder.norm(x))

    plain = seeded(Checkpointed)

    def losses(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = []
        for _ in range(3):
            loss = model(TOKENS).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        return found

    def rank(rank: int, world: ThreadedWorld) -> list[torch.Tensor]:
        model = seeded(Checkpointed)
        polyshard.shard(model, ShardConfig(collectives={"name": "threaded", "world": world, "rank": rank}))
        return losses(model)

    expected = losses(plain)
    assert expected[0] > expected[2]
    for found in ThreadedWorld(2).run(rank):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_module_is_copied_and_pickled_without_the_model() -> None:
    x = torch.ones(2, 6, dtype=torch.float64)
    expected = seeded(EncoderDecoder).encoder.norm(x)

    def on_rank(rank: int, world: ThreadedWorld) -> None:
        model = sharded(rank, world)
        with polyshard.unsharded(model):
            copies = [copy.deepcopy(model.encoder.norm), pickle.loads(pickle.dumps(model.encoder.norm))]
        for each in copies:
            assert torch.equal(each(x), expected)
            assert copy.deepcopy(each).weight.shape == (6,)
        copied = copy.deepcopy(model.encoder.norm)
        assert torch.equal(copied.weight.full_tensor(), model.encoder.norm.weight.full_tensor())
        assert copied.weight.to_local().data_ptr() != model.encoder.norm.weight.to_local().data_ptr()

    on_ranks(2, on_rank)
