"""A model divided into units between two sizes, by the modules in which each parameter could be gathered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from polyshard.interfaces import PolicyContext
from torch import nn

from .module_class import all_ignored, counted_parameters


@dataclass(frozen=True, slots=True)
class _Left:
    """Parameters that stay with the module around them."""

    parameters: list[nn.Parameter]
    nbytes: int
    module: nn.Module | None = None
    """The module that could be their unit, if any."""
    kind: tuple[nn.Module, type, int] | None = None
    """Siblings of one class and size have the same."""


class Division:
    """One walk over one model, from the outermost module to the leaves.

    - A module that is too large is divided. The parameters outside the units inside it are a unit of their own, or stay
      with the module around it if they are small.
    - A module that fits becomes a unit, unless it holds a stack of three or more layers of one class that are large
      enough: then the layers do, so that one can be gathered while another computes.
    - A layer of a stack stays whole if it fits. Otherwise it is divided no more than necessary: its largest modules
      become units until the rest fits.
    - A module that is too small stays with the module around it. If too much would stay there, modules become units all
      the same, the largest first, siblings of one class and size together.
    """

    def __init__(
        self, homes: Homes, least: float, most: int, whole: tuple[type, ...], exclude: tuple[type, ...]
    ) -> None:
        """Modules of fewer than ``least`` bytes stay with the module around them, as long as there is room; modules of
        more than ``most`` are divided. ``whole``: classes that are not divided; ``exclude``: that become no units.
        """
        #: The modules that become units.
        self.chosen: set[nn.Module] = set()
        #: How many of one class stand beside each unit, itself among them.
        self.alike: dict[nn.Module, int] = {}
        self._homes = homes
        self._least, self._most = least, most
        self._whole = whole
        self._exclude = exclude
        self._seen: set[nn.Module] = {homes.root}
        self._make_room(self._divide(homes.root, layer=False))

    def _divide(self, module: nn.Module, *, layer: bool) -> list[_Left]:
        """Find units in ``module``, and return what is left; ``layer``: it is a layer of a stack, or lies in one."""
        direct = self._homes.direct(module)
        left = [_Left(direct, self._homes.total(direct))] if direct else []
        children = self._homes.children(module)
        alike = Counter(type(child) for child in children)
        for child in children:
            if child not in self._seen:
                self._seen.add(child)
                left += self._visit(child, module, alike[type(child)], layer=layer)
        covered = {parameter for each in left for parameter in each.parameters}
        # What several modules in this one hold, all of which were taken whole.
        for inner in module.modules():
            inside = self._homes.inside(inner)
            if inner in self._seen or not inside or covered.issuperset(inside):
                continue
            chain = self._homes.chains[inside[0]]
            if module in chain and self.chosen.isdisjoint(chain):
                self._seen.add(inner)
                found = self._visit(inner, module, 1, layer=layer)
                covered.update(parameter for each in found for parameter in each.parameters)
                left += found
        return left

    def _visit(self, module: nn.Module, parent: nn.Module, alike: int, *, layer: bool) -> list[_Left]:
        nbytes = self._homes.nbytes_inside(module)
        eligible = self._eligible(module)
        divisible = not isinstance(module, self._whole) and any(True for _ in self._homes.children(module))
        if not nbytes or not eligible:
            if not divisible:
                return [_Left(self._homes.inside(module), nbytes)] if nbytes else []
            return self._divide(module, layer=layer)
        self.alike[module] = alike
        stacked = divisible and alike < STACK and self._has_stack(module)
        if divisible and (nbytes > self._most or stacked):
            return self._left_of(module, parent, self._divide(module, layer=layer or alike >= STACK))
        if nbytes >= self._least and not layer:
            self.chosen.add(module)
            return []
        return [_Left(self._homes.inside(module), nbytes, module, (parent, type(module), nbytes))]

    def _left_of(self, module: nn.Module, parent: nn.Module, left: list[_Left]) -> list[_Left]:
        """The parameters of ``module``, which was divided, that stay with the module around it."""
        own = set(self._homes.inside(module))
        # What it shares with modules elsewhere cannot be gathered with it.
        elsewhere = [each for each in left if not own.issuperset(each.parameters)]
        kept = self._make_room([each for each in left if own.issuperset(each.parameters)])
        nbytes = sum(each.nbytes for each in kept)
        if kept and nbytes >= self._least:
            self.chosen.add(module)
        elif kept:
            parameters = [parameter for each in kept for parameter in each.parameters]
            elsewhere.append(_Left(parameters, nbytes, module, (parent, type(module), nbytes)))
        return elsewhere

    def _make_room(self, left: list[_Left]) -> list[_Left]:
        """Make units of what is ``left`` until the rest, which is returned, is no larger than a unit may be."""
        nbytes = sum(each.nbytes for each in left)
        groups: dict[tuple[nn.Module, type, int], list[_Left]] = {}
        for each in left:
            if each.kind is not None:
                groups.setdefault(each.kind, []).append(each)
        # The sort is stable: of equal groups the first in the model goes first.
        for group in sorted(groups.values(), key=lambda group: -sum(each.nbytes for each in group)):
            if nbytes <= self._most:
                break
            for each in group:
                assert each.module is not None
                self.chosen.add(each.module)
                nbytes -= each.nbytes
        return [each for each in left if each.module not in self.chosen]

    def _eligible(self, module: nn.Module) -> bool:
        return is_called(module) and not isinstance(module, self._exclude)

    def _has_stack(self, module: nn.Module) -> bool:
        return any(self._is_stack(inner) for inner in module.modules() if not isinstance(inner, self._whole))

    def _is_stack(self, parent: nn.Module) -> bool:
        layers: Counter[type] = Counter()
        for child in self._homes.children(parent):
            # Equal leaves side by side are a block's projections, say, and layers only where a container holds them.
            layered = not is_called(parent) or any(True for _ in child.children())
            if layered and self._eligible(child) and self._homes.nbytes_inside(child) >= max(1, self._least):
                layers[type(child)] += 1
        return max(layers.values(), default=0) >= STACK


#: So many siblings of one class are layers of a stack, and not two things that happen to be alike.
STACK = 3


class Homes:
    """One model's parameters, each with the modules that contain all of its uses: the engine gathers it with the
    innermost of these that is a unit.

    A parameter that two modules share is at home in what contains both; so is what lies in a module that two others
    hold, and in that module itself.
    """

    def __init__(self, root: nn.Module, context: PolicyContext, itemsize: int | None) -> None:
        """``itemsize``: bytes of an element on its way; None for as parameters are stored."""
        self.root = root
        self._ignored = all_ignored(context)
        counted = counted_parameters(root, context)
        #: From the outermost module to the innermost, for each parameter.
        self.chains: dict[nn.Parameter, tuple[nn.Module, ...]] = {}
        self._visit(root, (), counted)
        self.nbytes = {each: each.numel() * (itemsize or each.element_size()) for each in self.chains}
        self._inside: dict[nn.Module, list[nn.Parameter]] = {}
        self._direct: dict[nn.Module, list[nn.Parameter]] = {}
        for parameter, chain in self.chains.items():
            self._direct.setdefault(chain[-1], []).append(parameter)
            for module in chain:
                self._inside.setdefault(module, []).append(parameter)
        self._nbytes_inside = {module: self.total(inside) for module, inside in self._inside.items()}

    def _visit(self, module: nn.Module, above: tuple[nn.Module, ...], counted: Collection[nn.Parameter]) -> None:
        # Every path to a shared module is walked: what is not on each of them is no home.
        if module in self._ignored or module in above:
            return
        chain = (*above, module)
        for parameter in module.parameters(recurse=False):
            if parameter in counted:
                known = self.chains.get(parameter, chain)
                self.chains[parameter] = tuple(each for each in known if each in chain)
        for child in module.children():
            self._visit(child, chain, counted)

    def inside(self, module: nn.Module) -> list[nn.Parameter]:
        """Parameters that would be gathered with ``module``, were it the only unit."""
        return self._inside.get(module, [])

    def direct(self, module: nn.Module) -> list[nn.Parameter]:
        """Those that no module inside ``module`` could be gathered with."""
        return self._direct.get(module, [])

    def nbytes_inside(self, module: nn.Module) -> int:
        """Bytes of the unit that ``module`` would be, padding aside."""
        return self._nbytes_inside.get(module, 0)

    def total(self, parameters: Collection[nn.Parameter]) -> int:
        return sum(self.nbytes[parameter] for parameter in parameters)

    def children(self, module: nn.Module) -> list[nn.Module]:
        """The modules directly in ``module`` that are not ignored, each once."""
        return [child for child in module.children() if child not in self._ignored]

    def owned(self, chosen: Collection[nn.Module]) -> dict[nn.Module, list[nn.Parameter]]:
        """The parameters of each unit with the units ``chosen`` beside the root; the root's first."""
        units: dict[nn.Module, list[nn.Parameter]] = {self.root: []}
        for parameter, chain in self.chains.items():
            owner = next((each for each in reversed(chain) if each in chosen), self.root)
            units.setdefault(owner, []).append(parameter)
        return units


def is_called(module: nn.Module) -> bool:
    """Whether ``module`` has a forward of its own, and so a moment at which it is gathered.

    A plain ``nn.Sequential`` has one, but loops over its layers pass it by as often as not: what is in it is called in
    either case.
    """
    if type(module) is nn.Sequential:
        return False
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__
