"""What one checkpoint is of: a sharded model, or the stages of a pipeline under the names of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn
from typing_extensions import override

from .. import registry
from ..errors import ConfigError
from ..inspect import ShardedModel, savable_model, without_wrappers
from ..interfaces import Collectives, Group, PluginContext
from ..state.contents import Joint, Optimizers, first_names, saved_names
from ..state.exchange import from_first, gather_to_first, together
from ..state.sharded import MODEL, OPTIMIZER, names_by_group
from ..state.source import Entry, Source, listed, opening
from .contents import extra_of, not_finite, precision_states, state_of
from .reading import StoredSource
from .writing import Document


@dataclass(frozen=True)
class Stages:
    """This rank's stages of a pipeline, which ``save``, ``async_save`` and ``load`` take in the place of a model.

    Every rank of the pipeline gives its own. Parameters and buffers of a part have the names that they have in the
    whole model; of optimizers there is one for each part, of one class and with groups of the same settings on all
    ranks. What is written is a checkpoint of the whole model: any number of stages loads it, and a model without any.

    Raises ConfigError, from ``save`` and ``load`` and on all ranks: two stages have a name, or no stage has something
    that a checkpoint holds; or there are not as many optimizers as parts.
    """

    parts: Sequence[nn.Module]
    """The outermost sharded modules."""
    group: dist.ProcessGroup | None = None
    """All ranks of the pipeline; those of the job where None."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """For parameters that two stages have one each of: the name in the later one, and that in the earlier one, which is
    saved."""


@dataclass(frozen=True)
class Part:
    """A sharded model that is saved or loaded, and its optimizer."""

    module: nn.Module
    sharded: ShardedModel
    joint: Joint | None

    @property
    def names(self) -> dict[str, str]:
        """Every name of a parameter or buffer, and the first one of the same."""
        return first_names(self.sharded)


@dataclass(frozen=True)
class Taken:
    """What a save writes of this rank's models."""

    state: dict[str, Any]
    broken: Sequence[str]
    """Names of what is not finite here."""
    called: Mapping[str, object]
    """What must be equal on all ranks, by name."""
    document: Callable[[], Document]
    """To be called on the rank that coordinates."""


@dataclass(frozen=True)
class Models:
    """The models of one call on this rank, and the ranks that make it together."""

    collectives: Collectives
    handles: Sequence[ShardedModel]
    """The first one remembers what was saved."""
    modules: Sequence[nn.Module]
    stages: Stages | None

    @classmethod
    @contextmanager
    def meeting(cls, given: nn.Module | Stages, call: str, what: str) -> Iterator[Models]:
        """Those of ``given``. ``call`` and ``what`` name it in errors. Raises as ``savable_model``."""
        modules = given.parts if isinstance(given, Stages) else [given]
        if not modules:
            raise ConfigError(f"{call} got no stages. Give this rank's parts of the model.")
        handles = [savable_model(module, call) for module in modules]
        with ExitStack() as stack:
            if not isinstance(given, Stages):
                everyone = handles[0].collectives
                stack.enter_context(handles[0].meeting(what, (everyone,)))
                yield cls(everyone, handles, modules, None)
                return
            context = PluginContext(
                name="",
                device=handles[0].collectives.device,
                process_group=given.group,
                timeout=timedelta(seconds=handles[0].timeout_s),
            )
            made: Collectives = registry.construct(registry.resolve(Group.COLLECTIVES, "auto"), context).instance
            for each in handles:
                stack.enter_context(each.meeting(f"{what} of a pipeline", ()))
            yield cls(made, handles, modules, given)

    def parts(self, optimizer: Optimizers | None) -> list[Part]:
        if self.stages is None or optimizer is None:
            joints = [None if optimizer is None else Joint(optimizer)] * len(self.modules)
        else:
            given = tuple(optimizer) if isinstance(optimizer, Sequence) else (optimizer,)
            if len(given) != len(self.modules):
                raise ConfigError(
                    f"There are {len(self.modules)} stages and {len(given)} optimizers (rank {self.handles[0].rank} of "
                    "its stage). Give one for each stage, or None."
                )
            joints = list(map(Joint, given))
        return [Part(*each) for each in zip(self.modules, self.handles, joints, strict=True)]

    def taking(
        self, optimizer: Optimizers | None, extra: Mapping[str, Any] | None, step: int, *, frozen: bool
    ) -> Callable[[], Taken]:
        """What takes the state, once all ranks of a pipeline have compared the names of their stages."""
        if self.stages is None:
            return lambda: _taken(self.parts(optimizer), None, None, extra, frozen)
        what = f"Naming the stages for step {step}"
        tied = {without_wrappers(later): without_wrappers(first) for later, first in self.stages.tied.items()}
        with together(self.collectives, what, {"tied": tied}):
            parts = self.parts(optimizer)
            outlines = [_Outline.of(part, tied) for part in parts]
        gathered = gather_to_first(self.collectives, outlines)
        with together(self.collectives, what):
            whole = None if gathered is None else _Outline.joined([each for rank in gathered for each in rank])
        return lambda: _taken(parts, outlines, whole, extra, frozen)

    def source_of(self, part: Part, source: StoredSource) -> Source:
        return source if self.stages is None else _StageSource(source, part)

    def refuse_left_over(self, source: StoredSource, parts: Sequence[Part]) -> None:
        """Raise ConfigError on all ranks where no stage has something that ``source`` holds."""
        if self.stages is None:
            # The model was asked for all of it.
            return
        own = {name for part in parts for name in part.names}
        gathered = gather_to_first(self.collectives, own)
        left: list[str] = []
        if gathered is not None:
            known = set().union(*gathered)
            same = source.aliases
            known |= {same[name] for name in known if name in same}
            known |= {name for name, first in same.items() if first in known}
            left = sorted({".".join(map(str, path[1:])) for path in source.paths(MODEL).values()} - known)
        left = from_first(self.collectives, left)
        if left:
            raise ConfigError(
                f"{opening(source)} has {listed(left)}, which no stage has (rank {self.collectives.rank}). Load it "
                "into all stages of the model that it was saved from."
            )


