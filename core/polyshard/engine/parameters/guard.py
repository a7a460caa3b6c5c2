"""Stand-ins for sharded parameters while a forward runs: looking at them is fine, computing with them raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...errors import UnshardedUseError
from .. import _torch_private

#: What may be asked of a parameter whose values are not there.
_HARMLESS = frozenset(
    {
        "__format__",
        "__hash__",
        "__len__",
        "__repr__",
        "dim",
        "element_size",
        "get_device",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "ndimension",
        "nelement",
        "numel",
        "size",
        "stride",
    }
)
#: Attributes that lead to values.
_VALUES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})


class ShardedParameter(torch.Tensor):
    """A sharded parameter seen from inside somebody else's forward.

    The parameter itself is a 1-D piece there. A tied head that computes with it would fail on its shape or, worse,
    would not.
    """

    parameter_name: str

    @classmethod
    def of(cls, original: torch.Tensor, name: str) -> ShardedParameter:
        """The stand-in of ``original``, whose fully-qualified name is ``name``."""
        with _torch_private.without_torch_function():
            guard = original.detach().as_subclass(cls)
            guard.requires_grad_(original.requires_grad)
        guard.parameter_name = name
        return guard

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer questions about shape, dtype and the like; refuse anything that reads values."""
        name = getattr(func, "__name__", "")
        is_attribute = name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") not in _VALUES
        if is_attribute or name in _HARMLESS:
            with _torch_private.without_torch_function():
                return func(*args, **(kwargs or {}))
        used = next((value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls)), None)
        which = f"'{used.parameter_name}'" if used is not None else "of a unit"
        raise UnshardedUseError(
            f"The parameter {which} was used by {name or func} while it is sharded. Compute with it inside its own "
            "module's forward, name the method that does with polyshard.register_forward_method, or let both users "
            "share one unit."
        )
