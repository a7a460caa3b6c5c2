"""Wrap policies: which modules of a model become units."""

from __future__ import annotations

import sys
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
from fake_distribution import install
from polyshard import ShardConfig, registry
from polyshard.errors import ConfigError, PluginContractError, PluginNotFoundError
from polyshard.interfaces import Group, PluginContext, PolicyContext, UnitPlan, WrapPolicy
from polyshard_policies.combined import Or, as_policy
from polyshard_policies.functions import Custom, Lambda, Size
from polyshard_policies.module_class import Always, ModuleClass, Never, NoSplitModules, Transformer
from polyshard_testing import plugin_context
from torch import nn
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    always_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)

CONTEXT = PluginContext(name="under test", device=torch.device("cpu"))
EVERYTHING = PolicyContext()


def names(policy: WrapPolicy, root: nn.Module, context: PolicyContext = EVERYTHING) -> list[str]:
    """Fully-qualified names of the chosen modules, in the order of the plan."""
    by_module = {module: name for name, module in root.named_modules()}
    return [by_module[module] for module in policy.plan(root, context)]


def nested_linears() -> nn.Sequential:
    """Linears of 30 elements each: two, and a pair in a Sequential."""
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))


def transformer() -> nn.Transformer:
    return nn.Transformer(
        d_model=4, nhead=2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=4, batch_first=True
    )


LAYERS = ["decoder.layers.0", "decoder.layers.1", "encoder.layers.0", "encoder.layers.1"]


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10, bias=False)
        self.bn1 = nn.BatchNorm1d(10)
        self.bn2 = nn.BatchNorm2d(10)


# always, never


def test_always_chooses_every_called_module_with_parameters() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ModuleList([nn.Sequential(nn.Linear(2, 2))]))
    root.register_module("scales", nn.ParameterList([nn.Parameter(torch.ones(2))]))
    assert names(Always(CONTEXT), root) == ["0", "2.0", "2.0.0"]


def test_always_passes_over_modules_whose_parameters_are_all_ignored() -> None:
    root = nested_linears()
    ignored = PolicyContext(ignored_parameters=set(root[0].parameters()) | {root[1].bias})
    assert names(Always(CONTEXT), root, ignored) == ["1", "2", "2.0", "2.1"]


def test_never_chooses_nothing() -> None:
    assert names(Never(CONTEXT), nested_linears()) == []


# module_class, transformer


@pytest.mark.parametrize(
    "classes",
    [
        (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
        {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer},
        ["torch.nn:TransformerEncoderLayer", "torch.nn.modules.transformer:TransformerDecoderLayer"],
    ],
    ids=["tuple", "set", "references"],
)
@pytest.mark.parametrize("policy", ["module_class", "transformer"])
def test_classes_choose_exactly_their_instances(policy: str, classes: Any) -> None:
    chosen = ModuleClass(CONTEXT, classes=classes) if policy == "module_class" else Transformer(CONTEXT, layers=classes)
    assert sorted(names(chosen, transformer())) == LAYERS


def test_one_class_may_be_given_alone_and_stands_for_its_subclasses() -> None:
    root = Norms()
    assert names(ModuleClass(CONTEXT, nn.modules.batchnorm._BatchNorm), root) == ["bn1", "bn2"]
    assert names(ModuleClass(CONTEXT, "torch.nn.modules.batchnorm:_BatchNorm"), root) == ["bn1", "bn2"]


def test_a_shared_module_is_chosen_once_and_the_root_never() -> None:
    shared = nn.Linear(2, 2)
    root = nn.Sequential(shared, nn.Sequential(shared), nn.Linear(2, 2))
    assert names(ModuleClass(CONTEXT, nn.Linear), root) == ["0", "2"]
    assert names(ModuleClass(CONTEXT, nn.Sequential), root) == ["1"]


# size


@pytest.mark.parametrize(
    ("minimum", "expected"),
    [(0, ["0", "1", "2", "2.0", "2.1"]), (30, ["0", "1", "2.0", "2.1"]), (31, ["2"]), (60, ["2"]), (61, [])],
)
def test_size_chooses_from_the_leaves_up(minimum: int, expected: list[str]) -> None:
    assert names(Size(CONTEXT, min_num_params=minimum), nested_linears()) == expected


def test_size_passes_over_containers_but_not_over_what_is_in_them() -> None:
    small = nn.Sequential(nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)]))
    assert names(Size(CONTEXT, min_num_params=40), small) == []
    large = nn.Sequential(nn.ModuleList([nn.Linear(10, 10)]))
    assert names(Size(CONTEXT, min_num_params=40), large) == ["0.0"]
    assert names(Size(CONTEXT, min_num_params=40, exclude="torch.nn:Linear"), large) == ["0"]


