"""Whole weights for engines that read models of Hugging Face: adapters merged, and tensors as files have them."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import polyshard
import torch
from polyshard.errors import ConfigError, UnsupportedError
from polyshard.inspect import ShardedModel, savable_part, saved_buffers, saved_name, saved_parameters
from polyshard.state.contents import names_within
from polyshard.state.source import listed
from polyshard.state.streaming import Ranks, Weights, copy_kept
from torch import nn
from typing_extensions import override

from . import _private
from .conversion import Conversion, Held, Outcomes, Step, foreseen, joined, tensors_of


def merged(
    model: nn.Module,
    *,
    adapters: Collection[str] | None = None,
    dtype: torch.dtype | None = None,
    bucket_nbytes: int | None = None,
    ranks: Ranks = "all",
) -> Generator[Weights, None, None]:
    """``polyshard.stream`` of a model with adapters of PEFT, merged into the weights of the base model.

    Under the base model's own names, to the bit what ``merge_and_unload()`` makes of the unsharded model: each layer's
    own ``merge`` works on whole weights. The sharded model stays as it is. Adapters are gathered first and kept, then
    the base model unit by unit. Weights travel in the dtype in which they are kept: they are cast behind the merge.

    Args:
        model: What ``get_peft_model`` or ``inject_adapter_in_model`` made, sharded or inside a sharded model.
        adapters: Names of those to merge; None for the active ones.
        dtype: In which floating-point tensors are handed out; None for the dtype in which they are kept.
        bucket_nbytes: As in ``polyshard.stream``.
        ranks: As in ``polyshard.stream``.

    Raises:
        ConfigError: no layer has an adapter of such a name, or as ``polyshard.stream``.
        UnsupportedError: PEFT cannot merge an adapter layer by layer, or has merged it already.
        StateError, RankMismatchError, CollectiveError: as ``polyshard.stream``.
    """
    sharded, module = savable_part(model, "merged()")
    base = _base_of(module)
    names = _Names(base, adapters)
    layers = _layers(sharded, module, names, adapters)
    factors = {name for layer in layers for name in layer.factors}
    settings: dict[str, Any] = {"bucket_nbytes": bucket_nbytes, "ranks": ranks}
    first = polyshard.stream(base, names=lambda name: name if name in factors else None, **settings)
    return _merged(layers, first, lambda: polyshard.stream(base, names=names.renamed, **settings), dtype)


def as_saved(
    model: nn.Module, weights: Iterable[Weights], *, convert: Conversion | None = None
) -> Generator[Weights, None, None]:
    """What ``weights`` hands out, in the names and shapes that ``save`` writes: a list for each list.

    For models of Transformers whose modules differ from their files, as where the experts of a layer are one tensor:
    engines read names and shapes of files. ``as_saved(model, polyshard.stream(model))``, and the same around
    ``merged(model)``. A tensor comes when the last of those came that it is made of: what waits for another list is
    kept.

    Args:
        model: What ``weights`` is of.
        weights: ``polyshard.stream`` of ``model`` or ``merged``, with the names that these give by themselves.
        convert: As in ``save``.

    Raises:
        ConfigError: ``weights`` hands out another name, or a part of what makes a tensor; a conversion fails.
        UnsupportedError: a conversion has no way back.
        StateError: inside a step, or ``model`` is in no sharded model.
    """
    sharded, module = savable_part(model, "as_saved()")
    base = _base_of(module)
    within, renamed = names_within(sharded, base), _Names(base, None).renamed
    held = {}
    for (first, *_), value in tensors_of(sharded).items():
        if names := tuple(new for name in within.get(first, ()) if (new := renamed(name)) is not None):
            held[names] = value
    kept, outcomes = saved_as(base, held, convert)
    return _as_saved(kept, list(dict.fromkeys(step for _, step in outcomes.values())), weights, sharded.rank)


def saved_as(module: nn.Module, held: Held, convert: Conversion | None) -> tuple[dict[str, str], Outcomes]:
    """By the first name of each tensor the one that it has for files, and what the files have, made of these.

    ``convert``: None for what the class of ``module`` does when it saves.

    Raises ConfigError, UnsupportedError: as ``as_saved``.
    """
    away, left_out = _private.left_out_of_files(module)
    kept = {names[0]: next((name for name in names if name not in away), names[0]) for names in held}
    given = {kept[names[0]]: value for names, value in held.items()}
    # In the model's order: so the library divides them into files.
    order = [name for name, _ in (*saved_parameters(module, every=True), *saved_buffers(module))]
    wanted = [name for name in dict.fromkeys([*order, *given]) if name in given and name not in left_out]
    return kept, foreseen(_private.steps_of(module, wanted, convert), given)


def _as_saved(
    source_of: Mapping[str, str], steps: Sequence[Step], weights: Iterable[Weights], rank: int
) -> Generator[Weights, None, None]:
    lacking = {step: set(step.sources) for step in steps}
    user_of = {source: step for step in steps for source in step.sources}
    here: dict[str, torch.Tensor] = {}
    for names, tensors in weights:
        found: dict[str, torch.Tensor] = {}
        for name, tensor in zip(names, tensors, strict=True):
            if name not in source_of:
                raise ConfigError(
                    f"as_saved() got '{name}', which the model lacks (rank {rank}). Give polyshard.stream(model) or "
                    "merged(model), with the names that it gives by itself."
                )
            source = source_of[name]
            step = user_of.get(source)
            if step is None:
                continue
            here[source] = tensor
            lacking[step].discard(source)
            if not lacking[step]:
                found.update(step.run([here.pop(each) for each in step.sources]))
        names, tensors = list(found), list(found.values())
        del found
        tensor = None  # type: ignore[assignment]
        kept = [weakref.ref(each) for each in tensors]
        yield names, tensors
        tensors.clear()
        copy_kept(kept)
    if here:
        waiting = sorted(set().union(*(lacking[user_of[source]] for source in here)))
        raise ConfigError(
            f"as_saved() got no {listed(waiting)}, which one tensor of the files is made of together with "
            f"{listed(sorted(here))} (rank {rank}). Hand out all of them or none."
        )


@torch.no_grad()
def _merged(
    layers: Sequence[_Layer],
    factors: Iterator[Weights],
    base: Callable[[], Iterator[Weights]],
    dtype: torch.dtype | None,
) -> Generator[Weights, None, None]:
    given = {name: tensor for names, tensors in factors for name, tensor in zip(names, tensors, strict=True)}
    for names, tensors in base():
        here = dict(zip(names, tensors, strict=True))
        for layer in layers:
            if not layer.kept.keys().isdisjoint(here):
                # The memory is this list's own.
                layer.merge({**given, **here})
        if dtype is not None:
            tensors[:] = [each.to(dtype) if each.is_floating_point() else each for each in tensors]
        del here
        yield names, tensors


class _Layer(nn.Module):
    """A layer with adapters, which its own ``merge`` adds to other tensors in the place of its parameters."""

    def __init__(self, layer: nn.Module, adapters: list[str], factors: dict[str, str], kept: dict[str, str]) -> None:
        """``factors``, ``kept``: the adapters' parameters, and what they change, by their names in a stream."""
        super().__init__()
        self.layer = layer
        self.adapters = adapters
        self.factors = factors
        self.kept = kept

    def merge(self, given: Mapping[str, torch.Tensor]) -> None:
        """Change those of ``given`` that are ``kept``."""
        own = {f"layer.{inner}": given[name] for name, inner in (self.factors | self.kept).items()}
        torch.func.functional_call(self, own, ())

    @override
    def forward(self) -> None:
        layer: Any = self.layer
        # What it notes is true of these tensors, not of the layer's.
        noted = {name: getattr(layer, name) for name in ("merged_adapters", "_caches") if hasattr(layer, name)}
        try:
            for name, value in noted.items():
                setattr(layer, name, copy.copy(value))
            layer.merge(adapter_names=self.adapters)
        finally:
            for name, value in noted.items():
                setattr(layer, name, value)


