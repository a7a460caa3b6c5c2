"""What a recorded step takes for granted about parameters and buffers: which they are, where, and what is trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn

_address_of = torch.Tensor.data_ptr
_is_trained = attrgetter("requires_grad")


class _Site(NamedTuple):
    name: str
    holder: dict[str, Any]
    key: str
    value: torch.Tensor | nn.Module | None


class HeldTensors:
    """Notices a tensor or a module that was replaced or added, and a tensor that was moved, frozen or unfrozen.

    Asked before each replay about every one. What modules hold is compared as dicts, where identity decides at 10 ns an
    entry; addresses and ``requires_grad`` take 85 ns a parameter together: 0.1 ms a replay for a thousand parameters.
    """

    def __init__(self, module: nn.Module, others: Iterable[tuple[str, Sequence[torch.Tensor]]]) -> None:
        """``others``: named tensors beside those that ``module`` and the modules inside it hold."""
        self._sites = [
            _Site(f"{prefix}.{key}" if prefix else key, holder, key, value)
            for prefix, inner in module.named_modules()
            for holder in (inner._parameters, inner._buffers, inner._modules)
            for key, value in dict.items(holder)
        ]
        tensors = [(site, site.value) for site in self._sites if isinstance(site.value, torch.Tensor)]
        self._holders: list[dict[str, Any]] = list({id(site.holder): site.holder for site in self._sites}.values())
        self._held = list(map(dict.copy, self._holders))
        # Tensors of one element compare as equal where their values are.
        single = [(site, tensor) for site, tensor in tensors if tensor.numel() <= 1]
        self._single_holders = [site.holder for site, _ in single]
        self._single_keys = [site.key for site, _ in single]
        self._single = [tensor for _, tensor in single]
        named = {tensor: site.name for site, tensor in tensors}
        for name, several in others:
            for tensor in several:
                named.setdefault(tensor, f"flat parameter of {name}")
        self._addressed = [tensor for tensor in named if _has_address(tensor)]
        self._addresses = list(map(_address_of, self._addressed))
        self._parameters = [tensor for tensor in named if isinstance(tensor, nn.Parameter)]
        self._trained = list(map(_is_trained, self._parameters))
        self._named = named

    def changed(self) -> str | None:
        """What no longer is as it was, as the begin of a sentence; None where all is."""
        if (
            self._is_replaced()
            or list(map(_is_trained, self._parameters)) != self._trained
            or list(map(_address_of, self._addressed)) != self._addresses
        ):
            return self._describe()
        return None

    def _is_replaced(self) -> bool:
        return differ(self._holders, self._held) or not all(
            map(is_, map(dict.get, self._single_holders, self._single_keys), self._single)
        )

    def _describe(self) -> str:
        for name, holder, key, value in self._sites:
            if dict.get(holder, key) is not value:
                return f"'{name}' was replaced"
        for tensor, address in zip(self._addressed, self._addresses, strict=True):
            if tensor.data_ptr() != address:
                return f"'{self._named[tensor]}' was given other data"
        for tensor, trained in zip(self._parameters, self._trained, strict=True):
            if tensor.requires_grad is not trained:
                return f"'{self._named[tensor]}' was {'frozen' if trained else 'unfrozen'}"
        return "A parameter, a buffer or a module was added to the model"


def _has_address(tensor: torch.Tensor) -> bool:
    # What is ignored may be of any kind.
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided


def differ(these: list[Any], those: list[Any]) -> bool:
    """Whether two lists of lists or dicts hold other tensors, compared at C speed: what is identical is equal."""
    try:
        return these != those
    except RuntimeError:
        # Two tensors were compared, so they are not the same.
        return True