def test_size_keeps_forced_leaves_in_one_piece() -> None:
    root = nn.Sequential(nn.Linear(10, 10), nn.MultiheadAttention(100, 1))
    assert names(Size(CONTEXT, min_num_params=40), root) == ["0"]
    assert names(Size(CONTEXT, min_num_params=40, force_leaf=()), root) == ["0", "1", "1.out_proj"]
    custom = nn.Sequential(nn.Linear(10, 10), nn.ModuleList([nn.Linear(10, 10)]))
    policy = Size(CONTEXT, min_num_params=40, force_leaf=(nn.MultiheadAttention, nn.Linear))
    assert names(policy, custom) == []


def test_size_does_not_count_what_is_ignored() -> None:
    root = nested_linears()
    policy = Size(CONTEXT, min_num_params=40)
    assert names(policy, root, PolicyContext(ignored_modules={root[1], root[2][0]})) == []
    assert names(policy, root, PolicyContext(ignored_parameters={root[2][0].weight})) == []
    assert names(policy, root, PolicyContext(ignored_parameters={root[2][0].bias})) == ["2"]


def test_size_counts_a_shared_parameter_where_it_comes_first() -> None:
    tied = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    tied[1].weight = tied[0].weight
    assert names(Size(CONTEXT, min_num_params=30), tied) == ["0"]
    assert names(Size(CONTEXT, min_num_params=5), tied) == ["0", "1"]


@pytest.mark.parametrize("value", [-1, 1e8, "40", True])
def test_size_takes_a_number_of_elements_alone(value: Any) -> None:
    with pytest.raises(ConfigError, match="Give a number of elements, 0 or more"):
        Size(CONTEXT, min_num_params=value)


# lambda, custom


def test_lambda_asks_about_every_submodule() -> None:
    policy = Lambda(CONTEXT, lambda module: isinstance(module, nn.Linear) and module.bias is None)
    assert names(policy, Norms()) == ["lin"]


def test_lambda_takes_a_functions_name() -> None:
    assert names(Lambda(CONTEXT, "torch.distributed.fsdp.wrap:always_wrap_policy"), nested_linears()) == [
        "0",
        "1",
        "2",
        "2.0",
        "2.1",
    ]


def test_lambda_refuses_an_answer_that_is_no_bool_and_says_where() -> None:
    with pytest.raises(PluginContractError, match=r"returned None for module '0' \(Linear\). Return True"):
        Lambda(CONTEXT, lambda module: None).plan(nested_linears(), EVERYTHING)


def test_custom_gives_units_settings_of_their_own() -> None:
    root = nested_linears()

    def choose(module: nn.Module) -> bool | dict[str, Any]:
        if module is root[2]:
            return {"reshard_after_forward": False}
        return {} if module is root[1] else isinstance(module, nn.Linear) and module is not root[0]

    plan = Custom(CONTEXT, choose).plan(root, EVERYTHING)
    assert list(plan.items()) == [
        (root[1], {}),
        (root[2], {"reshard_after_forward": False}),
        (root[2][0], {}),
        (root[2][1], {}),
    ]


@pytest.mark.parametrize("answer", [None, 1, "True", [True]])
def test_custom_refuses_any_other_answer_in_fsdps_words(answer: Any) -> None:
    words = "The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it returned"
    with pytest.raises(PluginContractError, match=words) as caught:
        Custom(CONTEXT, lambda module: answer).plan(nn.ModuleDict({"head": nn.Linear(1, 1)}), EVERYTHING)
    assert "'head' (Linear)" in str(caught.value)
    assert isinstance(caught.value, TypeError)


# or, and the forms of a policy


def test_or_joins_policies_functions_classes_and_names() -> None:
    root = nn.Sequential(Norms(), nn.Linear(3, 3), nn.LayerNorm(3), nn.Embedding(2, 3))
    policy = Or(
        CONTEXT,
        [
            "torch.nn:Embedding",
            nn.LayerNorm,
            {nn.BatchNorm1d, nn.BatchNorm2d},
            lambda module: module is root[1],
            Never(CONTEXT),
        ],
    )
    assert names(policy, root) == ["0.bn1", "0.bn2", "1", "2", "3"]