class _Names:
    """The names of a base model behind adapters."""

    def __init__(self, base: nn.Module, adapters: Collection[str] | None) -> None:
        # By the name of a module inside an adapter's, where its parameters are in the base model; None for nowhere.
        self._places: dict[str, str | None] = {}
        self.saved: set[str] = set()
        """Adapters with modules that come in the place of the base model's."""
        if "peft" not in sys.modules:
            return
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import ModulesToSaveWrapper

        for path, module in base.named_modules():
            path = saved_name(base, path)
            if isinstance(module, BaseTunerLayer):
                self._places |= {joined(path, each): None for each in module.adapter_layer_names}
                self._places[joined(path, "base_layer")] = path
            elif isinstance(module, ModulesToSaveWrapper):
                active = [each for each in adapters or module.active_adapters if each in module.modules_to_save]
                self._places |= {joined(path, each): None for each in ("modules_to_save", "original_module")}
                self._places[joined(path, f"modules_to_save.{active[0]}" if active else "original_module")] = path
                self.saved.update(active)

    def renamed(self, name: str) -> str | None:
        """The name in the base model alone; None for what is an adapter's."""
        stop = name.find(".")
        found: str | None = name
        while stop >= 0:
            head = name[:stop]
            if head in self._places:
                place = self._places[head]
                found = None if place is None else joined(place, name[stop + 1 :])
            stop = name.find(".", stop + 1)
        return found