@dataclass(frozen=True)
class _Outline:
    """What a manifest says of a stage beside its tensors, or of all stages."""

    names: Sequence[str]
    aliases: Mapping[str, str]
    groups: Sequence[Sequence[str]] | None
    """Names of the parameters in each group of the optimizer; None where none is saved."""
    precision: Mapping[str, dict[str, Any]]
    left_out: frozenset[str] = frozenset()
    """Names of parameters that another stage saves."""
    is_first: bool = True
    """Whether it is that of the stage's first rank."""

    @classmethod
    def of(cls, part: Part, tied: Mapping[str, str]) -> _Outline:
        names, saved = part.names, saved_names(part.module)
        left_out = frozenset(later for later, first in tied.items() if later in names and first not in names)
        groups = None
        if part.joint is not None:
            named = names_by_group(part.sharded, part.joint.groups)
            groups = [[name for name in names if name not in left_out] for names in named]
        aliases = {name: first for name, first in names.items() if name != first}
        aliases.update({later: tied[later] for later in left_out})
        firsts = [first for first in dict.fromkeys(names.values()) if first in saved and first not in left_out]
        return cls(firsts, aliases, groups, precision_states(part.sharded), left_out, part.sharded.rank == 0)

    @classmethod
    def joined(cls, outlines: Sequence[_Outline]) -> _Outline:
        """That of the whole model.

        Raises ConfigError: two stages have a name, or optimizers of other numbers of groups.
        """
        firsts = [each for each in outlines if each.is_first]
        names: list[str] = [name for each in firsts for name in each.names]
        if len(set(names)) < len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(
                f"Several stages have {listed(twice)}. Give each part the names of the whole model, as a copy of it "
                "has from which the modules of others were deleted; name a parameter that two stages share in tied."
            )
        numbers = {None if each.groups is None else len(each.groups) for each in firsts}
        if len(numbers) > 1:
            raise ConfigError(
                f"The optimizers of stages have {sorted(map(str, numbers))} parameter groups. Give all of them as "
                "many, with the same settings, or save none."
            )
        groups = None
        if firsts and firsts[0].groups is not None:
            members = zip(*(each.groups or () for each in firsts), strict=True)
            groups = [list(chain.from_iterable(each)) for each in members]
        aliases = {name: first for each in firsts for name, first in each.aliases.items()}
        return cls(names, aliases, groups, {unit: state for each in firsts for unit, state in each.precision.items()})