def test_or_joins_plugins_by_name_with_their_options() -> None:
    root = nn.Sequential(Norms(), nn.Linear(3, 3), nn.LayerNorm(3), nn.Embedding(2, 3))
    inner = {"name": "or", "policies": [{"name": "size", "min_num_params": 100}, "polyshard:never"]}
    policy = Or(plugin_context("or"), ["never", {"name": "module_class", "classes": "torch.nn:LayerNorm"}, inner])
    # Norms has 100 elements in its linear layer; the norms' 40 do not make a unit.
    assert names(policy, root) == ["0.lin", "2"]


def test_or_takes_a_reference_before_a_plugin_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """
        from torch import nn
        from polyshard.interfaces import WrapPolicy
        class Pairs(WrapPolicy):
            api_version = 1
            def __init__(self, context): pass
            def plan(self, root, context): return {}
        everything = nn.Linear
    """
    offers = [("polyshard.policies", "everything", "acme_pairs:Pairs"), ("polyshard.policies", "p", "acme_pairs:Pairs")]
    install(tmp_path, "acme_pairs", "1.0", offers, {"acme_pairs": textwrap.dedent(source)})
    monkeypatch.syspath_prepend(str(tmp_path))
    context = plugin_context("or")
    assert names(Or(context, ["acme_pairs:everything"]), nested_linears()) == ["0", "1", "2.0", "2.1"]
    assert names(Or(context, [{"name": "acme_pairs:everything"}]), nested_linears()) == []
    # No module has this name, but a distribution offers it; and a name may be written with its distribution's hyphen.
    assert names(Or(context, ["acme_pairs:p", "acme-pairs:p"]), nested_linears()) == []


@pytest.mark.parametrize(
    ("form", "error", "message"),
    [
        (
            "sise",
            PluginNotFoundError,
            r"no installed plugin of polyshard\.policies is named 'sise'.*'size'(.|\n)*A class",
        ),
        ("torch.nn.Linear", PluginNotFoundError, "A class or a function is written as 'package.module:Name'"),
        ("polyshrad:size", ConfigError, "cannot import 'polyshrad'.* Nor does an installed plugin have this name"),
        ({"name": "size", "min_params": 3}, ConfigError, "does not take the option 'min_params'.*'min_num_params'"),
        ({"min_num_params": 3}, ConfigError, "needs a string under 'name'"),
        ({"name": "or", "policies": ["sise"]}, PluginNotFoundError, "named 'sise'"),
        ({"name": "or"}, ConfigError, "missing a required argument: 'policies'"),
    ],
)
def test_or_refuses_what_is_no_plugin(form: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Or(plugin_context("or"), [nn.Linear, form])


def test_or_by_name_shards_a_model_and_is_compared_with_what_it_joins() -> None:
    collectives = {"name": "fake", "world_size": 2}
    config = ShardConfig(collectives=collectives, policy={"name": "or", "policies": ["never", "torch.nn:Linear"]})
    model = polyshard.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)), config)
    assert polyshard.report(model).units == 3
    joined = registry.resolve(Group.POLICIES, config.policy)
    rows = registry.fingerprint(registry.construct(joined, CONTEXT))
    assert [row[1]["name"] for row in rows] == ["or", "never"]


def test_or_joins_settings_and_refuses_those_that_disagree() -> None:
    root = nested_linears()

    def setting(**settings: Any) -> Custom:
        return Custom(CONTEXT, lambda module: settings if module is root[2] else False)

    joined = Or(CONTEXT, [setting(precision="bf16"), Always(CONTEXT), setting(offload="cpu")]).plan(root, EVERYTHING)
    assert joined[root[2]] == {"precision": "bf16", "offload": "cpu"}
    assert joined[root[0]] == {}
    with pytest.raises(ConfigError, match="disagree on precision of module '2': 'bf16' and 'fp32'"):
        Or(CONTEXT, [setting(precision="bf16"), setting(precision="fp32")]).plan(root, EVERYTHING)


def test_or_names_the_policy_that_breaks_the_contract() -> None:
    class Listing(WrapPolicy):
        def plan(self, root: nn.Module, context: PolicyContext) -> UnitPlan:
            return list(root.children())  # type: ignore[return-value]

    with pytest.raises(PluginContractError, match=r"Listing.plan, joined by 'or', returned a list"):
        Or(CONTEXT, [Listing()]).plan(nested_linears(), EVERYTHING)


