"""The rules for plugins of every group, as tests that the suites inherit, and how a plugin's mistakes are noticed."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from polyshard import registry
from polyshard.interfaces import CURRENT_API, OLDEST_API, Group, PluginContext, UnitSpec
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override


def plugin_context(
    name: str = "test",
    device: torch.device | str = "cpu",
    rank: int | None = None,
    world_size: int | None = None,
) -> PluginContext:
    """A context as polyshard gives one to factories: its ``construct`` makes any installed plugin.

    ``rank`` and ``world_size`` are for listeners; polyshard leaves them None for every other plugin. Plugins that
    ``construct`` made belong to this test only: no ranks compare them, and it may be called after the factory has
    returned.
    """
    return PluginContext(
        name=name, device=torch.device(device), rank=rank, world_size=world_size, constructor=_construct
    )


def _construct(context: PluginContext, group: Group, choice: Any) -> Any:
    return registry.construct(registry.resolve(group, choice), context).instance


class PluginSuite:
    """The base of suites: tests that do not depend on the group."""

    group: ClassVar[Group]
    """The plugin's entry-point group."""
    device: torch.device = torch.device("cpu")
    """Where models compute; override it to test on another device."""

    # A signature that type checkers let any other override: that of collectives takes the rank.
    def make(self, *args: Any, **kwargs: Any) -> Any:
        """A newly constructed plugin."""
        raise NotImplementedError(f"{type(self).__name__} must override make()")

    def factory(self) -> Callable[..., Any]:
        """The object that the entry point names: the plugin's class. Override it where it is a function."""
        made: type = type(self.make())
        return made

    def _unit(
        self,
        name: str,
        shard_numel: int,
        master_dtype: torch.dtype = torch.float32,
        module_class: type[nn.Module] = nn.Linear,
        suffix: str = "",
    ) -> UnitSpec:
        """Of two ranks; the root's ``name`` is empty, and ``suffix`` ends that of the unit."""
        return UnitSpec(
            name=f"{name}{suffix}",
            module_class=module_class,
            parameter_names=(f"{name}.weight".lstrip("."),),
            numel=2 * shard_numel,
            shard_numel=shard_numel,
            master_dtype=master_dtype,
            device=self.device,
            is_root=not name,
            suffix=suffix,
        )

    def test_api_version_stands_in_the_class_itself_and_is_served(self) -> None:
        factory = self.factory()
        # An inherited one says for which version the base was written, and changes with it. The class of an object that
        # can be called is the object's own.
        places = (getattr(factory, "__dict__", {}), {} if isinstance(factory, type) else vars(type(factory)))
        own = next((each["api_version"] for each in places if "api_version" in each), None)
        assert own is not None, f"{factory!r} has no api_version of its own"
        assert type(own) is int, f"api_version is {own!r}"
        assert OLDEST_API[self.group] <= own <= CURRENT_API[self.group]

    def test_factory_takes_a_context_and_options_by_name(self) -> None:
        signature = inspect.signature(self.factory())
        signature.bind_partial(None)
        kinds = [parameter.kind for parameter in signature.parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD not in kinds, f"an option that is misspelled is swallowed by {signature}"
        reachable = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        assert all(kind in reachable for kind in kinds[1:]), f"options go by name, but there is {signature}"

    def test_local_options_are_options_of_the_factory(self) -> None:
        factory = self.factory()
        local: Any = getattr(factory, "local_options", frozenset())
        assert isinstance(local, Collection), f"local_options are {local!r}"
        assert not isinstance(local, str | bytes), f"local_options are {local!r}: put the name into a frozenset"
        options = list(inspect.signature(factory).parameters)[1:]
        assert set(local) <= set(options), f"local_options {sorted(local)} are not among the options {options}"

    def test_fingerprint_is_text_that_every_rank_has(self) -> None:
        with as_rank(0):
            first = fingerprint_of(self.make())
        with as_rank(1):
            second = fingerprint_of(self.make())
        assert isinstance(first, str | None), f"fingerprint() is {first!r}"
        assert first == second


class LocalPluginSuite(PluginSuite):
    """The base of suites of plugins that do not communicate with other ranks."""

    def test_construction_does_not_communicate(self) -> None:
        # Ranks compare their plugins when all are constructed: one that lacks a plugin would leave the others waiting.
        with collectives_noted() as issued:
            self.make()
        assert not issued, f"{', '.join(issued)} while it was constructed"


def fingerprint_of(plugin: Any) -> Any:
    """``fingerprint()`` of a plugin that has one, else None."""
    method = getattr(plugin, "fingerprint", None)
    return method() if callable(method) else method


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    """Give this process the launcher's variables, and random numbers, of ``rank`` of two."""
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    with mock.patch.dict(os.environ, variables), torch.random.fork_rng(devices=[]):
        torch.manual_seed(rank)
        yield


@contextmanager
def collectives_noted() -> Iterator[list[str]]:
    """Names of the collectives that are issued inside, over a group of this process at least."""
    issued: list[str] = []
    with group_of_one(), Dispatched(lambda operation: issued.append(operation.name()), is_collective):
        yield issued


@contextmanager
def group_of_one() -> Iterator[None]:
    """The default process group, where there is none: of this process alone, so that collectives can be issued."""
    if not dist.is_available() or dist.is_initialized():
        yield
        return
    # torch puts the rank before the text of an exception, once more for each group that is made.
    printing = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = printing


def is_collective(operation: Any) -> bool:
    """Whether an operation that torch dispatches communicates."""
    return operation.namespace in ("c10d", "_c10d_functional", "c10d_functional")


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls ``note`` with every operation that torch dispatches inside, of those that are ``wanted``."""

    def __init__(self, note: Callable[[Any], None], wanted: Callable[[Any], bool] = lambda operation: True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note
        self._wanted = wanted

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._wanted(func):
            self._note(func)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class ModuleState:
    """The parts of a model that a plugin may not change, noted before it is called and compared afterwards.

    Attributes of modules, by all their names: modes, hooks and children are attributes, too. Parameters and buffers by
    theirs.
    """

    attributes: dict[str, dict[str, Any]]
    trained: dict[str, bool]
    values: dict[str, torch.Tensor]

    @classmethod
    def of(cls, root: nn.Module, values: bool = True) -> ModuleState:
        """As it is now; ``values``: those of parameters and buffers too, which cannot be read inside a step."""
        modules = root.named_modules(remove_duplicate=False)
        attributes = {name: {key: _held(value) for key, value in vars(module).items()} for name, module in modules}
        tensors = dict([*root.named_parameters(), *root.named_buffers()])
        trained = {name: each.requires_grad for name, each in tensors.items()}
        return cls(attributes, trained, {name: each.detach().clone() for name, each in tensors.items() if values})

    def check(self, root: nn.Module, by: str = "it", *, may_hook: bool = False) -> None:
        """Compare it with the state now.

        ``by``: the plugin or call that may have changed it. ``may_hook``: it may have added forward hooks.
        """
        now = ModuleState.of(root, values=bool(self.values))
        assert now.attributes.keys() == self.attributes.keys(), f"{by} changed which modules there are"
        for name, before in self.attributes.items():
            after = now.attributes[name]
            changed = [
                key
                for key in before.keys() | after.keys()
                if not _same(before.get(key), after.get(key))
                and not (may_hook and key in _HOOKS and _extends(before[key], after[key]))
            ]
            assert not changed, f"{by} changed {', '.join(sorted(changed))} of module {name!r}"
        for name, trained in self.trained.items():
            assert now.trained[name] is trained, f"{by} changed requires_grad of {name}"
        for name, value in self.values.items():
            assert torch.equal(now.values[name], value), f"{by} changed values of {name}"


#: Where modules keep forward hooks.
_HOOKS = frozenset(
    f"_forward_{name}"
    for name in ("hooks", "hooks_with_kwargs", "hooks_always_called", "pre_hooks", "pre_hooks_with_kwargs")
)


def _extends(before: Mapping[int, Any], after: Mapping[int, Any]) -> bool:
    return all(key in after and after[key] is hook for key, hook in before.items())


def _held(value: Any) -> Any:
    """Containers by their items: they are changed in place."""
    if isinstance(value, dict):
        return dict(value)
    return list(value) if isinstance(value, list | set) else value


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, dict) and isinstance(after, dict):
        return list(before) == list(after) and all(before[key] is after[key] for key in before)
    if isinstance(before, list) and isinstance(after, list):
        return len(before) == len(after) and all(one is other for one, other in zip(before, after, strict=True))
    return before is after
