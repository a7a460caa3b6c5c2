"""The conformance suite for wrap policies."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch

from polyshard.interfaces import UNIT_OVERRIDES, PolicyContext, WrapPolicy


class _Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )
        self.dropout = torch.nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.dropout(self.mlp(self.norm(x)))
        return y


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 8)
        self.layers = torch.nn.ModuleList([_Block(8), _Block(8)])
        # A module that is reached by two names, as in models that apply one block twice.
        self.layers.append(self.layers[0])
        self.head = torch.nn.Linear(8, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def _chosen(policy: WrapPolicy, root: torch.nn.Module, context: PolicyContext) -> dict[str, dict[str, object]]:
    plan = policy.plan(root, context)
    names = {module: name for name, module in root.named_modules()}
    return {names[module]: dict(overrides) for module, overrides in plan.items()}


class PolicySuite:
    """Subclass it, name the class ``Test…``, and override ``make``; override ``model`` for a policy of its own kind."""

    def make(self) -> WrapPolicy:
        """A newly constructed policy."""
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def model(self) -> torch.nn.Module:
        """A newly built model, the same each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _Model()

    def test_plan_names_modules_of_the_model(self) -> None:
        root = self.model()
        plan = self.make().plan(root, PolicyContext())
        assert isinstance(plan, Mapping)
        inside = set(root.modules())
        for module, overrides in plan.items():
            assert module in inside
            assert isinstance(overrides, Mapping)
            assert set(overrides) <= set(UNIT_OVERRIDES)

    def test_model_is_left_as_it_was(self) -> None:
        root = self.model()
        before = copy.deepcopy(root.state_dict())
        modules = list(root.named_modules(remove_duplicate=False))
        parameters = list(root.named_parameters(remove_duplicate=False))
        root.train()
        self.make().plan(root, PolicyContext())
        for (name, module), (old_name, old) in zip(root.named_modules(remove_duplicate=False), modules, strict=True):
            assert name == old_name
            assert module is old
            assert module.training
        after = list(root.named_parameters(remove_duplicate=False))
        for (name, parameter), (old_name, old_parameter) in zip(after, parameters, strict=True):
            assert name == old_name
            assert parameter is old_parameter
        for name, value in root.state_dict().items():
            assert torch.equal(value, before[name])

    def test_every_rank_gets_the_same_answer(self) -> None:
        first = _chosen(self.make(), self.model(), PolicyContext())
        second = _chosen(self.make(), self.model(), PolicyContext())
        assert list(first.items()) == list(second.items())

    def test_asking_again_gives_the_same_answer(self) -> None:
        policy, root = self.make(), self.model()
        first = _chosen(policy, root, PolicyContext())
        assert _chosen(policy, root, PolicyContext()) == first

    def test_ignored_modules_are_not_chosen(self) -> None:
        policy, root = self.make(), self.model()
        for ignored in self.make().plan(root, PolicyContext()):
            if ignored is root:
                continue
            context = PolicyContext(ignored_modules=frozenset({ignored}))
            assert set(policy.plan(root, context)).isdisjoint(ignored.modules())

    def test_model_without_submodules(self) -> None:
        root = torch.nn.Linear(3, 3)
        assert set(self.make().plan(root, PolicyContext())) <= {root}