def only_norms(module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
    return recurse or isinstance(module, nn.modules.batchnorm._BatchNorm)


@pytest.mark.parametrize(
    ("form", "root", "expected"),
    [
        (partial(size_based_auto_wrap_policy, min_num_params=40), nested_linears, ["2"]),
        (partial(size_based_auto_wrap_policy, min_num_params=1), nested_linears, ["0", "1", "2.0", "2.1"]),
        (always_wrap_policy, nested_linears, ["0", "1", "2", "2.0", "2.1"]),
        (only_norms, Norms, ["bn1", "bn2"]),
        (ModuleWrapPolicy({nn.Linear}), Norms, ["lin"]),
        (
            partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear, nn.BatchNorm1d}),
            Norms,
            ["lin", "bn1"],
        ),
        (lambda module: isinstance(module, nn.Linear), Norms, ["lin"]),
        (partial(lambda cls, module: isinstance(module, cls), nn.Linear), Norms, ["lin"]),
        (nn.Linear, Norms, ["lin"]),
        (frozenset({nn.Linear}), Norms, ["lin"]),
        ("torch.nn:Linear", Norms, ["lin"]),
        (Size(CONTEXT, min_num_params=100), Norms, ["lin"]),
    ],
)
def test_python_forms_of_a_policy(form: Any, root: type[nn.Module], expected: list[str]) -> None:
    assert names(as_policy(form, CONTEXT).policy, root()) == expected


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (3, "a int is not a policy"),
        (Always, "policy class Always. Give an instance"),
        ([nn.Linear, 3], "3 is a int and not a class"),
        ("torch.nn:Linaer", r"'torch.nn' has no 'Linaer'.*Did you mean 'Linear'"),
        ("torch.nowhere:Linear", "cannot import 'torch.nowhere'"),
    ],
)
def test_what_is_no_policy_is_refused(form: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        as_policy(form, CONTEXT)
    for context in (CONTEXT, plugin_context("or")):
        with pytest.raises(ConfigError, match=message):
            Or(context, [form])


@pytest.mark.parametrize("policies", [[], "torch.nn:Linear", "size", {"name": "size"}, None])
def test_or_takes_a_list_of_at_least_one(policies: Any) -> None:
    with pytest.raises(ConfigError, match="Give a list of at least one"):
        Or(CONTEXT, policies)


# reasons


class Wide(nn.Linear):
    pass


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.BatchNorm1d)


def norms_unreduced(module: nn.Module) -> bool | dict[str, Any]:
    return {"reshard_after_forward": False} if isinstance(module, nn.BatchNorm1d) else module.__class__ is Norms


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Always(CONTEXT), {"0": "there are parameters in it", "1": "it has parameters of its own"}),
        (
            ModuleClass(CONTEXT, [nn.Linear, Norms]),
            {"0": "class Norms is in classes", "1": "class Wide derives from Linear, which is in classes"},
        ),
        (Transformer(CONTEXT, Norms), {"0": "class Norms is in layers"}),
        (
            Size(CONTEXT, min_num_params=60),
            # 140 in Norms, of which 100 are lin's.
            {
                "0.lin": "100 parameters of its own, min_num_params is 60",
                "1": "1,200 parameters of its own, min_num_params is 60",
            },
        ),
        (Lambda(CONTEXT, is_norm), {"0.bn1": f"{__name__}:is_norm answered True"}),
        (
            Lambda(CONTEXT, partial(size_based_auto_wrap_policy, min_num_params=1000)),
            {
                "1": "torch.distributed.fsdp.wrap:size_based_auto_wrap_policy answered True for 1,200 parameters of "
                "its own"
            },
        ),
        (
            Custom(CONTEXT, norms_unreduced),
            {
                "0": f"{__name__}:norms_unreduced chose it",
                "0.bn1": f"{__name__}:norms_unreduced chose it with reshard_after_forward=False",
            },
        ),
        (
            Or(plugin_context("or"), [{"name": "size", "min_num_params": 1000}, [Wide, Norms], Never(CONTEXT)]),
            {
                "0": "module_class: class Norms is in classes",
                "1": "size: 1,200 parameters of its own, min_num_params is 1,000; "
                "module_class: class Wide is in classes",
            },
        ),
        (
            Or(plugin_context("or"), [{"name": "or", "policies": ["polyshard:always"]}]),
            {"1": "or: polyshard:always: it has parameters of its own"},
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, WrapPolicy) else "",
)
def test_policies_say_which_rule_chose_a_module(policy: WrapPolicy, expected: dict[str, str]) -> None:
    root = nn.Sequential(Norms(), Wide(40, 30, bias=False))
    chosen = policy.plan(root, EVERYTHING)
    reasons = {name: policy.reason(module, name) for name, module in root.named_modules() if module in chosen}
    assert {name: reasons[name] for name in expected} == expected
    assert all(reasons.values())


# settings of some units


class Experts(nn.Linear):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(4, 4)
        self.experts = Experts(4, 4)


