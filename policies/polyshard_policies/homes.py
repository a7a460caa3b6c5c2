"""Where parameters are at home: in which modules they could be gathered, and how many bytes that would take."""

from __future__ import annotations

from collections.abc import Collection

from polyshard.interfaces import PolicyContext
from torch import nn

from .traversal import all_ignored, counted_parameters

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
        """Bytes of ``parameters``, gathered."""
        return sum(self.nbytes[parameter] for parameter in parameters)

    def children(self, module: nn.Module) -> list[nn.Module]:
        """The modules directly in ``module`` that are not ignored, each once."""
        return [child for child in module.children() if child not in self._ignored]

    def owned(self, chosen: Collection[nn.Module]) -> dict[nn.Module, list[nn.Parameter]]:
        """What each unit would hold with units ``chosen``, beside the root; the root's first."""
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
