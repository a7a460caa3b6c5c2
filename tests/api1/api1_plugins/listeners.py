from pathlib import Path

from polyshard import hookimpl
from polyshard.interfaces import Listener, Observer, PluginContext, UnitSpec
from torch import nn


class Traffic(Listener):
    api_version = 1
    local_options = frozenset({"file"})  # each rank writes its own

    def __init__(self, context: PluginContext, file: str) -> None:
        self._file = Path(file)
        self._gathers = self._reductions = 0

    @hookimpl
    def make_observer(self, unit: UnitSpec) -> Observer:
        return self  # one for all units; an object for each could keep figures apart

    @hookimpl
    def step_end(self, model: nn.Module) -> None:
        with self._file.open("a") as stream:
            stream.write(f"{self._gathers} gathers, {self._reductions} reductions\n")
        self._gathers = self._reductions = 0

    def unshard(self, unit: UnitSpec) -> None:
        self._gathers += 1

    def unsharded(self, unit: UnitSpec) -> None:
        pass

    def compute(self, unit: UnitSpec, backward: bool) -> None:
        pass

    def computed(self, unit: UnitSpec, backward: bool) -> None:
        pass

    def wait(self, unit: UnitSpec) -> None:
        pass

    def waited(self, unit: UnitSpec) -> None:
        pass

    def reduce(self, unit: UnitSpec) -> None:
        self._reductions += 1

    def reduced(self, unit: UnitSpec) -> None:
        pass

    def reshard(self, unit: UnitSpec) -> None:
        pass