def blocks() -> nn.Module:
    model = nn.Module()
    model.layers, model.head = nn.ModuleList([Block(), Block()]), nn.Linear(4, 4)
    return model


BY_CLASS = {"Experts": {"mesh": "edp", "gradient_divisor": "group"}, "layers.1": {"reshard_after_forward": False}}
BY_NAME = {"layers.*.experts": BY_CLASS["Experts"], "layers.1": BY_CLASS["layers.1"]}


@pytest.mark.parametrize("overrides", [BY_CLASS, BY_NAME])
@pytest.mark.parametrize("name", ["transformer", "transformers", "or"])
def test_settings_by_class_or_name_of_a_module(name: str, overrides: dict[str, dict[str, Any]]) -> None:
    model: Any = blocks()
    model._no_split_modules = ["Block"]
    policy = {
        "transformer": lambda: Transformer(CONTEXT, Block, overrides=overrides),
        "transformers": lambda: NoSplitModules(CONTEXT, overrides=overrides),
        "or": lambda: Or(plugin_context("or"), [Always(CONTEXT), ModuleClass(CONTEXT, Block, overrides)]),
    }[name]()
    plan = policy.plan(model, EVERYTHING)
    expected = {"layers.0": {}, "layers.1": BY_CLASS["layers.1"]}
    expected |= {f"layers.{index}.experts": BY_CLASS["Experts"] for index in range(2)}
    found = {name: dict(plan[module]) for name, module in model.named_modules() if module in plan}
    assert {name: found[name] for name in expected} == expected
    assert len(found) == len(expected) + (3 if name == "or" else 0)
    key = next(iter(overrides))
    reason = policy.reason(model.layers[0].experts, "layers.0.experts")
    assert f"'{key}' in overrides with mesh='edp', gradient_divisor='group'" in reason
    assert "class Block is in " in policy.reason(model.layers[1], "layers.1")
    ignoring = PolicyContext(ignored_modules=[model.layers[1].experts])
    assert model.layers[1].experts not in ModuleClass(CONTEXT, Block, overrides).plan(model, ignoring)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([("Experts", {})], "overrides of policy 'under test' takes tables of settings by class or name, not"),
        ({"Experts": "edp"}, r"has the entry 'Experts': 'edp'\. Give the settings of a class or a name"),
        ({"Experts": {"msh": "edp"}}, r"sets 'msh' for 'Experts', which no unit has\. Did you mean 'mesh'\?"),
        (
            {"Expert": {}},
            r"has 'Expert', which no module inside this Module has as class or name. Did you mean 'Experts'\?",
        ),
        ({"layer.*": {}}, "has 'layer.*', which no module inside this Module has as class or name"),
        ({"layers": {}}, r"matches 'layers', a ModuleList, which cannot be a unit.*'layers\.\*' for each"),
        (
            {"Experts": {"mesh": "a"}, "layers.*.experts": {"mesh": "b"}},
            "mesh of module 'layers.0.experts' twice, as 'a' and 'b'",
        ),
    ],
)
def test_settings_of_no_module_and_no_unit_are_refused(overrides: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Transformer(CONTEXT, Block, overrides=overrides).plan(blocks(), EVERYTHING)


# references


def test_a_module_that_fails_to_import_keeps_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_blocks.py").write_text("import a_library_that_is_not_there\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot import 'broken_blocks'") as caught:
        Transformer(CONTEXT, "broken_blocks:Block")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert caught.value.__cause__.name == "a_library_that_is_not_there"


def test_a_class_inside_a_class_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from torch import nn\nclass Model(nn.Module):\n    class Block(nn.Linear):\n        pass\n"
    (tmp_path / "nested_blocks.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = Transformer(CONTEXT, "nested_blocks:Model.Block")
    block = sys.modules["nested_blocks"].Model.Block
    assert names(policy, nn.Sequential(nn.Linear(2, 2), block(2, 2))) == ["1"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModuleClass(CONTEXT, "torch:relu"), "not a class, in classes of policy 'under test'"),
        (lambda: ModuleClass(CONTEXT, []), "no class is given in classes"),
        (lambda: Transformer(CONTEXT, ()), "no class is given in layers"),
        (lambda: Lambda(CONTEXT, "torch:float32"), "a dtype and cannot be called, in fn"),
        (lambda: Custom(CONTEXT, "torch:rleu"), "Did you mean 'relu'"),
        (lambda: Size(CONTEXT, force_leaf=["torch.nn:MultiHeadAttention"]), "Did you mean 'MultiheadAttention'"),
    ],
)
def test_settings_that_name_nothing_useful_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
