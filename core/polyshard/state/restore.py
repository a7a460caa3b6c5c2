"""Matches a source with a model and an optimizer before anything is read, and takes over what was read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..inspect import (
    NOT_BY_ELEMENT,
    Blocks,
    ShardedModel,
    blocks_of,
    put_together,
    role_of,
    taken_apart,
)
from .blocks import Coming, SavedBlocks, is_in_blocks
from .contents import Joint, Kind, compared_entries, frozen_names, kind_of, model_state, names_within
from .initial import exchanges
from .sharded import MODEL, OPTIMIZER, CheckpointTensor, Holding, holdings
from .source import (
    SavedState,
    Source,
    fits,
    in_lines,
    listed,
    opening,
    problem_with,
    resembles,
    same_values,
)

#: How a step is carried out, not what it computes: left as the optimizer was made.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
#: Settings that are neither compared nor loaded.
_LEFT_ALONE = _IMPLEMENTATION | {"params", "param_names"}
#: For a flat parameter that differs from the parameters that it stands for.
_REMEDY = "Give the optimizer model.parameters() instead."


@dataclass(frozen=True, slots=True)
class Unmatched:
    """Names of a model and of a state dict that the other one lacks."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


class Restore:
    """Values of a model and an optimizer on their way out of a source.

    Made before anything is read. ``targets`` are to be filled from the source, and ``commit`` then hands the optimizer
    its own: it is as it was until then, but for state tensors that it had already and that are read into in place.
    """

    def __init__(
        self,
        source: Source,
        sharded: ShardedModel,
        optimizer: Joint | None,
        kind: Kind | None = None,
        *,
        model: bool = True,
        strict: bool = True,
        frozen: bool = True,
        whole_state: bool = False,
    ) -> None:
        """Match ``sharded``, unless without ``model``, and ``optimizer``, where there is one, with the source's.

        ``kind``: the optimizer's saved class; None where the source does not name it. ``strict``, ``frozen``: whether
        all of the model's names, and those that need no gradient, must be in both. ``whole_state``: whether an
        optimizer that has state for one trained parameter must have some for all.

        Raises ConfigError: they do not fit.
        """
        self.targets: dict[str, Any] = {}
        self.unmatched = Unmatched()
        if model:
            self.targets, self.unmatched = _match_model(source, sharded, strict=strict, frozen=frozen)
        self._optimizer = None if optimizer is None else _OptimizerRestore(source, sharded, optimizer, kind)
        if self._optimizer is not None:
            if whole_state:
                self._optimizer.refuse_without_state()
            self.targets.update(self._optimizer.targets)

    def commit(self) -> None:
        if self._optimizer is not None:
            self._optimizer.commit()


def _match_model(
    source: Source, sharded: ShardedModel, *, strict: bool, frozen: bool
) -> tuple[dict[str, Any], Unmatched]:
    """The tensors of ``sharded`` by key of the source; a tied parameter is taken from any of its names.

    Raises ConfigError: the source lacks parameters or buffers, has more, or has some of another shape or dtype: all
    that is wrong.
    """
    wanted = model_state(sharded)
    for unit in sharded.units:
        unit.refuse_added("Loading")
    saved = {".".join(map(str, path[1:])): key for key, path in source.paths(MODEL).items()}
    names = names_within(sharded)
    needing_none = frozen_names(sharded)
    optional = set() if frozen else needing_none
    where = f"(rank {sharded.rank})"
    remedy = "Load it into the model that it was saved from."
    targets: dict[str, Any] = {}
    missing: list[str] = []
    wrong: list[str] = []
    for name, value in wanted.items():
        key = next((saved[each] for each in names.get(name, (name,)) if each in saved), None)
        if key is not None:
            targets[key] = value
            problem = problem_with(source, key, f"'{name}'", value, where)
            wrong += [] if problem is None else [problem]
        elif name not in optional and (source.complete or not isinstance(value, CheckpointTensor) or value.chunks):
            missing.append(name)
    known = {each for name in wanted for each in names.get(name, (name,))}
    unexpected = [name for name in saved if name not in known]
    if unexpected and strict:
        wrong.insert(0, f"{opening(source)} has {listed(unexpected)}, which the model lacks {where}. {remedy}")
    if missing and strict:
        if needing_none.issuperset(missing):
            remedy = (
                "They need no gradient: if they were left out on purpose, let the model have their values, and "
                "load with frozen=False."
            )
        wrong.insert(0, f"{opening(source)} has no {listed(missing)} {where}. {remedy}")
    compared = {saved[name]: name for name in compared_entries(sharded) if name in saved}
    if compared and not wrong:
        values: dict[str, Any] = {key: source.blank(key) for key in compared}
        source.read(values)
        wrong += [
            f"{opening(source)} has '{name}' otherwise than the model {where}: its bytes were quantized in another "
            "way. Load it into the model that it was saved from, quantized as it was then."
            for key, name in compared.items()
            if not same_values(values[key].cpu(), wanted[name].cpu())
        ]
    if wrong:
        raise ConfigError(in_lines(wrong))
    return targets, Unmatched(tuple(missing), tuple(unexpected))


