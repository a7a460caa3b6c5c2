"""Frozen parameters of a class of their own over plain memory, as the packed weights of quantized models are.

Their bytes are cut and gathered as they are. What these mean stands in attributes of the parameter (a scale for each
block of elements, a table of codes), which every rank keeps whole: they are small beside the bytes. What computes is a
view of the gathered bytes, of the same class and with the same attributes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..nested import iter_hidden_tensors, iter_tensors
from .parts import is_dtensor

#: An attribute of this name says what the bytes mean.
_STATE = "quant_state"


class PackedClass:
    """The class of one such parameter, and its attributes."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.cls = type(parameter)
        #: The parameter's own: what changes there has changed for what computes.
        self.attributes = vars(parameter)
        self.remember()

    @staticmethod
    def of(parameter: nn.Parameter) -> PackedClass | None:
        """That of ``parameter``; None where torch's own class serves it."""
        return PackedClass(parameter) if is_of_packed_class(parameter) else None

    def over(self, view: torch.Tensor) -> torch.Tensor:
        """A leaf of the class over the memory of ``view``, with a version counter of its own."""
        leaf: torch.Tensor = view.data.as_subclass(self.cls)
        leaf.__dict__ = self.attributes
        return leaf

    def move(self, device: torch.device) -> None:
        """Bring what the attributes refer to where the bytes are."""
        for name, value in self.attributes.items():
            if isinstance(value, torch.Tensor):
                self.attributes[name] = value.to(device)
            elif _is_state(value) and any(tensor.device != device for tensor in _tensors_in({name: value})):
                # In place, as the states of quantized weights do.
                value.to(device)
        self.remember()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those in the attributes, each once."""
        return list(_tensors_in(self.attributes))

    def adopt(self, other: torch.Tensor) -> bool:
        """Take over the attributes of ``other``, whose values are the parameter's now; returns whether it has any."""
        found = vars(other)
        if found is not self.attributes:
            if type(other) is not self.cls or state_fault(other):
                return False
            self.attributes.clear()
            self.attributes.update(found)
        self.remember()
        return True

    def remember(self) -> None:
        """Let ``restore`` bring back the attributes as they are, and what these refer to."""
        self._kept = dict(self.attributes)
        self._inside = [(value, dict(vars(value))) for value in self._kept.values() if _is_state(value)]

    def restore(self) -> None:
        """Undo changes of the attributes, and of what these refer to, since ``remember``."""
        self.attributes.clear()
        self.attributes.update(self._kept)
        for value, inside in self._inside:
            vars(value).clear()
            vars(value).update(inside)


def is_of_packed_class(parameter: torch.Tensor) -> bool:
    """Whether ``parameter`` is frozen, and of a class of its own with attributes, over plain memory."""
    return (
        type(parameter) is not nn.Parameter
        and isinstance(parameter, nn.Parameter)
        and not parameter.requires_grad
        and not is_dtensor(parameter)
        and type(parameter.data) is torch.Tensor
        and bool(vars(parameter))
    )


def packed_fault(parameter: nn.Parameter, module: nn.Module) -> str:
    """What keeps ``parameter`` of ``module``, for which ``is_of_packed_class`` holds, from being sharded, and the
    remedy, as text; empty for nothing.
    """
    fault = state_fault(parameter)
    if fault:
        return fault
    own = parameter.data.untyped_storage()
    beside = {f"its attribute {name!r}": value for name, value in vars(parameter).items()}
    beside |= {
        f"{name!r} of its {type(module).__name__}": value
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules")
    }
    for name, value in beside.items():
        for tensor in _tensors_in({name: value}):
            same = not tensor.is_meta and tensor.untyped_storage().data_ptr() == own.data_ptr()
            if same or tensor.shape == parameter.shape:
                return (
                    f"with all of its values once more in {name}, which every rank would keep whole. Pass it in "
                    "ignored_parameters; a class that is to be sharded implements fsdp_pre_all_gather and "
                    "fsdp_post_all_gather."
                )
    return ""


def state_fault(parameter: torch.Tensor) -> str:
    """What is wrong with the attribute that says what the bytes mean, and the remedy; empty for nothing."""
    attributes = vars(parameter)
    if _STATE not in attributes or attributes[_STATE] is not None:
        return ""
    if attributes.get("bnb_quantized", True):
        return (
            f"without a {_STATE}: what its bytes mean was lost. Give it the one that it was quantized with "
            f"(parameter.{_STATE} = module.{_STATE} where its module has that), or build it anew."
        )
    return (
        "not quantized yet: moving it to its device does that, and would find this rank's piece. Call model.to(device) "
        "before the model is sharded."
    )


def _tensors_in(attributes: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    for value in attributes.values():
        for tensor in (*iter_tensors(value), *iter_hidden_tensors(value)):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor


def _is_state(value: object) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (type, torch.Tensor, nn.Module))