def _taken(
    parts: Sequence[Part],
    outlines: Sequence[_Outline] | None,
    whole: _Outline | None,
    extra: Mapping[str, Any] | None,
    frozen: bool,
) -> Taken:
    """``outlines``: of ``parts``, and ``whole`` of all stages, on the rank that coordinates; None of a single model."""
    if outlines is None:
        whole, *_ = outlines = [_Outline.of(each, {}) for each in parts]
    beside = extra_of(extra)
    content: dict[str, Any] = {MODEL: {}}
    called: dict[str, object] = {}
    broken: list[str] = []
    for part, outline in zip(parts, outlines, strict=True):
        state = state_of(part.sharded, part.joint, frozen=frozen)
        broken += not_finite(state)
        own: dict[str, object] = {"frozen": frozen, "optimizer": str(part.joint and part.joint.signature)}
        own.update({} if part.joint is None else part.joint.settings())
        name = next((name for name in own if called and own[name] != called.get(name)), None)
        if name is not None:
            raise ConfigError(
                f"'{name}' is {called.get(name)} of one stage and {own[name]} of another (rank {part.sharded.rank}). "
                "Give the optimizers of all stages the same settings."
            )
        called = own
        content[MODEL].update({name: each for name, each in state[MODEL].items() if name not in outline.left_out})
        if OPTIMIZER in state:
            known = content.setdefault(OPTIMIZER, {"state": {}})
            known["param_groups"] = state[OPTIMIZER]["param_groups"]
            kept = {name: each for name, each in state[OPTIMIZER]["state"].items() if name not in outline.left_out}
            known["state"].update(kept)

    def document() -> Document:
        assert whole is not None
        complete, joint = dict(content), parts[0].joint
        if joint is not None and whole.groups is not None:
            named = zip(content[OPTIMIZER]["param_groups"], whole.groups, strict=True)
            joined = [
                {**group, **{key: list(names) for key in ("params", "param_names") if key in group}}
                for group, names in named
            ]
            complete[OPTIMIZER] = {**content[OPTIMIZER], "param_groups": joined}
        return Document.of(complete, whole.aliases, joint and joint.kind, whole.precision, beside)

    return Taken(content, broken, called, document)


class _StageSource(Source):
    """Of a checkpoint what one stage has: other names are not there."""

    def __init__(self, source: StoredSource, part: Part) -> None:
        self._source, aliases = source, source.aliases
        self.label, self.complete = source.label, source.complete
        own = part.names
        saved = {path[2] for path in source.paths(OPTIMIZER, "state").values()}
        #: Names in the stage, and in the saved optimizer: a tied parameter is saved under one of its names.
        self._names = {name: aliases.get(name, name) if name not in saved else name for name in own}
        self._inner: dict[str, str] = {}
        self._paths = {key: path for key, path in source.paths(MODEL).items() if ".".join(map(str, path[1:])) in own}
        self._paths |= source.paths(OPTIMIZER, "param_groups")
        by_name: dict[str, list[tuple[str, tuple[Any, ...]]]] = {}
        for key, path in source.paths(OPTIMIZER, "state").items():
            by_name.setdefault(path[2], []).append((key, path))
        for name, first in self._names.items():
            for key, path in by_name.get(first, ()):
                mine = key if name == first else f"{key}\0of\0{name}"
                self._inner[mine] = key
                self._paths[mine] = (*path[:2], name, *path[3:])

    @override
    def read(self, targets: dict[str, Any]) -> None:
        inner = {self._inner.get(key, key): target for key, target in targets.items()}
        self._source.read(inner)
        for key in targets:
            value = inner[self._inner.get(key, key)]
            path = self._paths[key]
            if path[:2] == (OPTIMIZER, "param_groups") and path[3] in ("params", "param_names"):
                value = [name for name, first in self._names.items() if first in set(value) or name in set(value)]
            targets[key] = value

    @override
    def entry(self, key: str) -> Entry | None:
        return self._source.entry(self._inner.get(key, key))
