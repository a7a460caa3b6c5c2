"""Models of Transformers: ``generate`` that gathers once a call, and first values of models on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from polyshard.api import register_forward_method
from polyshard.errors import UnsupportedError
from polyshard.inspect import outermost_model
from torch import nn

from ._private import init_weights_of


def register_generate(model: nn.Module) -> None:
    """Let ``model.generate(...)`` gather each unit once a call, in the dtype in which the model computes.

    A token is a forward of every block. Registered by ``polyshard.register_forward_method`` alone, each would gather
    each block again. Here the first forward of a call gathers, and the call's end releases: whole parameters take the
    model's size in compute dtype meanwhile. After its first forward a call communicates nothing, so ranks may be given
    prompts of different lengths and end at different lengths. All ranks call it, as often.

    Args:
        model: The outermost sharded module, an adapter's wrapper too.

    Raises:
        StateError: ``model`` is not the outermost sharded module.
        ConfigError: it has no such method.
    """
    outermost_model(model, "register_generate()")
    register_forward_method(model, "generate")
    method: Any = model.generate

    @wraps(method)
    def gathered_once(*args: Any, **kwargs: Any) -> Any:
        # Without a backward, all is released when the call ends.
        with outermost_model(model, "generate()").kept_unsharded(), torch.no_grad():
            return method(*args, **kwargs)

    model.generate = gathered_once  # type: ignore[assignment]


Initialize = Callable[[nn.Module], None]


def initializer_of(model: nn.Module) -> Initialize:
    """A function that fills a module's own parameters and buffers, for ``polyshard.shard``.

    A module that is in a model of Transformers is initialised by the innermost one around it, others by their
    ``reset_parameters()``. Some classes, T5's, choose values of a layer by the module around it, and Transformers asks
    these last: so does the function returned.

    Raises:
        UnsupportedError: a module's initialisation needs values, which nothing on the meta device has.
    """
    owners: dict[nn.Module, Initialize] = {}
    for owner in model.modules():
        initialize = init_weights_of(owner)
        if initialize is not None:
            owners.update(dict.fromkeys(owner.modules(), initialize))
    around = _around(model, owners)

    def initialize_one(module: nn.Module) -> None:
        with torch.no_grad():
            if module not in owners:
                module.reset_parameters()  # type: ignore[operator]
                return
            owners[module](module)
            # They fill all that is inside them and there, again and again; the last time counts.
            for outer in around.get(module, ()):
                owners[outer](outer)

    return initialize_one


def _around(model: nn.Module, owners: dict[nn.Module, Initialize]) -> dict[nn.Module, list[nn.Module]]:
    """For each module, those around it that initialise its parameters, the outermost last.

    Found by trying: on the meta device that writes nothing, but is counted. Modules with values are not tried.
    """
    found: dict[nn.Module, list[nn.Module]] = {}
    # Inner modules are listed behind those around them.
    for name, outer in reversed(list(model.named_modules())):
        inner = [module for module in outer.modules() if module is not outer]
        held = [(module, each) for module in inner for each in module._parameters.values() if each is not None]
        if outer not in owners or not held or not all(each.is_meta for each in outer.parameters()):
            continue
        before = [each._version for _, each in held]
        try:
            with torch.no_grad():
                owners[outer](outer)
        except Exception as error:
            raise UnsupportedError(
                f"'{name or type(model).__name__}' ({type(outer).__name__}) cannot be initialised from meta: "
                f"{type(error).__name__}: {error}. Build the model with values on every rank, or on rank 0 with "
                "sync_module_states=True."
            ) from error
        for (module, each), version in zip(held, before, strict=True):
            if each._version != version and outer not in found.setdefault(module, []):
                found[module].append(outer)
    return found
