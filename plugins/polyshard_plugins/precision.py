"""The precision plugins of plain casts, their settings, and the casts of inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from polyshard.errors import ConfigError, did_you_mean
from polyshard.interfaces import (
    InputCast,
    OutputCast,
    PluginContext,
    PrecisionCapabilities,
    PrecisionPlugin,
    UnitDtypes,
    UnitSpec,
    resolve_class,
    resolve_classes,
)
from polyshard.nested import map_tensors
from typing_extensions import override

#: The value of a setting of a dtype: a name, a ``torch.dtype``, or None where the setting has a meaning for it.
DtypeSetting = str | torch.dtype | None

_NAMES = {
    torch.float16: ("fp16", "float16", "half"),
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float32: ("fp32", "float32", "float"),
    torch.float64: ("fp64", "float64", "double"),
}
_BY_NAME = {name: dtype for dtype, names in _NAMES.items() for name in names}
#: The dtypes that parameters compute in and gradients are reduced in, in order of width.
COMPUTABLE = tuple(_NAMES)


class Unchanged(PrecisionPlugin):
    """``none``: every parameter computes, travels and is reduced in its own dtype; nothing is cast."""

    api_version = 1

    def __init__(self, context: PluginContext) -> None:
        del context

    @override
    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        return _own_dtype(unit)


@dataclass(frozen=True, slots=True)
class PrecisionSettings:
    """The settings of one unit before its master dtype is known."""

    param: torch.dtype | None = None
    """Compute dtype; None for the master dtype."""
    reduce: torch.dtype | None = None
    """In which gradients are accumulated; None for the compute dtype."""
    communication: torch.dtype | None = None
    """In which gradients of one backward travel; None for the narrower of compute and reduce dtype."""
    buffer: torch.dtype | None = None
    """Dtype of floating-point buffers; None leaves them alone."""
    output: torch.dtype | None = None
    """Dtype of the unit's floating-point outputs; None leaves them alone."""
    cast_inputs: bool = True
    """Cast a unit's floating-point inputs to ``param``."""
    cast_root_inputs: bool = True
    """Cast those of the outermost unit to ``param`` even without ``cast_inputs``."""
    keep_low_precision_grads: bool = False
    """Give gradients to the optimizer in the reduce dtype where that is narrower than the master dtype."""
    full_precision_in_eval: bool = False
    """Compute in the master dtype in eval mode."""
    reduce_in_master: bool = False
    """Without ``reduce``, accumulate gradients in the master dtype."""

    def dtypes(self, unit: UnitSpec, where: str) -> UnitDtypes:
        """The dtypes of ``unit``. Raises ``ConfigError`` where ``reduce`` cannot hold what travels."""
        master = unit.master_dtype
        compute = master if unit.keeps_dtype else self.param or master
        reduce = self.reduce or (master if self.reduce_in_master else compute)
        communication = self.communication or _narrower(compute, reduce)
        _require_wide_reduction(reduce, communication, f"{where}, unit {unit.label!r}")
        grad = _narrower(master, reduce) if self.keep_low_precision_grads else master
        return UnitDtypes(compute=compute, communication=communication, reduce=reduce, grad=grad, buffer=self.buffer)

    def check(self, where: str) -> None:
        """Raise ``ConfigError`` now for a ``reduce`` too narrow, where that does not depend on the master dtype."""
        reduce = self.reduce or (None if self.reduce_in_master else self.param)
        if self.communication is not None and reduce is not None:
            _require_wide_reduction(reduce, self.communication, where)

    def casts_inputs_of(self, unit: UnitSpec) -> bool:
        return self.cast_inputs or (unit.is_root and self.cast_root_inputs)

    def in_half_range(self) -> bool:
        """Whether gradients pass through fp16, whose smallest values flush to zero."""
        return torch.float16 in (self.param, self.reduce, self.communication)


