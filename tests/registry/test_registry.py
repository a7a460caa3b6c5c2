"""Plugins by name: found, checked, constructed and listed; whose names are whose; contexts of plugins for tests."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polyshard
import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from fake_distribution import install
from polyshard import ShardConfig, registry
from polyshard.errors import (
    ConfigError,
    PluginConflictError,
    PluginContractError,
    PluginLoadError,
    PluginNotFoundError,
    WorldSizeError,
)
from polyshard.interfaces import Group, PluginContext, PolicyContext, UnitPlan, WrapPolicy
from polyshard.registry import Installed, PluginState, Resolved, construct, fingerprint, installed, resolve
from polyshard_testing import plugin_context
from processes import run_processes
from torch import nn

POLICIES = Group.POLICIES.value

POLICY_SOURCE = """
from polyshard.interfaces import WrapPolicy

class Blocks(WrapPolicy):
    api_version = 1

    def __init__(self, context, size=2, *, depth):
        self.name, self.size, self.depth = context.name, size, depth

    def plan(self, root, context):
        return {}
"""


class EveryChild(WrapPolicy):
    def plan(self, root: torch.nn.Module, context: PolicyContext) -> UnitPlan:
        return {child: {} for child in root.children()}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


@pytest.fixture
def context() -> PluginContext:
    return PluginContext(name="given", device=torch.device("cpu"))


def by_name(group: Group, name: str) -> list[Installed]:
    return [plugin for plugin in installed(group) if plugin.name == name]


def test_a_strangers_plugin_is_found_by_name_and_constructed(site: Path, context: PluginContext) -> None:
    install(site, "acme-shard", "1.4", [(POLICIES, "blocks", "acme_found:Blocks")], {"acme_found": POLICY_SOURCE})
    resolved = resolve(Group.POLICIES, {"name": "blocks", "depth": 7})
    assert (resolved.name, resolved.value) == ("blocks", "acme_found:Blocks")
    assert (resolved.distribution, resolved.version) == ("acme-shard", "1.4")
    policy: Any = resolved.construct(context)
    assert isinstance(policy, WrapPolicy)
    assert (policy.name, policy.size, policy.depth) == ("given", 2, 7)


def test_a_package_installed_after_the_first_look_is_seen(site: Path) -> None:
    with pytest.raises(PluginNotFoundError):
        resolve(Group.POLICIES, "late")
    install(site, "acme-late", "1.0", [(POLICIES, "late", "acme_late:Blocks")], {"acme_late": POLICY_SOURCE})
    assert resolve(Group.POLICIES, "late").distribution == "acme-late"


def test_unknown_name_suggests_and_lists_without_importing(site: Path) -> None:
    install(
        site,
        "acme-shard",
        "2.5",
        [(POLICIES, "acme_blocks", "acme_unknown:Blocks"), (POLICIES, "acme_bad", "acme_bad_module:Blocks")],
        {"acme_unknown": POLICY_SOURCE, "acme_bad_module": "import a_library_that_is_absent"},
    )
    with pytest.raises(PluginNotFoundError) as caught:
        resolve(Group.POLICIES, "ACME_BLOKS")
    message = str(caught.value)
    assert "no installed plugin of polyshard.policies is named 'ACME_BLOKS'. Did you mean 'acme_blocks'?" in message
    assert "acme_blocks  (from acme-shard 2.5)" in message
    assert "module_class  (from polyshard " in message
    assert "acme_bad  (from acme-shard 2.5)" in message
    assert "again after a change of its pyproject.toml. `polyshard plugins list` tells their states" in message
    assert not {"acme_unknown", "acme_bad_module"} & sys.modules.keys()
    (bad,) = by_name(Group.POLICIES, "acme_bad")
    assert (bad.state, bad.error) == (
        PluginState.BROKEN,
        "cannot be imported: ModuleNotFoundError: No module named 'a_library_that_is_absent'. Repair or reinstall "
        "acme-shard, or name another plugin.",
    )
    assert isinstance(caught.value, LookupError)


def test_two_distributions_with_one_name(site: Path) -> None:
    for distribution, module in (("Acme-One", "acme_one"), ("acme_two", "acme_two")):
        install(site, distribution, "1.0", [(POLICIES, "twice", f"{module}:Blocks")], {module: POLICY_SOURCE})
    with pytest.raises(PluginConflictError) as caught:
        resolve(Group.POLICIES, "twice")
    message = str(caught.value)
    for part in ("Acme-One 1.0 (acme_one:Blocks)", "acme_two 1.0 (acme_two:Blocks)", '"Acme-One:twice" or "acme_two:'):
        assert part in message
    # Indexes treat Acme-One, acme_one and ACME.ONE as one name, and so must a configuration.
    assert resolve(Group.POLICIES, "acme.one:twice").value == "acme_one:Blocks"
    assert resolve(Group.POLICIES, "acme-two:twice").value == "acme_two:Blocks"
    assert {plugin.state for plugin in by_name(Group.POLICIES, "twice")} == {PluginState.AMBIGUOUS}


def test_a_distribution_without_the_name_is_not_found(site: Path) -> None:
    install(site, "acme-only", "1.0", [(POLICIES, "only", "acme_only:Blocks")], {"acme_only": POLICY_SOURCE})
    with pytest.raises(PluginNotFoundError, match=r"is named 'acme-onyl:only'\. Did you mean 'acme-only:only'\?"):
        resolve(Group.POLICIES, "acme-onyl:only")


def test_one_entry_point_listed_twice_is_one_plugin(site: Path) -> None:
    line = (POLICIES, "again", "acme_again:Blocks")
    install(site, "acme-again", "1.0", [line, line], {"acme_again": POLICY_SOURCE})
    assert resolve(Group.POLICIES, "again").value == "acme_again:Blocks"
    assert [plugin.state for plugin in by_name(Group.POLICIES, "again")] == [PluginState.READY]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"depth": 1, "sice": 3},
            r"does not take the option 'sice'\. Did you mean 'size'\? Its options: size=2, depth\.",
        ),
        ({}, "cannot take its options: missing a required .*'depth'"),
        ({"depth": 1, "context": 3}, "does not take the option 'context'"),
    ],
)
def test_wrong_options_list_those_that_exist(
    site: Path, context: PluginContext, options: dict[str, Any], words: str
) -> None:
    install(site, "acme-opt", "1.0", [(POLICIES, "opt", "acme_options:Blocks")], {"acme_options": POLICY_SOURCE})
    with pytest.raises(ConfigError, match=words):
        resolve(Group.POLICIES, {"name": "opt", **options}).construct(context)


def resolved_from(factory: Callable[..., Any], **options: Any) -> Resolved:
    return Resolved(Group.POLICIES, "made", "tests:made", "acme", "1.0", factory, options)


@pytest.mark.parametrize(
    ("annotation", "taken", "refused"),
    [
        ("int", [3], [True, "3", 3.0, None]),
        ("float", [3, 0.5], [True, "64 MiB"]),
        ("bool", [False], [0, "no"]),
        ("str", ["3"], [3]),
        ("Path", ["/scratch", Path("/scratch")], [3]),
        ("Literal['png', 3]", ["png", 3], ["svg", True]),
        ("Optional[int]", [3, None], ["3"]),
        ("int | str | None", [3, "3", None], [True, 0.5]),
        (int | None, [3, None], ["3"]),
        # Not compared: what is made of other classes, as of those that a type checker alone imports.
        ("int | torch.dtype", ["3"], []),
        ("Sequence[int]", ["3"], []),
    ],
)
def test_options_have_the_types_of_the_signature(annotation: Any, taken: list[Any], refused: list[Any]) -> None:
    def factory(context: PluginContext, size: Any = None) -> WrapPolicy:
        raise AssertionError("it is not called")

    factory.__annotations__["size"] = annotation
    for value in taken:
        resolved_from(factory, size=value).check_options()
    for value in refused:
        with pytest.raises(ConfigError, match=rf"\(from acme 1\.0\) takes .* for size, not {re.escape(repr(value))}"):
            resolved_from(factory, size=value).check_options()


def test_a_type_error_inside_the_constructor_is_not_blamed_on_the_options(context: PluginContext) -> None:
    def factory(context: PluginContext, size: int) -> WrapPolicy:
        raise TypeError("inner trouble")

    with pytest.raises(PluginLoadError, match=r"constructed with size=3: TypeError: inner trouble") as caught:
        resolved_from(factory, size=3).construct(context)
    assert isinstance(caught.value.__cause__, TypeError)


def test_errors_of_polyshard_pass_through_a_constructor(context: PluginContext) -> None:
    def factory(context: PluginContext) -> WrapPolicy:
        raise WorldSizeError("3 ranks cannot be served")

    with pytest.raises(WorldSizeError, match="3 ranks"):
        resolved_from(factory).construct(context)


def test_a_falsy_instance_is_still_the_instance(context: PluginContext) -> None:
    class Empty(EveryChild):
        def __len__(self) -> int:
            return 0

    made = Empty()
    assert resolved_from(lambda context: made).construct(context) is made


def test_an_instance_resolves_to_itself(context: PluginContext) -> None:
    policy = EveryChild()
    resolved = resolve(Group.POLICIES, policy)
    assert (resolved.distribution, resolved.value) == ("", f"{__name__}:EveryChild")
    assert resolved.construct(context) is policy


def test_objects_that_are_no_plugin_of_the_group_are_refused() -> None:
    with pytest.raises(PluginContractError, match="EveryChild is the class: pass an instance"):
        resolve(Group.POLICIES, EveryChild)
    with pytest.raises(PluginContractError, match=r"EveryChild is no plugin of polyshard\.offload.*OffloadManager"):
        resolve(Group.OFFLOAD, EveryChild())


@pytest.mark.parametrize(
    ("group", "policy", "written"),
    [
        (
            Group.PRECISION,
            fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            {"name": "mixed", "param": "bfloat16", "reduce": "float32"},
        ),
        (
            Group.PRECISION,
            fsdp.MixedPrecisionPolicy(cast_forward_inputs=False),
            {"name": "mixed", "cast_inputs": False, "cast_root_inputs": False},
        ),
        (
            Group.PRECISION,
            fsdp.MixedPrecision(buffer_dtype=torch.float16, keep_low_precision_grads=True),
            {"name": "mixed", "buffer": "float16", "cast_inputs": False, "keep_low_precision_grads": True},
        ),
        (Group.OFFLOAD, fsdp.CPUOffloadPolicy(pin_memory=False), {"name": "cpu", "pin_memory": False}),
        (Group.OFFLOAD, fsdp.OffloadPolicy(), "none"),
        (Group.OFFLOAD, fsdp.CPUOffload(offload_params=True), "cpu"),
    ],
    ids=lambda value: type(value).__name__ if "Policy" in type(value).__name__ else None,
)
def test_torchs_policies_are_refused_with_what_to_write(
    group: Group, policy: object, written: Any, context: PluginContext
) -> None:
    setting = group.name.lower()
    words = f"{type(policy).__name__} of torch.distributed.fsdp is no plugin of {group.value}. Write {setting} = "
    with pytest.raises(PluginContractError, match=re.escape(f"{words}{written!r} in its place.")):
        resolve(group, policy)
    resolve(group, written).construct(context)


def test_any_object_is_a_listener(context: PluginContext) -> None:
    listener = object()
    assert resolve(Group.PLUGINS, listener).construct(context) is listener


def test_fingerprint_tells_ranks_apart_by_package_version_and_code(site: Path, context: PluginContext) -> None:
    install(site, "acme-print", "1.0", [(POLICIES, "print", "acme_print:Blocks")], {"acme_print": POLICY_SOURCE})
    [row] = fingerprint(construct(resolve(Group.POLICIES, {"name": "print", "depth": 2}), context))
    digest = hashlib.sha256((site / "acme_print.py").read_bytes()).digest()
    code = hashlib.sha256(b"acme_print/acme_print.py\0" + digest).hexdigest()[:16]
    told = {"name": "print", "is": "acme_print:Blocks", "from": "acme-print 1.0"}
    assert row == ["polyshard.policies", told, ["depth", "2"], ["code", code]]


def test_fingerprint_of_an_object_has_no_package(context: PluginContext) -> None:
    [row] = fingerprint(construct(resolve(Group.POLICIES, EveryChild()), context))
    told = {"name": "EveryChild", "is": f"{__name__}:EveryChild", "from": "the program"}
    assert row == ["polyshard.policies", told]


@pytest.mark.parametrize(
    ("group", "names"),
    [
        (Group.COLLECTIVES, {"auto", "fake", "threaded", "gloo", "nccl"}),
        (Group.PRECISION, {"none", "fp32", "bf16", "fp16", "mixed"}),
        (Group.OFFLOAD, {"none", "cpu"}),
        (Group.POLICIES, {"always", "never", "module_class", "transformer", "size", "lambda", "custom", "or"}),
        (Group.PLUGINS, {"trace", "finite"}),
    ],
)
def test_every_built_in_is_installed_and_ready(group: Group, names: set[str]) -> None:
    built_in = {plugin.name: plugin for plugin in installed(group) if plugin.distribution == "polyshard"}
    assert set(built_in) >= names
    assert [plugin for plugin in built_in.values() if plugin.state is not PluginState.READY] == []


#: What a configuration uses that says nothing, what ``auto`` asks for, and what it is made of.
DEFAULTS = [
    (Group.COLLECTIVES, "auto"),
    (Group.COLLECTIVES, "gloo"),
    (Group.COLLECTIVES, "nccl"),
    (Group.COLLECTIVES, "fake"),
    (Group.PRECISION, "none"),
    (Group.OFFLOAD, "none"),
    (Group.POLICIES, "never"),
]


class FourRanks:
    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 4


def hijack(site: Path) -> None:
    install(site, "a-hijacker", "9.9", [(group.value, name, "hijacker:Taken") for group, name in DEFAULTS])
    (site / "hijacker.py").write_text("raise SystemExit('the hijacker was imported')")


def test_the_default_configuration_is_polyshards_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hijack(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    offers = registry.find.offers_of(Group.COLLECTIVES)
    offered = [offer.distribution for offer in offers if offer.name == "auto"]
    assert offered == ["a-hijacker", "polyshard"]
    model = polyshard.shard(nn.Linear(8, 8), ShardConfig(collectives=FourRanks()))
    model(torch.ones(2, 8)).sum().backward()
    # Two rows of 8 over four ranks.
    assert (model.weight.to_local().shape, model.bias.to_local().shape) == ((2, 8), (2,))
    assert "hijacker" not in sys.modules


@pytest.mark.slow
def test_auto_makes_polyshards_backend_and_shows_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hijack(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = run_processes(1, what_auto_makes, str(tmp_path), timeout=30.0)
    assert made == [[("auto", "polyshard"), ("gloo", "polyshard")]]


def what_auto_makes(rank: int, site: str) -> list[tuple[str, str]]:
    assert dist.get_world_size() == 1
    sys.path.insert(0, site)
    made = registry.construct(registry.resolve(Group.COLLECTIVES, "auto"), plugin_context())
    assert [row[1]["name"] for row in registry.fingerprint(made)] == ["auto", "gloo"]
    return [(each.resolved.name, each.resolved.distribution) for each in made.walk()]


def test_a_context_for_tests_constructs_plugins_by_name() -> None:
    context = plugin_context("outer", device="cpu")
    assert (context.name, context.device) == ("outer", torch.device("cpu"))
    assert (context.rank, context.world_size) == (None, None)
    fake = context.construct(Group.COLLECTIVES, {"name": "fake", "world_size": 3})
    assert fake.world_size == 3
    assert context.construct(Group.PRECISION, "bf16").capabilities.encodes is False
    assert context.construct(Group.OFFLOAD, "cpu").capabilities.offloads is True
    root = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert set(context.construct(Group.POLICIES, "always").plan(root, PolicyContext())) == {root[0]}


def test_rank_and_size_are_handed_on_for_listeners() -> None:
    context = plugin_context(rank=1, world_size=4)
    assert (context.rank, context.world_size) == (1, 4)
