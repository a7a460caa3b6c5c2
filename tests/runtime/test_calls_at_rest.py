"""Methods beside ``forward`` that compute with sharded parameters say what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import polyshard
import pytest
import torch
from parity import seeded
from polyshard import ShardConfig
from polyshard.errors import UnshardedUseError
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


def sharded(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    collectives = {"name": "fake", "world_size": 4}
    policy = {"name": "module_class", "classes": nn.Linear}
    return polyshard.shard(EncoderDecoder(), ShardConfig(collectives=collectives, policy=policy, **settings))


def step(model: nn.Module) -> None:
    model(TOKENS).square().mean().backward()


@pytest.mark.parametrize("steps", [0, 2])
def test_generate_is_told_what_to_do(steps: int) -> None:
    model = sharded()
    for _ in range(steps):
        step(model)
    with pytest.raises(UnshardedUseError, match=r"rank 0") as caught:
        model.generate(TOKENS)
    text = str(caught.value)
    assert "(Embedding) was called by EncoderDecoder.generate outside of the model's forward" in text
    assert 'polyshard.register_forward_method(model, "generate")' in text
    # The model goes on, and the advice is right.
    step(model)
    polyshard.register_forward_method(model, "generate")
    assert model.generate(TOKENS).shape == TOKENS.shape
    step(model)


def test_a_module_that_is_called_by_itself() -> None:
    model = sharded()
    with pytest.raises(UnshardedUseError, match=r"'encoder\.norm' \(LayerNorm\) was called outside of .* its weight"):
        model.encoder.norm(torch.ones(2, 6))


def test_behind_a_forward_without_a_backward_and_one_that_raised() -> None:
    model = sharded()
    with torch.no_grad():
        model(TOKENS)
    with pytest.raises(UnshardedUseError, match="generate"):
        model.generate(TOKENS)
    with pytest.raises(IndexError):
        model(TOKENS + 100)
    with pytest.raises(UnshardedUseError, match="generate"):
        model.generate(TOKENS)


def test_whole_parameters_may_be_computed_with() -> None:
    model = sharded()
    with polyshard.unsharded(model):
        assert model.encoder.norm(torch.ones(2, 6)).shape == (2, 6)
    whole = sharded(strategy="no_shard")
    assert whole.encoder.norm(torch.ones(2, 6)).shape == (2, 6)


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


def test_composed_modules_refuse_for_the_new_root_alone() -> None:
    torch.manual_seed(0)
    model = EncoderDecoder()
    config = ShardConfig(collectives={"name": "fake", "world_size": 4})
    polyshard.fully_shard(model.encoder, config, ignored_modules=[model.shared])
    with pytest.raises(UnshardedUseError, match=r"'norm'.*generate"):
        model.encoder.norm(torch.ones(2, 6))
    polyshard.fully_shard(model, config)
    step(model)
    assert not model.encoder.norm._forward_pre_hooks
    with pytest.raises(UnshardedUseError, match=r"'shared' \(Embedding\)"):
        model.shared(TOKENS)


def test_a_whole_module_is_copied_and_pickled_without_the_model() -> None:
    model = sharded()
    with polyshard.unsharded(model):
        copies = [copy.deepcopy(model.encoder.norm), pickle.loads(pickle.dumps(model.encoder.norm))]
        expected = model.encoder.norm(torch.ones(2, 6))
    for each in copies:
        assert torch.equal(each(torch.ones(2, 6)), expected)
        assert copy.deepcopy(each).weight.shape == (6,)


def train(model: nn.Module) -> torch.Tensor:
    """Named as a method of every module is."""
    encoded: torch.Tensor = model.encoder(TOKENS)
    return encoded


def test_a_function_that_is_given_the_model_is_no_method() -> None:
    model = sharded()
    with pytest.raises(UnshardedUseError) as caught:
        train(model)
    text = str(caught.value)
    assert "(Embedding) was called outside of" in text
    assert 'register_forward_method(model, "generate")' in text


class Trained(EncoderDecoder):
    """Has methods of all kinds that call the encoder."""

    def fit(self, steps: int) -> None:
        for _ in range(steps):
            self.training_step().backward()

    def training_step(self) -> torch.Tensor:
        return self._loss()

    def _loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.encoder(TOKENS).square().mean()
        return loss

    def whole_step(self) -> None:
        self._loss().backward()

    def bare_step(self) -> None:
        self.encoder(TOKENS).square().mean().backward()

    @torch.no_grad()
    def decorated(self) -> torch.Tensor:
        return self._loss()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda model: model.fit(2), "training_step"),
        (lambda model: model.whole_step(), "_loss"),
        (lambda model: model.bare_step(), "bare_step"),
        (lambda model: model.decorated(), "decorated"),
    ],
)
def test_a_loop_over_steps_is_not_to_be_one_forward(call: Callable[[nn.Module], None], named: str) -> None:
    torch.manual_seed(0)
    model = polyshard.shard(Trained(), ShardConfig(collectives={"name": "fake", "world_size": 4}))
    with pytest.raises(UnshardedUseError) as caught:
        call(model)
    assert f'register_forward_method(model, "{named}")' in str(caught.value)
    polyshard.register_forward_method(model, named)
    call(model)