class Configured(PrecisionPlugin):
    """A precision plugin whose answers follow from settings, one for all units unless a subclass has more."""

    def __init__(
        self,
        context: PluginContext,
        settings: PrecisionSettings,
        leave_alone: type | str | Iterable[type | str],
    ) -> None:
        self._where = f"precision {context.name!r}"
        settings.check(self._where)
        self._settings = settings
        self._left_alone = resolve_classes(leave_alone, f"leave_alone of {self._where}")

    @override
    def dtypes(self, unit: UnitSpec) -> UnitDtypes:
        """The dtypes of ``unit``: its own where the module is left alone or the parameters are not floating-point."""
        if self._is_left_alone(unit) or not unit.master_dtype.is_floating_point:
            return _own_dtype(unit)
        return self._settings_of(unit).dtypes(unit, self._where)

    @override
    def leaves_alone(self, module: torch.nn.Module) -> bool:
        return isinstance(module, self._left_alone)

    @override
    def full_precision_in_eval(self, unit: UnitSpec) -> bool:
        return self._settings_of(unit).full_precision_in_eval

    @override
    def input_cast(self, unit: UnitSpec) -> InputCast | None:
        """A cast to the compute dtype; for a module left alone inside a low-precision model, to its master dtype."""
        settings = self._settings_of(unit)
        if settings.param is None or not unit.master_dtype.is_floating_point:
            return None
        if self._is_left_alone(unit):
            return make_input_cast(unit.master_dtype)
        return make_input_cast(settings.param) if settings.casts_inputs_of(unit) else None

    @override
    def output_cast(self, unit: UnitSpec) -> OutputCast | None:
        """A cast to ``output``; behind a module left alone, back to the dtype in which those around it compute."""
        settings = self._settings_of(unit)
        if settings.output is not None:
            return make_output_cast(settings.output)
        if settings.param is None or unit.is_root or not self._is_left_alone(unit):
            return None
        return make_output_cast(settings.param) if unit.master_dtype.is_floating_point else None

    def _settings_of(self, unit: UnitSpec) -> PrecisionSettings:
        return self._settings

    def _is_left_alone(self, unit: UnitSpec) -> bool:
        return issubclass(unit.module_class, self._left_alone)


class _Uniform(Configured):
    """One compute dtype for every unit."""

    _compute: ClassVar[torch.dtype]

    def __init__(
        self,
        context: PluginContext,
        cast_inputs: bool = True,
        reduce: DtypeSetting = None,
        leave_alone: type | str | Iterable[type | str] = (),
    ) -> None:
        """Options, all of which may be left out.

        ``cast_inputs``: cast floating-point inputs of every unit to the compute dtype. ``reduce``: dtype in which
        gradients are accumulated over ranks; None for fp32. ``leave_alone``: classes, or ``"package.module:Name"``,
        of modules that keep their parameters' own dtype. Raises ``ConfigError`` for a value that it cannot take.
        """
        where = f"precision {context.name!r}"
        cast = switch(cast_inputs, f"cast_inputs of {where}")
        reduce = resolve_dtype(reduce, f"reduce of {where}") or torch.float32
        settings = PrecisionSettings(param=self._compute, reduce=reduce, cast_inputs=cast, cast_root_inputs=cast)
        super().__init__(context, settings, leave_alone)


class Fp32(_Uniform):
    """``fp32``: compute, travel and reduce in fp32; the optimizer sees gradients in the master dtype."""

    api_version = 1
    _compute = torch.float32


class Bf16(_Uniform):
    """``bf16``: compute and travel in bf16, reduction in fp32; the optimizer sees gradients in the master dtype."""

    api_version = 1
    _compute = torch.bfloat16


class Fp16(_Uniform):
    """``fp16``: compute and travel in fp16, reduction in fp32. Small gradients underflow without a gradient scaler."""

    api_version = 1
    _compute = torch.float16
    capabilities = PrecisionCapabilities(loss_scaling=True)


