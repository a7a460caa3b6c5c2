"""The conformance suite for wrap policies."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from polyshard import registry
from polyshard.errors import ConfigError
from polyshard.interfaces import UNIT_OVERRIDES, Group, PolicyContext, WrapPolicy
from typing_extensions import override

from .plugin import LocalPluginSuite, ModuleState, as_rank
from .training import Training, seeded, tokens

#: Where a plan may name another plugin.
_GROUPS = {"precision": Group.PRECISION, "offload": Group.OFFLOAD}


class _Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        # It computes with its ``out_proj`` and never calls it.
        self.attention = torch.nn.MultiheadAttention(width, 2)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )
        self.dropout = torch.nn.Dropout(0.1)

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        # Of one token each: samples are on different ranks.
        one = x.unsqueeze(0)
        attended, _ = self.attention(one, one, one, need_weights=False)
        y: torch.Tensor = x + attended.squeeze(0) + self.dropout(self.mlp(x))
        return y


class _Model(torch.nn.Module):
    #: As models of the package transformers name their blocks.
    _no_split_modules = ("_Block",)

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 8)
        self.layers = torch.nn.ModuleList([_Block(8), _Block(8)])
        # A module that is reached by two names, as in models that apply one block twice.
        self.layers.append(self.layers[0])
        self.head = torch.nn.Linear(8, 32)

    @override
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def _chosen(policy: WrapPolicy, root: torch.nn.Module, context: PolicyContext) -> list[tuple[str, dict[str, Any]]]:
    plan = policy.plan(root, context)
    names = {module: name for name, module in root.named_modules()}
    return [(names[module], dict(overrides)) for module, overrides in plan.items()]


class PolicySuite(LocalPluginSuite):
    """Subclass it, name the class ``Test…``, and override ``make``.

    Override ``model``, and ``batch`` with it, for a policy of certain models; override ``device`` to test on another.
    Every rule of ``polyshard.interfaces.WrapPolicy``; then a few steps of the model in the units that the policy chose,
    over two ranks, compared with the same steps of the unsharded model.
    """

    group = Group.POLICIES

    training_tolerance: float = 1e-4
    """Largest difference from the unsharded model's parameters after three steps, as a share of the largest change. A
    policy that overrides precision needs a larger one."""

    @override
    def make(self) -> WrapPolicy:
        """A newly constructed policy."""
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def model(self) -> torch.nn.Module:
        """A newly built model, the same each time: random numbers are seeded around it."""
        return _Model()

    def batch(self) -> torch.Tensor | None:
        """The input of the model's ``forward``: an even number of samples. It returns a tensor, samples first.

        None, the default of a ``model`` that was overridden alone, leaves out the tests that call it.
        """
        return tokens(among=32) if isinstance(self._root(), _Model) else None

    def _root(self) -> torch.nn.Module:
        return seeded(self.model, self.device)

    def _called(self) -> torch.Tensor:
        """A batch; without one the test is skipped."""
        batch = self.batch()
        if batch is None:
            pytest.skip("nothing to call the model with: override batch() beside model()")
        return batch

    def _contexts(self) -> list[PolicyContext]:
        return [PolicyContext(shards=shards, device=self.device) for shards in (1, 2, 4096)]

    def test_plan_names_modules_of_the_model(self) -> None:
        root = self._root()
        inside = set(root.modules())
        for context in self._contexts():
            plan: object = self.make().plan(root, context)
            assert isinstance(plan, Mapping), f"plan is {plan!r}"
            outside = [type(module).__name__ for module in plan if module not in inside]
            assert not outside, f"of other models: {outside}"

    def test_overrides_are_settings_that_a_unit_has(self) -> None:
        root = self._root()
        for context in self._contexts():
            for overrides in self.make().plan(root, context).values():
                assert isinstance(overrides, Mapping), f"overrides are {overrides!r}"
                assert set(overrides) <= set(UNIT_OVERRIDES), f"{sorted(set(overrides) - set(UNIT_OVERRIDES))}"
                assert isinstance(overrides.get("reshard_after_forward"), int | None)
                assert isinstance(overrides.get("placement"), int | Mapping | None)
                for setting, group in _GROUPS.items():
                    if setting in overrides:
                        registry.resolve(group, overrides[setting]).check_options()

    def test_model_is_left_as_it_was(self) -> None:
        root = self._root()
        before = ModuleState.of(root)
        random_state = torch.get_rng_state()
        self.make().plan(root, PolicyContext(device=self.device))
        before.check(root)
        assert torch.equal(torch.get_rng_state(), random_state), "random numbers were drawn"

    def test_every_rank_gets_the_same_answer(self) -> None:
        with as_rank(0):
            first = _chosen(self.make(), self._root(), PolicyContext(shards=2, device=self.device))
        with as_rank(1):
            second = _chosen(self.make(), self._root(), PolicyContext(shards=2, device=self.device))
        assert first == second

    def test_asking_again_gives_the_same_answer(self) -> None:
        policy, root, context = self.make(), self._root(), PolicyContext(device=self.device)
        first = _chosen(policy, root, context)
        with _may_find_nothing():
            policy.plan(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)), context)
        assert _chosen(policy, root, context) == first

    def test_ignored_modules_are_not_chosen(self) -> None:
        policy, root = self.make(), self._root()
        for ignored in self.make().plan(root, PolicyContext(device=self.device)):
            if ignored is root:
                continue
            context = PolicyContext(ignored_modules=frozenset({ignored}), device=self.device)
            inside = set(policy.plan(root, context)) & set(ignored.modules())
            assert not inside, f"{[type(module).__name__ for module in inside]} inside of an ignored module"

    def test_ignored_parameters_do_not_count(self) -> None:
        root = self._root()
        expected = _chosen(self.make(), root, PolicyContext(device=self.device))
        ignored = torch.nn.Parameter(torch.zeros(100_000, device=self.device))
        for module in list(root.modules()):
            module.register_parameter("of_the_test", ignored)
        context = PolicyContext(ignored_parameters=frozenset({ignored}), device=self.device)
        assert _chosen(self.make(), root, context) == expected, "sizes count parameters that are not sharded"

    def test_models_on_the_meta_device_get_the_same_answer(self) -> None:
        # Parameters get their memory after the plan, where a model is too large for one rank.
        root, context = self._root(), PolicyContext(device=self.device)
        assert _chosen(self.make(), copy.deepcopy(root).to("meta"), context) == _chosen(self.make(), root, context)

    def test_model_without_submodules(self) -> None:
        root = torch.nn.Linear(3, 3, device=self.device)
        with _may_find_nothing():
            assert set(self.make().plan(root, PolicyContext(device=self.device))) <= {root}

    def test_reasons_are_text(self) -> None:
        policy, root = self.make(), self._root()
        names = {module: name for name, module in root.named_modules()}
        for module in policy.plan(root, PolicyContext(device=self.device)):
            reason: object = policy.reason(module, names[module])
            assert isinstance(reason, str), f"reason for {names[module]!r} is {reason!r}"

    def test_training_is_that_of_the_unsharded_model(self) -> None:
        training = Training(self.model, self._called, self.device, learning_rate=0.1, eval_mode=True)
        root, batch = self._root(), self._called().to(self.device)
        uncalled = {name for name, _ in _chosen(self.make(), root, PolicyContext(shards=2, device=self.device))}
        for name, module in root.named_modules():
            module.register_forward_pre_hook(lambda module, inputs, name=name: uncalled.discard(name))
        root(batch)
        assert not uncalled, f"only a call gathers, and the model never calls {sorted(uncalled)}"
        sharded = training.sharded(lambda: {"policy": self.make()})
        sharded.check(training.reference(), self.training_tolerance)


@contextmanager
def _may_find_nothing() -> Iterator[None]:
    """A policy may say that there is nothing for it in a model, by a warning or as the user's mistake."""
    with warnings.catch_warnings(), suppress(ConfigError):
        warnings.simplefilter("ignore")
        yield
