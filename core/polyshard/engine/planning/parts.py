"""Which modules before and behind the inner units have units of their own.

What no policy chose stays with the module that contains it: of a language model, an embedding in front of the blocks,
norm and head behind them. As one unit all of that would be gathered before the first block computes, when nothing can
hide it, held until the end of the step, and reduced after the last gradient, when again nothing can. Apart, the
embedding alone is waited for, the head travels beside the blocks, and each is released like any unit.

A part is no unit that anybody asked for, so it must not change what a forward may do: where its parameters are used
outside of its own forward (``F.linear(x, self.head.weight)``), it goes back for good to its *host*, the stage that it
was taken from. See ``lent.py`` for how that is noticed. What cannot be undone so is a module that some ranks run and
others do not, for the others never gather it. Where several large modules are on one side, heads for several tasks,
say, that is likely, and none of them becomes a part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from .. import thresholds


def find_parts(
    host: nn.Module,
    inner: Collection[nn.Module],
    owned: Mapping[nn.Parameter, Sequence[tuple[nn.Module, str]]],
) -> list[nn.Module]:
    """The modules below ``host`` that become parts of its stage: at most one before and one behind all of ``inner``.

    Each is the only one on its side that can be called, contains none of ``inner``, holds ``SMALLEST_PART`` elements of
    what ``host`` owns, and shares none of them with a module outside of it. Sides are those of ``host.modules()``.

    Args:
        host: A module that owns parameters and contains stages.
        inner: The modules of the stages below ``host``, and those that are sharded already; at least one.
        owned: Its parameters, with every (module, attribute) that holds them.
    """
    found = _separable(host, inner, owned)
    place = {module: index for index, module in enumerate(host.modules())}
    begin, end = min(place[module] for module in inner), max(place[module] for module in inner)
    sides = (
        [module for module in found if place[module] < begin],
        [module for module in found if place[module] > end],
    )
    return [side[0] for side in sides if len(side) == 1]


def _separable(
    host: nn.Module,
    inner: Collection[nn.Module],
    owned: Mapping[nn.Parameter, Sequence[tuple[nn.Module, str]]],
) -> list[nn.Module]:
    found: list[nn.Module] = []
    seen: set[nn.Module] = set(inner)
    waiting = list(host.children())[::-1]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        inside = set(module.modules())
        if not _can_be_called(module) or not inside.isdisjoint(inner):
            waiting += list(module.children())[::-1]
            continue
        held = {p for each in inside for p in each._parameters.values() if p is not None and p in owned}
        large = sum(parameter.numel() for parameter in held) >= thresholds.SMALLEST_PART
        if large and all(user in inside for parameter in held for user, _ in owned[parameter]):
            found.append(module)
    return found


def _can_be_called(module: nn.Module) -> bool:
    # A container such as ModuleList has no forward, and so no moment at which its parameters could be gathered.
    return type(module).forward is not nn.Module.forward