class Mixed(Configured):
    """``mixed``: every dtype set apart, for the whole model and for units that differ."""

    api_version = 1

    def __init__(
        self,
        context: PluginContext,
        param: DtypeSetting = None,
        reduce: DtypeSetting = None,
        communication: DtypeSetting = None,
        buffer: DtypeSetting = None,
        output: DtypeSetting = None,
        cast_inputs: bool = True,
        cast_root_inputs: bool = True,
        keep_low_precision_grads: bool = False,
        leave_alone: type | str | Iterable[type | str] = (),
        full_precision_in_eval: bool = False,
        reduce_in_master: bool = False,
        overrides: Mapping[type | str, Mapping[str, Any]] | None = None,
        keep: str | Iterable[str] = (),
    ) -> None:
        """Options, all of which may be left out; ``PrecisionSettings`` says what each means.

        Dtypes are names (``"bf16"``, ``"bfloat16"``, ``"torch.bfloat16"``) or ``torch.dtype``; ``"none"`` is None.
        ``output`` casts the outputs of every unit; ``overrides={"": {"output": "fp32"}}`` those of the root alone.

        ``leave_alone``: classes, or ``"package.module:Name"``, of modules that keep their parameters' own dtype; their
        inputs are cast to it and their outputs back to ``param``.

        ``overrides``: for some units, settings that replace those of the model. A key is a module class,
        ``"package.module:Name"``, or a shell pattern of the fully-qualified name of the unit's module
        (``"layers.*"``; the root's is empty). Settings that an entry does not name stay as they are; the first entry in
        order that fits a unit counts.

        ``keep``: shell patterns of fully-qualified names of parameters (``"*.norm.weight"``) that compute in their own
        dtype, beside others of their module that do not. Inputs and outputs are cast as without it.

        Raises ``ConfigError`` for an unknown dtype, setting or class, and for a ``reduce`` that is narrower than
        ``communication``.
        """
        where = f"precision {context.name!r}"
        settings = changed_settings(
            PrecisionSettings(),
            {
                "param": param,
                "reduce": reduce,
                "communication": communication,
                "buffer": buffer,
                "output": output,
                "cast_inputs": cast_inputs,
                "cast_root_inputs": cast_root_inputs,
                "keep_low_precision_grads": keep_low_precision_grads,
                "full_precision_in_eval": full_precision_in_eval,
                "reduce_in_master": reduce_in_master,
            },
            where,
        )
        super().__init__(context, settings, leave_alone)
        self._overrides = _resolve_overrides(settings, overrides or {}, where)
        scaled = any(entry.in_half_range() for entry in (settings, *self._overrides.values()))
        self.capabilities = PrecisionCapabilities(loss_scaling=scaled)
        self._kept = (keep,) if isinstance(keep, str) else tuple(keep)

    @override
    def keeps_dtype(self, unit: UnitSpec, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._kept)

    @override
    def _settings_of(self, unit: UnitSpec) -> PrecisionSettings:
        for key, settings in self._overrides.items():
            if isinstance(key, type):
                if issubclass(unit.module_class, key):
                    return settings
            elif fnmatchcase(unit.module_name, key):
                return settings
        return self._settings


def _own_dtype(unit: UnitSpec) -> UnitDtypes:
    dtype = unit.master_dtype
    return UnitDtypes(compute=dtype, communication=dtype, reduce=dtype, grad=dtype)


def _resolve_overrides(
    settings: PrecisionSettings, overrides: Mapping[type | str, Mapping[str, Any]], where: str
) -> dict[type | str, PrecisionSettings]:
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"overrides of {where} is a {type(overrides).__name__}. Give a table of tables.")
    resolved: dict[type | str, PrecisionSettings] = {}
    for key, changes in overrides.items():
        entry = f"overrides[{key!r}] of {where}"
        if not isinstance(changes, Mapping):
            raise ConfigError(
                f"{entry} is a {type(changes).__name__}. Give a table of settings such as param = 'fp32'."
            )
        is_pattern = isinstance(key, str) and ":" not in key
        changed = changed_settings(settings, changes, entry)
        changed.check(entry)
        resolved[key if is_pattern else resolve_class(key, entry)] = changed
    return resolved


def changed_settings(settings: PrecisionSettings, changes: Mapping[str, Any], where: str) -> PrecisionSettings:
    """``settings`` with ``changes``, whose values are as users write them."""
    kinds = {field.name: isinstance(field.default, bool) for field in fields(PrecisionSettings)}
    resolved: dict[str, Any] = {}
    for name, value in changes.items():
        if name not in kinds:
            near = did_you_mean(str(name), kinds)
            raise ConfigError(f"no setting has the name {name!r}, in {where}.{near} Settings: {', '.join(kinds)}.")
        read = switch if kinds[name] else resolve_dtype
        resolved[name] = read(value, f"{name} of {where}")
    return replace(settings, **resolved)


