"""Whole weights for engines that read models of Hugging Face: adapters merged, and tensors as files have them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import polyshard
import torch
from polyshard.errors import ConfigError, UnsupportedError
from polyshard.inspect import ShardedModel, savable_part
from polyshard.state.contents import names_within
from polyshard.state.streaming import Ranks, Weights, copy_kept
from torch import nn

from .conversion import Conversion, Part, listed, whole
from .saving import files_of
from .tensors import joined, tensors_of


def merged(
    model: nn.Module,
    *,
    adapters: Collection[str] | None = None,
    dtype: torch.dtype | None = None,
    bucket_nbytes: int | None = None,
    ranks: Ranks = "all",
) -> Generator[Weights, None, None]:
    """``polyshard.stream`` of a model with LoRA adapters of PEFT, merged into the weights of the base model.

    Under the base model's own names, to the bit what ``merge_and_unload()`` makes of the unsharded model; the sharded
    one stays as it is. Adapters are gathered first and kept, then the base model unit by unit. Weights travel in the
    dtype in which they are kept: they are cast when adapters were added.

    Args:
        model: What ``get_peft_model`` or ``inject_adapter_in_model`` made, sharded or inside a sharded model.
        adapters: Names of those to merge; None for the active ones.
        dtype: In which floating-point tensors are handed out; None for the dtype in which they are kept.
        bucket_nbytes: As in ``polyshard.stream``.
        ranks: As in ``polyshard.stream``.

    Raises:
        ConfigError: no layer has an adapter of such a name, or as ``polyshard.stream``.
        UnsupportedError: an adapter is no LoRA of a linear layer or an embedding, or is merged already.
        StateError, RankMismatchError, CollectiveError: as ``polyshard.stream``.
    """
    sharded, module = savable_part(model, "merged()")
    base, merge = _base_of(module), _Merge(sharded, module, adapters)
    settings: dict[str, Any] = {"bucket_nbytes": bucket_nbytes, "ranks": ranks}
    factors = polyshard.stream(base, names=merge.factor, **settings)
    return _merged(merge, factors, lambda: polyshard.stream(base, names=merge.renamed, **settings), dtype)


def as_saved(
    model: nn.Module, weights: Iterable[Weights], *, convert: Conversion | None = None
) -> Generator[Weights, None, None]:
    """What ``weights`` hands out, in the names and shapes that ``save`` writes: a list for each list.

    For models of Transformers whose modules differ from their files, as where the experts of a layer are one tensor:
    engines read names and shapes of files. ``as_saved(model, polyshard.stream(model))``, and the same around
    ``merged(model)``. A tensor is a view of what it is made of, or a copy where several were joined. It comes when the
    last of these came: what waits for another list is kept. Tensors without elements are left out.

    Args:
        model: What ``weights`` is of.
        weights: ``polyshard.stream`` of ``model`` or ``merged``, with the names that these give by themselves.
        convert: As in ``save``.

    Raises:
        ConfigError: ``weights`` hands out another name, or a part of what makes a tensor; ``convert`` leaves out
            elements.
        UnsupportedError: what is to be done to a tensor cannot be done in parts.
        StateError: inside a step, or ``model`` is in no sharded model.
    """
    sharded, module = savable_part(model, "as_saved()")
    merge, base = _Merge(sharded, module, None, checks=False), _base_of(module)
    within = names_within(sharded, base)
    held = []
    for each in tensors_of(sharded):
        names = tuple(new for name in within.get(each.names[0], ()) if (new := merge.renamed(name)) is not None)
        held += [replace(each, names=names)] if names else []
    kept, made = files_of(base, held, convert)
    return _as_saved(
        {each.names[0]: name for name, each in kept.items()},
        {name: each.parts for name, each in made.items() if each.parts},
        {name: tuple(each.shape) for name, each in made.items()},
        weights,
        sharded.rank,
    )


def _as_saved(
    source_of: Mapping[str, str],
    recipes: Mapping[str, Sequence[Part]],
    shapes: Mapping[str, tuple[int, ...]],
    weights: Iterable[Weights],
    rank: int,
) -> Generator[Weights, None, None]:
    lacking = {name: {part.source for part in parts} for name, parts in recipes.items()}
    users: dict[str, list[str]] = {}
    for name, sources in lacking.items():
        for source in sources:
            users.setdefault(source, []).append(name)
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
            here[source] = tensor
            for user in users.get(source, ()):
                lacking[user].remove(source)
                if not lacking[user]:
                    found[user] = _put_together(recipes[user], shapes[user], here)
        here = {
            source: tensor for source, tensor in here.items() if any(lacking[user] for user in users.get(source, ()))
        }
        names, tensors = list(found), list(found.values())
        del found
        tensor = None  # type: ignore[assignment]
        kept = [weakref.ref(each) for each in tensors]
        yield names, tensors
        tensors.clear()
        copy_kept(kept)
    if here:
        waiting = {user: lacking[user] for source in here for user in users[source] if lacking[user]}
        raise ConfigError(
            f"as_saved() got no {listed(sorted(set().union(*waiting.values())))}, of which {listed(list(waiting))} are "
            f"made, too (rank {rank}). Hand out all of them or none."
        )


@torch.no_grad()
def _put_together(parts: Sequence[Part], shape: tuple[int, ...], sources: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if len(parts) == 1 and parts[0] == whole(parts[0].source, shape):
        return sources[parts[0].source]
    views = [part.view_of(sources[part.source]) for part in parts]
    if len(views) == 1 and tuple(views[0].shape) == shape:
        found: torch.Tensor = views[0]
        return found
    made = views[0].new_empty(shape)
    for part, view in zip(parts, views, strict=True):
        box = tuple(slice(start, start + size) for start, size in zip(part.offsets, part.sizes, strict=True))
        made[box].copy_(view)
    return made


@torch.no_grad()
def _merged(
    merge: _Merge, factors: Iterator[Weights], base: Callable[[], Iterator[Weights]], dtype: torch.dtype | None
) -> Generator[Weights, None, None]:
    given = {name: tensor for names, tensors in factors for name, tensor in zip(names, tensors, strict=True)}
    for names, tensors in base():
        for index, name in enumerate(names):
            for each in merge.products.get(name, ()):
                # The memory is this list's own.
                tensors[index] += each.value(given)
            if dtype is not None and tensors[index].is_floating_point():
                tensors[index] = tensors[index].to(dtype)
        yield names, tensors


@dataclass(frozen=True, slots=True)
class _Product:
    """What an adapter adds to a weight."""

    a: str
    b: str
    """Names of the two factors in the base model."""
    scale: float
    turned: bool
    """Whether the weight is the product's transpose."""

    def value(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Computed as PEFT does, in fp32 where a CPU multiplies matrices of 16 bits."""
        a, b = given[self.a], given[self.b]
        dtype = b.dtype
        if a.device.type == "cpu" and dtype.itemsize == 2:
            a, b = a.float(), b.float()
        product = b @ a
        return ((product.T if self.turned else product) * self.scale).to(dtype)


class _Merge:
    """The names of a base model behind adapters, and what these add to it."""

    def __init__(
        self, sharded: ShardedModel, model: nn.Module, adapters: Collection[str] | None, *, checks: bool = True
    ) -> None:
        """``checks``: raise for what cannot be merged."""
        # By the name of a module inside an adapter's, where its parameters are in the base model; None for nowhere.
        self._places: dict[str, str | None] = {}
        #: By the name in the base model.
        self.products: dict[str, list[_Product]] = {}
        self._factors: set[str] = set()
        base = _base_of(model)
        if "peft" not in sys.modules:
            return
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        first = {name: names[0] for names in names_within(sharded, base).values() for name in names}
        found: set[str] = set()
        for path, module in base.named_modules():
            if isinstance(module, BaseTunerLayer):
                self._places |= {joined(path, each): None for each in module.adapter_layer_names}
                self._places[joined(path, "base_layer")] = path
            elif isinstance(module, ModulesToSaveWrapper):
                active = [each for each in adapters or module.active_adapters if each in module.modules_to_save]
                self._places |= {joined(path, each): None for each in ("modules_to_save", "original_module")}
                self._places[joined(path, f"modules_to_save.{active[0]}" if active else "original_module")] = path
                found.update(active)
            elif isinstance(module, AuxiliaryTrainingWrapper) and checks:
                raise _not_merged(path, module, sharded.rank)
        if not checks:
            return
        for path, module in base.named_modules():
            if isinstance(module, BaseTunerLayer):
                made = list(_products(path, module, adapters, sharded.rank))
                found.update(adapter for adapter, _ in made)
                name = self.renamed(first[joined(path, "base_layer.weight")]) if made else None
                if name is not None:
                    self.products.setdefault(name, []).extend(product for _, product in made)
        self._factors |= {
            name for each in self.products.values() for product in each for name in (product.a, product.b)
        }
        unknown = sorted(set(adapters or ()) - found)
        if unknown:
            raise ConfigError(f"merged(): no layer has an adapter {listed(unknown)} (rank {sharded.rank}).")
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise _not_merged("", model, sharded.rank)

    def factor(self, name: str) -> str | None:
        """The name of what is multiplied, and None for others."""
        return name if name in self._factors else None

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


def _products(path: str, layer: Any, adapters: Collection[str] | None, rank: int) -> Iterator[tuple[str, _Product]]:
    """By adapter, what is added to the weight of ``layer``. Raises UnsupportedError: something else is."""
    from peft.tuners import lora

    active = layer.active_adapters if adapters is None else list(adapters)
    if layer.merged:
        raise UnsupportedError(
            f"merged(): '{path}' has an adapter that is merged (rank {rank}). Call unmerge_adapter()."
        )
    kinds = {lora.Linear: ("lora_A", "lora_B", ".weight"), lora.Embedding: ("lora_embedding_A", "lora_embedding_B", "")}
    for adapter in active:
        if not any(adapter in getattr(layer, each) for each in layer.adapter_layer_names if hasattr(layer, each)):
            continue
        if type(layer) not in kinds or adapter in layer.lora_variant or layer.lora_bias.get(adapter):
            raise _not_merged(path, layer, rank)
        a, b, suffix = kinds[type(layer)]
        if adapter in getattr(layer, a):
            turned = isinstance(layer, lora.Embedding) or layer.fan_in_fan_out
            first, second = (joined(path, f"{each}.{adapter}{suffix}") for each in (a, b))
            yield adapter, _Product(first, second, layer.scaling[adapter], turned)


def _not_merged(path: str, module: nn.Module, rank: int) -> UnsupportedError:
    return UnsupportedError(
        f"merged(): '{path}' has an adapter of {type(module).__module__}.{type(module).__name__} that is no plain LoRA "
        f"of a linear layer or an embedding (rank {rank}), and is not merged here. Call merge_and_unload() on an "
        "unsharded model."
    )


def _base_of(model: Any) -> nn.Module:
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    base: nn.Module = model.get_base_model() if kind is not None and isinstance(model, kind) else model
    return base