def _layers(sharded: ShardedModel, model: nn.Module, names: _Names, adapters: Collection[str] | None) -> list[_Layer]:
    """Raises ConfigError, UnsupportedError: as ``merged``. Merges are tried without values, on all ranks alike."""
    base = _base_of(model)
    layers: list[_Layer] = []
    first = {name: given[0] for given in names_within(sharded, base).values() for name in given}
    for path, module in (("", model), *base.named_modules()) if "peft" in sys.modules else ():
        try:
            layers += _layer(saved_name(base, path), module, first, names, adapters)
        except Exception as error:
            raise UnsupportedError(
                f"merged(): '{path}' has an adapter of {type(module).__module__}.{type(module).__name__} (rank "
                f"{sharded.rank}), which is not merged here: {error}. Call merge_and_unload() on an unsharded model."
            ) from error
    unknown = sorted(set(adapters or ()) - names.saved - {name for layer in layers for name in layer.adapters})
    if unknown:
        raise ConfigError(f"merged(): no layer has an adapter {listed(unknown)} (rank {sharded.rank}).")
    return layers


def _layer(
    path: str, module: Any, first: Mapping[str, str], names: _Names, adapters: Collection[str] | None
) -> Iterator[_Layer]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    if getattr(getattr(module, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError("it changes no weights")
    if isinstance(module, AuxiliaryTrainingWrapper) and not isinstance(module, ModulesToSaveWrapper):
        raise ValueError("its weights are no layer's")
    if not isinstance(module, BaseTunerLayer):
        return
    if module.merged:
        raise ValueError("it is merged already; call unmerge_adapter()")
    held = [getattr(module, each) for each in module.adapter_layer_names if hasattr(module, each)]
    asked = module.active_adapters if adapters is None else adapters
    chosen = [adapter for adapter in asked if any(adapter in each for each in held)]
    if not chosen:
        return
    factors: dict[str, str] = {}
    kept: dict[str, str] = {}
    hollow: dict[str, torch.Tensor] = {}
    for inner, parameter in module.named_parameters():
        name = first[joined(path, saved_name(module, inner))]
        if inner.startswith("base_layer."):
            if "base_layer" in inner[len("base_layer.") :] or not parameter.is_floating_point():
                raise ValueError("its base is quantized, or an adapter too")
            name = names.renamed(name) or name
            kept[name] = inner
        elif not set(inner.split(".")).isdisjoint(chosen):
            factors[name] = inner
        else:
            continue
        hollow[name] = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    layer = _Layer(module, chosen, factors, kept)
    layer.merge(hollow)
    yield layer


def _base_of(model: Any) -> nn.Module:
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    base: nn.Module = model.get_base_model() if kind is not None and isinstance(model, kind) else model
    return base