def make_input_cast(dtype: torch.dtype) -> InputCast:
    """A cast of every floating-point tensor in a forward's ``(args, kwargs)`` to ``dtype``.

    Looks into tuples, named tuples, lists, dicts and dataclasses. Integer, bool, complex and 8-bit floating-point
    tensors pass as they are. A tensor at several places stays one tensor, as attention modules require. An object in
    which nothing is cast is returned itself, not a copy. Differentiable: gradients of inputs arrive in the inputs' own
    dtype.
    """
    castable, cast_tensor = _cast_to(dtype)

    def cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Nearly every call in a step has inputs that are tensors in the right dtype already, and ends in this loop.
        for value in (*args, *kwargs.values()) if kwargs else args:
            if value is not None and (type(value) is not torch.Tensor or value.dtype in castable):
                break
        else:
            return args, kwargs
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
            return (args[0].to(dtype),), kwargs
        return map_tensors(cast_tensor, (args, kwargs))

    return cast


def make_output_cast(dtype: torch.dtype) -> OutputCast:
    """The same for a forward's output, which may be one tensor or nested containers of them."""
    _, cast_tensor = _cast_to(dtype)

    def cast(output: Any) -> Any:
        return cast_tensor(output) if type(output) is torch.Tensor else map_tensors(cast_tensor, output)

    return cast


def _cast_to(dtype: torch.dtype) -> tuple[frozenset[torch.dtype], Callable[[torch.Tensor], torch.Tensor]]:
    """The dtypes that are cast to ``dtype``, and the cast of one tensor."""
    # Not 8-bit floats: these have a meaning only with the scales that travel beside them.
    castable = frozenset(COMPUTABLE) - {dtype}
    return castable, lambda tensor: tensor.to(dtype) if tensor.dtype in castable else tensor


def resolve_dtype(value: DtypeSetting, where: str) -> torch.dtype | None:
    """The dtype that ``value`` means, or None for None and for ``"none"`` (a TOML file cannot say None).

    ``where`` names the setting in messages. Raises ``ConfigError`` for an unknown name and for a dtype that
    parameters cannot compute in.
    """
    if value is None:
        return None
    if isinstance(value, torch.dtype):
        if value in COMPUTABLE:
            return value
        raise ConfigError(
            f"{value} is not a dtype to compute or reduce in, in {where}. Use one of "
            f"{', '.join(str(dtype) for dtype in COMPUTABLE)}."
        )
    if not isinstance(value, str):
        raise ConfigError(
            f"a {type(value).__name__} is not a dtype, in {where}. Give a name such as 'bf16', or a torch.dtype."
        )
    name = value.casefold().removeprefix("torch.")
    if name == "none":
        return None
    if name in _BY_NAME:
        return _BY_NAME[name]
    near = did_you_mean(name, _BY_NAME)
    raise ConfigError(f"no dtype has the name {value!r}, in {where}.{near} Names: {', '.join(_BY_NAME)}.")


def switch(value: Any, where: str) -> bool:
    """``value``, which must be a bool; ``where`` names the setting in the ``ConfigError`` that is raised otherwise."""
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{value!r} is neither true nor false, in {where}. Write true or false, without quotes.")


def whole_number(value: object, least: int, where: str) -> int:
    """``value``, which must be an int of at least ``least``; ``where`` is as for ``switch``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{value!r} is no whole number of at least {least}, in {where}. Give one, without quotes.")
    return value


def _narrower(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The one with fewer bytes an element; ``second`` where both have as many."""
    return first if first.itemsize < second.itemsize else second


def _require_wide_reduction(reduce: torch.dtype, communication: torch.dtype, where: str) -> None:
    # fp16 and bf16 do not hold each other's values.
    if reduce != communication and reduce.itemsize <= communication.itemsize:
        raise ConfigError(
            f"reduce dtype {reduce} cannot hold gradients that travel in {communication}, in {where}. Set "
            f"communication to {reduce} or narrower, or reduce to {communication} or wider."
        )
