"""Bad input: the right error, before anything is sent, and a model that is as it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import polyshard
import pytest
import torch
from polyshard import ShardConfig, errors
from polyshard.interfaces import PolicyContext, PrecisionPlugin, UnitDtypes, UnitPlan, UnitSpec, WrapPolicy
from polyshard_tools.explaining import explain
from polyshard_tools.forecast import plan
from refusal import Holder, Silent, Subclass, Tower, description, refused, silent
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


@pytest.mark.parametrize(
    "call",
    [
        lambda given: polyshard.shard(given, ShardConfig(collectives="fake")),
        polyshard.report,
        polyshard.unsharded,
        lambda given: next(polyshard.stream(given)),
        lambda given: polyshard.clip_grad_norm_(given, 1.0),
    ],
)
def test_what_is_no_module_is_refused(call: Callable[[Any], object]) -> None:
    with pytest.raises(errors.ConfigTypeError, match=r"'SGD' was given as the model. Give a torch.nn.Module."):
        call(torch.optim.SGD([torch.ones(1)]))


# Parameters.


@dataclass
class Case:
    """A model that cannot be sharded."""

    make: Callable[[], nn.Module]
    error: type[Exception]
    words: tuple[str, ...]
    trains: bool = True


def holding(tensor: torch.Tensor) -> Callable[[], nn.Module]:
    trained = tensor.is_floating_point() and tensor.layout is torch.strided
    return lambda: Tower(Holder(nn.Parameter(tensor.clone(), requires_grad=trained)))


def with_gradient() -> nn.Module:
    model = Tower()
    model.inner.head.weight.grad = torch.ones(4, 4)
    return model


def with_hook() -> nn.Module:
    model = Tower()
    model.inner.head.weight.register_hook(torch.neg)
    return model


class Quantized(nn.Parameter):
    """As packages of quantization have it: a plain tensor within, and beside it what it takes to read that."""

    scales: torch.Tensor


def with_scales() -> nn.Module:
    odd = Quantized(torch.ones(3))
    odd.scales = torch.full((1,), 0.5)
    return Tower(Holder(odd))


ODD = "'inner.head.odd'"
PARAMETERS = {
    "packed and trained": Case(
        holding(torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)),
        errors.ParameterError,
        (ODD, "is trained", "torch.float8_e4m3fn", "Freeze it"),
        trains=False,
    ),
    "sparse": Case(holding(torch.eye(3).to_sparse()), errors.ParameterError, ("torch.sparse_coo", ODD, "dense")),
    "subclass": Case(
        holding(torch.ones(2).as_subclass(Subclass)), errors.ParameterError, ("Subclass", ODD), trains=False
    ),
    "state of its own": Case(
        with_scales, errors.ParameterError, ("Quantized", ODD, "state of its own (scales)", "ignored_parameters")
    ),
    "sparse gradients": Case(
        lambda: Tower(nn.Embedding(3, 4, sparse=True)),
        errors.ParameterError,
        ("'inner.head'", "sparse gradients", "sparse=False"),
        trains=False,
    ),
    "sparse gradients of a bag": Case(
        lambda: Tower(nn.EmbeddingBag(3, 4, sparse=True)),
        errors.ParameterError,
        ("'inner.head'", "sparse gradients"),
        trains=False,
    ),
    "scaled in forward": Case(
        lambda: Tower(nn.Embedding(3, 4, max_norm=1.5)),
        errors.ParameterError,
        ("'inner.head'", "max_norm=1.5 in forward", "Construct it with max_norm=None", "ignore its weight"),
        trains=False,
    ),
    "bag that is scaled in forward": Case(
        lambda: Tower(nn.EmbeddingBag(3, 4, max_norm=1.5)),
        errors.ParameterError,
        ("'inner.head'", "max_norm=1.5 in forward"),
        trains=False,
    ),
    "lazy": Case(
        lambda: Tower(nn.LazyLinear(4)),
        errors.ParameterError,
        ("'inner.head.weight'", "not initialized", "forward"),
        trains=False,
    ),
    "gradient": Case(with_gradient, errors.ParameterError, ("'inner.head.weight'", "gradient", "zero_grad")),
    "hook": Case(
        with_hook, errors.ParameterError, ("'inner.head.weight'", "register_hook", "register_post_accumulate_grad_hook")
    ),
    "no parameter": Case(
        lambda: nn.Sequential(nn.ReLU(), nn.Flatten()),
        errors.EmptyUnitError,
        ("nothing to shard", "Sequential"),
        trains=False,
    ),
}


@pytest.mark.parametrize("case", PARAMETERS.values(), ids=PARAMETERS)
@pytest.mark.parametrize("policy", ["never", "always"])
def test_parameters_that_cannot_be_sharded(case: Case, policy: str) -> None:
    twin = case.make() if case.trains else None
    refused(case.make(), silent(policy=policy), case.error, "rank 2", *case.words, twin=twin)


@pytest.mark.parametrize("case", PARAMETERS.values(), ids=PARAMETERS)
def test_parameters_that_cannot_be_sharded_inside_out(case: Case) -> None:
    twin = case.make() if case.trains else None
    refused(case.make(), silent(), case.error, "rank 2", *case.words, twin=twin, call=polyshard.fully_shard)


def test_what_is_ignored_is_not_refused() -> None:
    model = Tower(Holder(nn.Parameter(torch.tensor([1, 2]), requires_grad=False)))
    polyshard.shard(model, silent()(), ignored_parameters=[model.inner.head.odd])
    for ignored in ("ignored_modules", "ignored_parameters"):
        for settings in ({"sparse": True}, {"max_norm": 1.5}):
            head = nn.Embedding(3, 4, **settings)
            model = Tower(head)
            given = {"ignored_modules": [head]} if ignored == "ignored_modules" else {ignored: [head.weight]}
            polyshard.shard(model, silent()(), **given)
            assert head.weight.shape == (3, 4)


def test_a_model_whose_every_parameter_is_ignored_is_empty() -> None:
    model = Tower()
    refused(model, silent(), errors.EmptyUnitError, "nothing to shard", ignored_modules=[model])


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3, device="meta"))


def test_meta_parameters_that_nobody_initialises() -> None:
    model = nn.Sequential(nn.Linear(2, 2, device="meta"), Bare())
    words = ("1.scale", "Bare", "rank 2", "reset_parameters", "initializer=")
    text = refused(model, silent(device="cpu"), errors.ParameterError, *words)
    assert "Linear" not in text
    assert all(p.is_meta for p in model.parameters())


# What is sharded already.


def test_a_submodule_that_is_sharded_already() -> None:
    model = Tower()
    polyshard.shard(model.inner, silent()())
    before = description(model)
    with pytest.raises(errors.AlreadyShardedError) as caught:
        polyshard.shard(model, silent()())
    assert type(caught.value) is errors.AlreadyShardedError
    assert "can be sharded once, but 'inner' of this Tower is sharded already" in str(caught.value)
    assert "rank 2" in str(caught.value)
    assert description(model) == before


@pytest.mark.parametrize("call", [polyshard.shard, polyshard.fully_shard, polyshard.FullyShardedDataParallel])
def test_a_model_that_is_sharded_already(call: Callable[..., Any]) -> None:
    model = polyshard.shard(Tower(), silent()())
    before = description(model)
    with pytest.raises(errors.AlreadyShardedError, match=r"'\(root\)' of this Tower is sharded already.*rank 2"):
        call(model, silent()())
    assert description(model) == before


def test_a_parameter_that_another_module_has_sharded() -> None:
    model = Tower()
    model.last.weight = nn.Parameter(torch.ones(2, 4))
    model.tied = nn.Linear(4, 2)
    model.tied.weight = model.last.weight
    polyshard.fully_shard(model.tied, silent()())
    before = description(model)
    with pytest.raises(errors.AlreadyShardedError, match=r"'last\.weight'.*shares.*rank 2"):
        polyshard.fully_shard(model, silent()())
    assert description(model) == before


def test_composing_takes_no_policy() -> None:
    words = ("fully_shard", "policy='always'", "Tower", "polyshard.shard")
    refused(Tower(), silent(policy="always"), errors.ConfigError, *words, call=polyshard.fully_shard, twin=Tower())


# Policies.


class Answers(WrapPolicy):
    """Answers what it is told to."""

    def __init__(self, answer: Callable[[nn.Module], Any]) -> None:
        self._answer = answer

    def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
        answer: UnitPlan = self._answer(root)
        return answer


def fails(root: nn.Module) -> NoReturn:
    raise ZeroDivisionError("in the user's own code")


POLICIES: dict[str, tuple[Callable[[Any], Any], type[Exception], tuple[str, ...]]] = {
    "list": (lambda root: [root.first], errors.PluginContractError, ("an instance of list", "Return a mapping")),
    "none": (lambda root: None, errors.PluginContractError, ("returned None", "Return a mapping")),
    "names": (lambda root: {"first": {}}, errors.PluginContractError, ("'first': an instance of dict", "mapping")),
    "no overrides": (lambda root: {root.first: None}, errors.PluginContractError, (": None", "mapping of modules")),
    "foreign": (lambda root: {nn.Linear(2, 2): {}}, errors.PluginContractError, ("Linear", "not inside the model")),
    "unknown override": (
        lambda root: {root.inner.head: {"reshard": True}},
        errors.ConfigError,
        ("reshard", "'inner.head'", "reshard_after_forward"),
    ),
    "wrong override": (
        lambda root: {root.inner.head: {"reshard_after_forward": "yes"}},
        errors.ConfigError,
        ("reshard_after_forward", "'inner.head'", "'yes'"),
    ),
    "raises": (
        fails,
        errors.PluginContractError,
        ("plan() of plugin 'Answers' of polyshard.policies failed", "ZeroDivisionError: in the user's own code"),
    ),
}


@pytest.mark.parametrize(("answer", "error", "words"), POLICIES.values(), ids=POLICIES)
def test_policies_that_answer_something_else(
    answer: Callable[[Any], Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    refused(Tower(), silent(policy=Answers(answer)), error, "rank 2", *words, twin=Tower())


def test_a_policy_whose_overrides_name_no_plugin() -> None:
    policy = Answers(lambda root: {root.first: {"precision": "bf61"}})
    words = ("'bf61'", "polyshard.precision", "'bf16'")
    refused(Tower(), silent(policy=policy), errors.PluginNotFoundError, *words, twin=Tower())


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (lambda root: root.__delattr__("inner"), "'inner'"),
        (lambda root: root.register_parameter("more", nn.Parameter(torch.ones(2))), "'more'"),
        (lambda root: root.register_buffer("mask", torch.ones(2)), "'mask'"),
    ],
)
def test_a_policy_that_changes_the_model(change: Callable[[nn.Module], Any], changed: str) -> None:
    def plans(root: nn.Module) -> dict[nn.Module, dict[str, Any]]:
        change(root)
        return {}

    with pytest.raises(errors.PluginContractError, match=rf"'Answers' .* changed the model \(rank 2\): {changed}"):
        polyshard.shard(Tower(), silent(policy=Answers(plans))())


def test_a_listener_that_changes_the_model() -> None:
    class Widens:
        @polyshard.hookimpl
        def before_shard(self, model: nn.Module) -> None:
            model.wide = nn.Linear(2, 2)

    with pytest.raises(errors.PluginContractError, match=r"before_shard of a listener changed the model .*'wide'"):
        polyshard.shard(Tower(), silent(listeners=[Widens()])())


def test_what_else_a_plugin_raises_stays_what_it_is_with_a_note_of_the_plugin() -> None:
    class Stops:
        @polyshard.hookimpl
        def step_end(self) -> None:
            raise ZeroDivisionError("no step more")

    class Doubts(PrecisionPlugin):
        def dtypes(self, unit: UnitSpec) -> UnitDtypes:
            raise ZeroDivisionError(unit.label)

    fake = {"name": "fake", "world_size": 2}
    model = polyshard.shard(Tower(), ShardConfig(collectives=fake, listeners=[Stops()]))
    with pytest.raises(ZeroDivisionError, match="no step more") as caught:
        model(torch.ones(2, 3)).sum().backward()
    assert caught.value.__notes__ == ["Raised in the hook step_end of listener 'Stops'."]
    with pytest.raises(ZeroDivisionError) as caught:
        polyshard.shard(Tower(), ShardConfig(collectives=fake, precision=Doubts()))
    (note,) = caught.value.__notes__
    assert note.startswith("Raised in dtypes() of the plugin ")
    # Ranks that wait are told of it, too.
    assert errors.words(caught.value).endswith(f": (root) {note}")


# Arguments of other types than those asked for.


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        ({"strategy": "no_shard"}, r"not {'strategy': 'no_shard'}\. Write ShardConfig\.from_mapping\({'strategy': "),
        ("run.toml", r"not 'run\.toml'\. Write ShardConfig\.from_toml\('run\.toml'\)\.$"),
        (Path("run.toml"), r"Write ShardConfig\.from_toml\('run\.toml'\)\.$"),
        ("no_shard", r"Write ShardConfig\(strategy='no_shard'\)\.$"),
        (ShardConfig, r"Write ShardConfig\(\), with the settings in it\.$"),
        (nn.Linear(2, 2), "takes a ShardConfig, not a Linear"),
    ],
)
def test_a_configuration_that_is_none(config: Any, remedy: str) -> None:
    for call in (polyshard.shard, polyshard.fully_shard, polyshard.FullyShardedDataParallel):
        with pytest.raises(errors.ConfigTypeError, match=remedy):
            call(Tower(), config)
    for look in (explain, plan):
        with pytest.raises(errors.ConfigTypeError, match=remedy):
            look(config, Tower(), 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ignored_modules": nn.Linear(2, 2)}, "ignored_modules is a Linear, no collection"),
        ({"ignored_modules": nn.Linear(2, 2).modules()}, "ignored_modules is a generator, no collection"),
        ({"ignored_modules": ["inner"]}, r"ignored_modules has 'inner', which is no Module.* model\.get_submodule\("),
        ({"ignored_parameters": ["weight"]}, r"ignored_parameters has 'weight', which .* model\.get_parameter\("),
        ({"ignored_parameters": nn.Parameter(torch.ones(2))}, "ignored_parameters is a Parameter, no collection"),
        ({"initializer": "normal"}, "initializer is 'normal', which cannot be called"),
    ],
)
def test_arguments_beside_the_configuration(arguments: dict[str, Any], words: str) -> None:
    model = Tower()
    with pytest.raises(errors.ConfigTypeError, match=words):
        polyshard.shard(model, silent()(), **arguments)
    polyshard.shard(model, silent()())


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        (
            {"precision": torch.bfloat16},
            errors.PluginContractError,
            r"torch:dtype is no plugin .* Did you mean 'bf16'\?",
        ),
        (
            {"policy": nn.Linear},
            errors.ConfigError,
            "no function of a module: it is a class. For a unit of each module",
        ),
        ({"policy": Answers}, errors.PluginContractError, "Answers is the class: pass an instance"),
        ({"policy": ModuleWrapPolicy([nn.Linear])}, errors.ConfigError, "missing a required argument: 'recurse'"),
    ],
)
def test_what_another_library_takes(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        polyshard.shard(Tower(), ShardConfig(collectives={"name": "fake", "world_size": 2}, **settings))


# Ranks and devices.


def test_a_device_that_is_not_there() -> None:
    for device in ("cuda", "cuda:0", "mps") if not torch.accelerator.is_available() else ("mps",):
        with pytest.raises(errors.DeviceError, match=rf"'{device}', but torch .* sees no .* devices here\. Set a"):
            polyshard.shard(Tower(), ShardConfig(collectives={"name": "fake", "world_size": 2}, device=device))


@pytest.mark.parametrize(
    ("limits", "words"),
    [({"min_world_size": 8}, ("8 to any number of ranks",)), ({"max_world_size": 2}, ("1 to 2 ranks",))],
)
def test_a_world_size_that_the_backend_cannot_serve(limits: Mapping[str, int], words: tuple[str, ...]) -> None:
    collectives = Silent(**limits)
    words = ("'Silent'", "there are 4", "rank 2", *words)
    refused(Tower(), lambda: ShardConfig(collectives=collectives), errors.WorldSizeError, *words, twin=Tower())


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
def test_shard_groups_that_do_not_divide_the_ranks(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("4 ranks", "groups of 3", "shard_size")
    refused(Tower(), silent(strategy=strategy, shard_size=3), errors.WorldSizeError, *words, twin=Tower())
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    refused(Tower(), silent(strategy=strategy), errors.WorldSizeError, "4 ranks", "groups of 8", twin=Tower())
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    refused(
        Tower(),
        silent(strategy=strategy),
        errors.ConfigError,
        strategy,
        "shard_size=",
        "LOCAL_WORLD_SIZE",
        twin=Tower(),
    )


def test_collectives_that_serve_another_device() -> None:
    collectives = Silent(devices=frozenset({"cuda"}))
    words = ("'Silent'", "cuda", "computes on cpu", "rank 2")
    refused(Tower(), lambda: ShardConfig(collectives=collectives), errors.DeviceError, *words, twin=Tower())
    refused(Tower(), lambda: ShardConfig(collectives="nccl"), errors.DeviceError, "'nccl'", "cuda", "cpu", twin=Tower())


def test_without_a_launcher_it_says_what_to_do() -> None:
    words = ("no process group", "torchrun", 'collectives="fake"')
    refused(Tower(), lambda: ShardConfig(), errors.StateError, *words, twin=Tower())
