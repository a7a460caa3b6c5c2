"""One checkpoint of all stages of a pipeline, under the names of the whole model.

It is a checkpoint as ``save`` writes them: any number of stages loads it, and so does a model without any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import registry
from ..errors import ConfigError
from ..inspect import ShardedModel, savable_model
from ..interfaces import Collectives, Group, PluginContext
from ..state.contents import Joint, saved_names
from ..state.exchange import from_first, gather_to_first, together
from ..state.sharded import MODEL, OPTIMIZER, holdings
from ..state.source import Entry, Source, listed, opening
from .contents import caster_states, extra_of
from .loading import Part, load_parts
from .pending import History, PendingSave
from .reading import StoredSource
from .saving import Taken, save_later, save_now, take
from .storage import AnyPlace, Place
from .writing import Document


def save_stages(
    root: AnyPlace,
    step: int,
    stages: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    tied: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    frozen: bool = True,
) -> AnyPlace:
    """Write ``root/step-00000100`` for step 100 of a pipeline; returns that directory.

    As ``save``, of several models that are parts of one: every rank of the pipeline calls it, with its own. Parameters
    and buffers of a part have the names that they have in the whole model.

    Args:
        root, step, keep, frozen: As in ``save``.
        stages: This rank's parts of the model, the outermost sharded modules.
        optimizers: One for each of ``stages``, of one class and with groups of the same settings on all ranks; None to
            save none.
        group: All ranks of the pipeline; those of the job where None.
        tied: For parameters that two stages have one each of: the name in the later one, and that in the earlier one,
            which is saved.
        extra: As in ``save``; of the first rank.

    Raises what ``save`` does, and:

    Raises:
        ConfigError: two stages have a name; on all ranks. Or there are not as many optimizers as stages.
    """
    models = _models(stages, "checkpoint.save_stages()")
    with _everyone(models, group) as everyone:
        parts, taking = _named(everyone, stages, models, optimizers, step, tied or {}, extra, frozen=frozen)
        return save_now(everyone, parts, root, step, keep, taking)


def async_save_stages(
    root: AnyPlace,
    step: int,
    stages: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    tied: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    frozen: bool = True,
) -> PendingSave[AnyPlace]:
    """As ``save_stages``, with the writing in the background, as ``async_save`` does it for one model.

    Returns:
        The pending save, to be asked by ``done()`` and ``result(timeout)``.

    Raises what ``save_stages`` does, but for what happens in the background.
    """
    models = _models(stages, "checkpoint.async_save_stages()")
    with _everyone(models, group) as everyone:
        parts, taking = _named(everyone, stages, models, optimizers, step, tied or {}, extra, frozen=frozen)
        return save_later(everyone, parts, root, step, keep, taking)


def load_stages(
    directory: Place,
    stages: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    frozen: bool = True,
) -> Mapping[str, Any]:
    """Read a checkpoint into the stages of a pipeline and their optimizers; returns ``extra``.

    Of any number of stages, or of a model that ``save`` wrote whole. Every rank of the pipeline calls it.

    Args:
        directory: What ``save_stages``, ``save`` or ``latest`` returned.
        stages, group: As in ``save_stages``.
        optimizers: As in ``save_stages``; None leaves saved ones alone.
        frozen: As in ``load``.

    Raises what ``load`` does, and:

    Raises:
        ConfigError: no stage has something that the checkpoint holds; on all ranks.
    """
    models = _models(stages, "checkpoint.load_stages()")
    for each in models:
        each.attached(History).finish_pending(each)
    with _everyone(models, group) as everyone:
        left_over = partial(_refuse_left_over, everyone)
        return load_parts(everyone, directory, lambda: _parts(stages, models, optimizers), {}, left_over, frozen=frozen)


@dataclass(frozen=True)
class _Stage(Part):
    def source_in(self, source: StoredSource) -> Source:
        return _StageSource(source, self)

    def outline(self, tied: Mapping[str, str]) -> _Outline:
        names, saved = self.names, saved_names(self.module)
        left_out = frozenset(later for later, first in tied.items() if later in names and first not in names)
        groups = None
        if self.joint is not None:
            held = holdings(self.sharded, self.joint.groups)
            groups = [
                [name for each in group["params"] for name in held[each].names if name not in left_out]
                for group in self.joint.groups
            ]
        aliases = {name: first for name, first in names.items() if name != first}
        aliases.update({later: tied[later] for later in left_out})
        firsts = [first for first in dict.fromkeys(names.values()) if first in saved and first not in left_out]
        return _Outline(firsts, aliases, groups, caster_states(self.sharded), left_out, self.sharded.rank == 0)


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
    parts: Sequence[_Stage],
    outlines: Sequence[_Outline],
    whole: _Outline | None,
    extra: Mapping[str, Any] | None,
    *,
    frozen: bool,
) -> Taken:
    beside = extra_of(extra)
    model: dict[str, Any] = {}
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    called: dict[str, object] = {}
    broken: list[str] = []
    for part, outline in zip(parts, outlines, strict=True):
        optimizer = None if part.joint is None else part.joint.members[0]
        taken = take(part.sharded, part.module, optimizer, None, frozen=frozen)
        broken += taken.broken
        if called and called != taken.called:
            name = next(name for name in taken.called if taken.called[name] != called.get(name))
            raise ConfigError(
                f"'{name}' is {called.get(name)} of one stage and {taken.called[name]} of another (rank "
                f"{part.sharded.rank}). Give the optimizers of all stages the same settings."
            )
        called = dict(taken.called)
        model.update({name: each for name, each in taken.state[MODEL].items() if name not in outline.left_out})
        own = taken.state.get(OPTIMIZER, {})
        state.update({name: each for name, each in own.get("state", {}).items() if name not in outline.left_out})
        groups = own.get("param_groups", groups)
    content: dict[str, Any] = {MODEL: model}
    if called["optimizer"] != str(None):
        content[OPTIMIZER] = {"state": state, "param_groups": groups}

    def document() -> Document:
        assert whole is not None
        complete = dict(content)
        if whole.groups is not None:
            named = zip(groups, whole.groups, strict=True)
            joined = [
                {**group, **{key: list(names) for key in ("params", "param_names") if key in group}}
                for group, names in named
            ]
            complete[OPTIMIZER] = {"state": state, "param_groups": joined}
        kind = None if parts[0].joint is None else parts[0].joint.kind
        return Document.of(complete, whole.aliases, kind, whole.precision, beside)

    return Taken(content, broken, called, document)


class _StageSource(Source):
    """Of a checkpoint what one stage has: other names are not there."""

    def __init__(self, source: StoredSource, part: _Stage) -> None:
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

    def read(self, targets: dict[str, Any]) -> None:
        inner = {self._inner.get(key, key): target for key, target in targets.items()}
        self._source.read(inner)
        for key in targets:
            value = inner[self._inner.get(key, key)]
            path = self._paths[key]
            if path[:2] == (OPTIMIZER, "param_groups") and path[3] in ("params", "param_names"):
                value = [name for name, first in self._names.items() if first in set(value) or name in set(value)]
            targets[key] = value

    def entry(self, key: str) -> Entry | None:
        return self._source.entry(self._inner.get(key, key))


def _named(
    everyone: Collectives,
    stages: Sequence[nn.Module],
    models: Sequence[ShardedModel],
    optimizers: Sequence[torch.optim.Optimizer] | None,
    step: int,
    tied: Mapping[str, str],
    extra: Mapping[str, Any] | None,
    *,
    frozen: bool,
) -> tuple[Sequence[tuple[ShardedModel, nn.Module]], Callable[[], Taken]]:
    """This rank's stages, whose names all ranks have compared; and what takes their state."""
    what = f"Naming the stages for step {step}"
    with together(everyone, what):
        parts = _parts(stages, models, optimizers)
        outlines = [part.outline(tied) for part in parts]
    gathered = gather_to_first(everyone, outlines)
    with together(everyone, what):
        whole = None if gathered is None else _Outline.joined([each for rank in gathered for each in rank])

    def taking() -> Taken:
        taken = _taken(parts, outlines, whole, extra, frozen=frozen)
        return replace(taken, called={**taken.called, "tied": dict(tied)})

    return [(part.sharded, part.module) for part in parts], taking