class _OptimizerRestore:
    """The optimizer's part of ``Restore``."""

    def __init__(self, source: Source, sharded: ShardedModel, optimizer: Joint, kind: Kind | None) -> None:
        """Match ``optimizer`` with the source's. ``kind``: the saved class; None where the source does not name it.

        Raises ConfigError: they do not fit.
        """
        self._optimizer = optimizer
        self._rank = sharded.rank
        self._source = source
        held = holdings(sharded, optimizer.groups)
        self._settings = self._read_settings()
        self._compare_groups(held)
        self._require_same_kinds(kind)
        self.targets: dict[str, Any] = {}
        #: All of the optimizer's parameters: of those without elements here torch's functions ask for the state, too.
        self._coming: list[Coming] = []
        #: What is no tensor, or one for all parameters of a flat one: its name, and keys by parameter.
        self._once: list[tuple[Coming, str, Mapping[str, str]]] = []
        saved: dict[str, dict[str, str]] = {}
        for key, path in source.paths(OPTIMIZER, "state").items():
            saved.setdefault(path[2], {})[path[3]] = key
        if kind is None:
            self._refuse_full_precision(held, saved)
        self._numbers = self._names_of_numbers(held.values(), saved)
        wrong: list[str] = []
        for group in optimizer.groups:
            for parameter in group["params"]:
                holding = held[parameter]
                own: dict[str, Mapping[str, str]] = {each: saved.get(each, {}) for each in holding.names}
                blocks = self._blocks_of(parameter, holding, own)
                coming = Coming(parameter, holding, group, optimizer.state_of(parameter))
                self._coming.append(coming)
                try:
                    if blocks is not None:
                        own[holding.names[0]] = self._match_blocks(coming, own[holding.names[0]], blocks)
                except ConfigError as error:
                    wrong.append(str(error))
                    continue
                for name in dict.fromkeys(name for keys in own.values() for name in keys):
                    try:
                        self._match(coming, name, {each: keys[name] for each, keys in own.items() if name in keys})
                    except ConfigError as error:
                        wrong.append(str(error))
        if wrong:
            raise ConfigError(in_lines(wrong))
        self._read_scalars()

    def refuse_without_state(self) -> None:
        """Raise ConfigError where trained parameters would be without state, and others of their optimizer have some.

        A parameter that got no gradient before the save has none, and so it is everywhere for what needs none.
        """
        coming: dict[torch.optim.Optimizer, list[Coming]] = {}
        for each in self._coming:
            coming.setdefault(self._optimizer.optimizer_of(each.parameter), []).append(each)
        for optimizer, held in coming.items():
            without = [each.holding for each in held if not each.state and each.parameter.requires_grad]
            lacking = [own.name for holding in without for own in holding.stands_for if own.box is not None]
            # Of replicas that share their work, each has the state of other parameters.
            if lacking and not exchanges(optimizer) and any(each.state for each in held):
                raise ConfigError(
                    f"{opening(self._source)} has no optimizer state of {listed(lacking)}, which are trained, and has "
                    f"that of others (rank {self._rank}): they would begin anew. Give all of it; or "
                    "StateOptions(strict=False), where they got no gradient before the save."
                )

    def commit(self) -> None:
        """Give the optimizer what was read into ``targets``, and what was read before."""
        for each in self._coming:
            found = each.state
            if found and each.like is not None:
                found = put_together(found, each.like, each.holding.parameter.shape)
            self._optimizer.replace_state(each.parameter, found, self._numbers)
        for group, settings in zip(self._optimizer.groups, self._settings, strict=True):
            for name, value in settings.items():
                if name in _LEFT_ALONE:
                    continue
                if isinstance(group.get(name), torch.Tensor):
                    # In place: a captured step reads the learning rate at this address.
                    group[name].copy_(torch.as_tensor(value))
                else:
                    group[name] = value

    def _blocks_of(
        self, parameter: nn.Parameter, holding: Holding, own: Mapping[str, Mapping[str, str]]
    ) -> Blocks | None:
        """The optimizer's blocks, where the source has the state of ``parameter`` in some; None where it has not."""
        name = next((each for each, keys in own.items() if is_in_blocks(keys)), None)
        blocks = None if holding.unit is not None else self._optimizer.blocks_of(parameter)
        if name is not None and blocks is None:
            what = "the optimizer" if holding.unit is None else holding.label
            raise ConfigError(
                f"{opening(self._source)} has optimizer state of '{name}' in blocks of a few bits, and {what} has it "
                f"for single elements in full precision (rank {self._rank}). Load it into the optimizer that saved it, "
                "over model.parameters(), or load without the optimizer."
            )
        return None if name is None else blocks

    def _match_blocks(self, coming: Coming, keys: Mapping[str, str], blocks: Blocks) -> Mapping[str, str]:
        """Match the state in blocks of one parameter; returns what is left of ``keys``."""
        found = SavedBlocks(self._source, coming, keys, blocks, self._rank)
        self.targets.update(found.targets)
        if any(map(role_of, coming.state)):
            coming.like = coming.present
            if not coming.state.keys() <= taken_apart(coming.present).keys():
                coming.like = self._optimizer.like_in_blocks(coming.parameter, coming.group)
            known = taken_apart(coming.like)
            for name, tensor in coming.state.items():
                own = known.get(name)
                if role_of(name) and (not isinstance(own, torch.Tensor) or own.dtype != tensor.dtype):
                    raise ConfigError(
                        f"{opening(self._source)} has '{name}' of {coming.holding.label} in {tensor.dtype}, which the "
                        f"optimizer does not make (rank {self._rank}). Load it into the optimizer that saved it."
                    )
        return found.left

    def _refuse_full_precision(self, held: Mapping[nn.Parameter, Holding], saved: SavedState) -> None:
        """Raise where an optimizer with states in blocks is given those of one that has none, by all that is seen."""
        for each in self._optimizer.members:
            blocks = blocks_of(each)
            parameters = [own for group in each.param_groups for own in group["params"]] if blocks else []
            states = {own: saved.get(held[own].names[0], {}) for own in parameters}
            if blocks is None or any(map(is_in_blocks, states.values())):
                continue
            for own, keys in states.items():
                numel, whole = held[own].parameter.numel(), held[own].stands_for[0]
                entries = [self._source.entry(key) for key in keys.values()]
                by_element = any(entry is not None and entry.shape == whole.shape for entry in entries)
                if by_element and blocks.divides(numel) and not self._optimizer.state_of(own):
                    raise ConfigError(
                        f"{opening(self._source)} has optimizer state of '{whole.name}' in full precision, and "
                        f"{type(each).__name__} keeps that of {numel} elements in blocks of a few bits (rank "
                        f"{self._rank}). Make the optimizer as it was when it was saved, or load without it; where "
                        "all pieces were too small for blocks, load at the number of ranks that saved it."
                    )

    def _names_of_numbers(self, held: Iterable[Holding], saved: SavedState) -> frozenset[str]:
        """Names of states that are one number for a parameter, not one for each element: the same for a scalar one.

        Seen at the other parameters; where there are none, ``torch.optim`` is asked.
        """
        shapes = {each.name: each.shape for holding in held for each in holding.stands_for}
        numbers: set[str] = set()
        elements: set[str] = set()
        for parameter, states in saved.items():
            shape = shapes.get(parameter, ())
            for name, key in states.items() if shape else ():
                entry = self._source.entry(key)
                if entry is not None:
                    (elements if entry.shape == shape else numbers).add(name)
        return frozenset(numbers | NOT_BY_ELEMENT) - elements

    def _read_settings(self) -> list[dict[str, Any]]:
        paths = self._source.paths(OPTIMIZER, "param_groups")
        if not paths:
            raise ConfigError(
                f"{opening(self._source)} holds no optimizer (rank {self._rank}). Load it without one, "
                "or choose one that was saved with its optimizer."
            )
        values: dict[str, Any] = {key: self._source.blank(key) for key in paths}
        self._source.read(values)
        settings: list[dict[str, Any]] = [{} for _ in range(1 + max(path[2] for path in paths.values()))]
        for key, path in paths.items():
            settings[path[2]][path[3]] = values[key]
        for each in settings:
            each["params"] = list(map(self._source.named, each["params"]))
        return settings

    def _require_same_kinds(self, saved: Kind | None) -> None:
        """Refuse a source whose state other kinds of optimizers made.

        ``saved``: ``Joint.kind`` at the save; None where the source does not name the classes.

        Raises ConfigError: naming the classes, or the setting.
        """
        members = self._optimizer.members
        kinds = [saved] if saved is None or isinstance(saved, Mapping) else list(saved)
        if saved is not None and len(kinds) != len(members):
            names = ", ".join(kind["class"] for kind in kinds if kind is not None)
            raise ConfigError(
                f"{opening(self._source)} was saved by {len(kinds)} optimizers ({names}), and is loaded into "
                f"{len(members)} (rank {self._rank}). Give those that saved it, in the same order."
            )
        saved_groups = iter(self._settings)
        for optimizer, kind in zip(members, kinds * (len(members) // len(kinds)), strict=True):
            self._require_same_kind(kind, islice(saved_groups, len(optimizer.param_groups)), optimizer)

    def _require_same_kind(
        self, saved: Mapping[str, str] | None, groups: Iterable[Mapping[str, Any]], optimizer: torch.optim.Optimizer
    ) -> None:
        """Refuse ``groups`` of settings that ``optimizer`` is not of.

        Numbers such as the learning rate may differ: the checkpoint's are taken. Settings that are on or off, None or
        something, may not, nor whether there is a momentum: they decide which state there is, or its meaning.
        """
        mine = kind_of(optimizer)
        if saved is not None and saved["class"] != mine["class"]:
            raise ConfigError(
                f"{opening(self._source)} was saved by {saved['module']}.{saved['class']}, whose state means nothing "
                f"to {mine['module']}.{mine['class']} (rank {self._rank}). Load it with the optimizer that saved it, "
                "or without one."
            )
        if saved is not None and saved.get("block") != mine.get("block"):
            was, here = (
                "in full precision" if each.get("block") is None else f"in blocks of {each['block']} elements"
                for each in (saved, mine)
            )
            raise ConfigError(
                f"{opening(self._source)} was saved by {saved['class']} with states {was}, and the optimizer keeps "
                f"them {here} (rank {self._rank}). Make it as it was when it was saved, or load without it."
            )
        for index, (group, settings) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            different = [
                f"'{name}' was {settings[name]!r} and is {group[name]!r}"
                for name in sorted((settings.keys() & group.keys()) - _LEFT_ALONE)
                if _choice(name, settings[name]) != _choice(name, group[name])
                or not resembles(settings[name], group[name])
            ]
            if saved != mine:
                # Of a class of the same name, or where the source names none, the settings' names are the best witness.
                different += [
                    f"'{name}' is missing in the checkpoint"
                    for name in sorted(optimizer.defaults.keys() - settings.keys())
                ]
                different += [
                    f"'{name}' is missing in the optimizer"
                    for name, value in sorted(settings.items())
                    if name not in group and name not in _LEFT_ALONE and (value is None or isinstance(value, bool))
                ]
            if different:
                raise ConfigError(
                    f"Group {index} of the optimizer does not fit the state in {self._source.label} (rank "
                    f"{self._rank}): {'; '.join(different)}. Make the optimizer, here {mine['class']}, as it was when "
                    "it was saved, or load without it."
                )

    def _compare_groups(self, held: Mapping[nn.Parameter, Holding]) -> None:
        groups = self._optimizer.groups
        where = f"(rank {self._rank})"
        if len(groups) != len(self._settings):
            raise ConfigError(
                f"{opening(self._source)} has {len(self._settings)} parameter groups, the optimizer "
                f"{len(groups)} {where}. Make the optimizer as it was when the checkpoint was saved."
            )
        for index, (group, settings) in enumerate(zip(groups, self._settings, strict=True)):
            names = {name for parameter in group["params"] for name in held[parameter].names}
            different = sorted(names ^ set(settings["params"]))
            if different:
                raise ConfigError(
                    f"Group {index} of the optimizer and of {self._source.label} differ in "
                    f"{listed(different)} {where}. Make the optimizer as it was when the checkpoint was saved."
                )

    def _read_scalars(self) -> None:
        """Read what is no tensor, and what flat parameters have once and the source many times; see that it can be."""
        scalars: dict[str, Any] = {key: self._source.blank(key) for *_, keys in self._once for key in keys.values()}
        if scalars:
            self._source.read(scalars)
        for coming, name, keys in self._once:
            (first, key), *others = keys.items()
            value, present, holding = scalars[key], coming.present.get(name), coming.holding
            for other, other_key in others:
                if not same_values(value, scalars[other_key]):
                    raise ConfigError(
                        f"optimizer state '{name}' is {_shown(value)} for '{first}' but {_shown(scalars[other_key])} "
                        f"for '{other}' in {self._source.label}, and {holding.label} has one for both (rank "
                        f"{self._rank}). {_REMEDY}"
                    )
            # Where there is none now, it is compared with what torch's optimizers have of this name.
            like = 0.0 if present is None and name in NOT_BY_ELEMENT else present
            if value is not None and not resembles(value, like):
                raise ConfigError(
                    f"optimizer state '{name}' of {holding.label} is {value!r} in {self._source.label}, which no "
                    f"optimizer has (rank {self._rank}). Load an older checkpoint, or load without its optimizer."
                )
            if isinstance(value, torch.Tensor):
                if fits(present, value.shape, value.dtype):
                    # In place, as other tensors: a captured step reads it at this address.
                    self.targets[key] = value = present.detach()
                elif value.ndim or _on_parameters_device(coming.group):
                    value = value.to(holding.parameter.device)
            coming.state[name] = value

    def _match(self, coming: Coming, name: str, keys: Mapping[str, str]) -> None:
        """Match a state, with its ``keys`` by parameter's name, and find where it goes; existing tensors in place."""
        source, holding, where = self._source, coming.holding, f"(rank {self._rank})"
        what = f"optimizer state '{name}' of {holding.label}"
        present = coming.present.get(name)
        # What is in blocks now takes nothing of single elements.
        present = present if name in taken_apart({name: present}) else None
        entries = {each: source.entry(key) for each, key in keys.items()}
        shapes = {each.name: each.shape for each in holding.stands_for}
        if holding.unit is not None:
            self._require_all(holding, name, keys)
        if name not in self._numbers and all(each and each.shape == shapes[one] for one, each in entries.items()):
            dtype, *others = {each.dtype for each in entries.values() if each is not None}
            if others:
                raise ConfigError(
                    f"optimizer state '{name}' of {listed(list(keys))} has several dtypes in {source.label}, but "
                    f"{holding.label} has one {where}. {_REMEDY}"
                )
            tensor = self._tensor(present, tuple(holding.parameter.shape), dtype, what, like=holding.parameter)
            if holding.unit is not None:
                _clear_padding(holding, tensor)
            coming.state[name] = tensor
            for each, target in holding.parts(tensor).items():
                if each in keys:
                    self._aim(keys[each], f"optimizer state '{name}' of '{each}'", target)
            return
        for each, entry in entries.items():
            if entry is not None and holding.partial and math.prod(entry.shape) != 1:
                raise ConfigError(
                    f"optimizer state '{name}' of '{each}' has shape {entry.shape} in {source.label}, neither a scalar "
                    f"nor the parameter's shape {shapes.get(each)}, so there is no part of it for {holding.label} "
                    f"{where}. Load it with the strategy that saved it, or without its optimizer."
                )
        entry = entries[next(iter(keys))]
        if entry is None or holding.unit is not None:
            self._once.append((coming, name, keys))
            return
        tensor = self._tensor(present, entry.shape, entry.dtype, what)
        if tensor is not present and (entry.shape or _on_parameters_device(coming.group)):
            tensor = tensor.to(holding.parameter.device)
        coming.state[name] = tensor
        self._aim(keys[holding.names[0]], what, tensor)

    def _tensor(
        self, present: Any, shape: tuple[int, ...], dtype: torch.dtype, what: str, like: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What is to be filled: what is ``present``, if it fits, or zeros. Raises ConfigError: it has another dtype."""
        if isinstance(present, torch.Tensor) and present.dtype != dtype:
            raise ConfigError(
                f"{what} is {dtype} in {self._source.label} but {present.dtype} in the optimizer (rank {self._rank}). "
                "Load it into an optimizer of the dtypes that it was saved from."
            )
        if fits(present, shape, dtype):
            return present.detach()
        if like is None:
            return torch.zeros(shape, dtype=dtype)
        # In its order of memory, but plain.
        made = torch.zeros_like(like, dtype=dtype)
        return made if type(made) is torch.Tensor else torch.zeros(made.shape, dtype=dtype, device=made.device)

    def _aim(self, key: str, what: str, target: torch.Tensor) -> None:
        wrong = problem_with(self._source, key, what, target, f"(rank {self._rank})")
        if wrong is not None:
            raise ConfigError(wrong)
        self.targets[key] = target

    def _require_all(self, holding: Holding, name: str, keys: Mapping[str, str]) -> None:
        # Empty parameters may have none: no rank has a part of them. One rank of a pretended world saved its own parts.
        own, complete = holding.stands_for, self._source.complete
        needed = [each.name for each in own if (0 not in each.shape if complete else each.box is not None)]
        missing = [each for each in needed if each not in keys]
        if missing:
            raise ConfigError(
                f"{opening(self._source)} has optimizer state '{name}' of {listed(list(keys))} but not of "
                f"{listed(missing)}, and {holding.label} has it for all (rank {self._rank}). {_REMEDY}"
            )


def _clear_padding(holding: Holding, flat: torch.Tensor) -> None:
    cursor = 0
    for each in holding.stands_for:
        if each.box is not None:
            flat[cursor : each.start].zero_()
            cursor = each.start + each.box.numel
    flat[cursor:].zero_()


def _shown(value: Any) -> str:
    return str(value.tolist()) if isinstance(value, torch.Tensor) else repr(value)


def _choice(name: str, value: Any) -> object:
    if value is None or isinstance(value, bool):
        return value
    return bool(value != 0) if name == "momentum" else "a value"


def _on_parameters_device(group: Mapping[str, Any]) -> bool:
    """Whether 0-dim state lies on the parameter's device: torch's optimizers keep it there if a kernel reads it."""
    return bool(group.get("capturable")) or bool(group.get("fused"))
