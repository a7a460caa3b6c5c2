"""``MixedPrecision`` as a precision caster."""

from __future__ import annotations

from polyshard.interfaces import PrecisionCaster, UnitDtypes, UnitSpec

from .api import MixedPrecision


class FSDPPrecision(PrecisionCaster):
    """The dtypes of one FSDP instance. Inputs and buffers are cast by the instance, whose root has its own rules."""

    def __init__(self, mixed_precision: MixedPrecision, full_precision_in_eval: bool) -> None:
        self._settings = mixed_precision
        self._full_precision_in_eval = full_precision_in_eval

    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        """Gradients travel in the dtype in which they are reduced, as FSDP's do."""
        master = unit.master_dtype
        compute = self._settings.param_dtype or master
        reduce = self._settings.reduce_dtype or compute
        grad = reduce if self._settings.keep_low_precision_grads else master
        return UnitDtypes(compute=compute, wire=reduce, reduce=reduce, grad=grad)

    def full_precision_in_eval(self, unit: UnitSpec) -> bool:
        return self._full_precision_in_eval