def _models(stages: Sequence[nn.Module], call: str) -> list[ShardedModel]:
    if not stages:
        raise ConfigError(f"{call} got no stages. Give this rank's parts of the model.")
    return [savable_model(module, call) for module in stages]


def _parts(
    stages: Sequence[nn.Module], models: Sequence[ShardedModel], optimizers: Sequence[torch.optim.Optimizer] | None
) -> list[_Stage]:
    if optimizers is not None and len(optimizers) != len(stages):
        raise ConfigError(
            f"There are {len(stages)} stages and {len(optimizers)} optimizers (rank {models[0].rank} of its stage). "
            "Give one for each stage, or None."
        )
    joints = [None] * len(stages) if optimizers is None else list(map(Joint, optimizers))
    return [_Stage(*each) for each in zip(stages, models, joints, strict=True)]


@contextmanager
def _everyone(models: Sequence[ShardedModel], group: dist.ProcessGroup | None) -> Iterator[Collectives]:
    """Collectives of all ranks of the pipeline."""
    context = PluginContext(
        name="",
        device=models[0].collectives.device,
        process_group=group,
        timeout=timedelta(seconds=models[0].timeout_s),
    )
    made: Collectives = registry.construct(registry.resolve(Group.COLLECTIVES, "auto"), context).instance
    with ExitStack() as stack:
        for each in models:
            stack.enter_context(each.meeting("checkpoint of a pipeline", ()))
        yield made


def _refuse_left_over(everyone: Collectives, source: StoredSource, parts: Sequence[Part]) -> None:
    """Raise on all ranks where no stage has something that ``source`` holds."""
    own = {name for part in parts for name in part.names}
    gathered = gather_to_first(everyone, own)
    left: list[str] = []
    if gathered is not None:
        known = set().union(*gathered)
        same = source.aliases
        known |= {same[name] for name in known if name in same}
        known |= {name for name, first in same.items() if first in known}
        left = sorted({".".join(map(str, path[1:])) for path in source.paths(MODEL).values()} - known)
    left = from_first(everyone, left)
    if left:
        raise ConfigError(
            f"{opening(source)} has {listed(left)}, which no stage has (rank "
            f"{everyone.rank}). Load it into all stages of the model that it was saved from."
        )
