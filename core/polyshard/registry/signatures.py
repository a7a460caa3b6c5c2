"""Whether the methods of a plugin's class can be called as its contract calls them; nothing is called to find out."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

from .. import hookspecs
from ..config import did_you_mean

_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def method_faults(contract: type, cls: type) -> Iterator[str]:
    """What of ``cls``, a subclass of ``contract``, cannot be used as the contract uses it: a sentence for each."""
    for name in sorted(getattr(cls, "__abstractmethods__", ())):
        yield f"it lacks {_shown(contract, name)}"
    for name, wanted in _members(contract).items():
        found = _found(cls, name)
        if found is wanted:
            continue
        if not isinstance(wanted, FunctionType):
            if isinstance(found, FunctionType) and not isinstance(wanted, (staticmethod, classmethod)):
                yield f"{name} is a method and must be a property or an attribute: put @property above it"
            continue
        if isinstance(found, property):
            yield f"{name} is a property and must be a method: take @property away"
        elif not callable(found) and not hasattr(type(found), "__get__"):
            yield f"{name} is {found!r} and must be a method: {_shown(contract, name)}"
        else:
            yield from _call_faults(name, found, wanted)


def _found(cls: type, name: str) -> Any:
    """What a class has under ``name``, as it stands there: several times as fast as ``inspect.getattr_static``."""
    return next(vars(base)[name] for base in cls.__mro__ if name in vars(base))


@functools.lru_cache(maxsize=16)
def _members(contract: type) -> Mapping[str, Any]:
    """What the contract's classes define by name, without what is private."""
    members: dict[str, Any] = {}
    for base in reversed(contract.__mro__):
        if base is not object:
            members.update({name: each for name, each in vars(base).items() if not name.startswith("_")})
    return members


def _call_faults(name: str, found: Any, wanted: FunctionType) -> Iterator[str]:
    function = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
    if not isinstance(function, FunctionType) or _alike(found, wanted):
        # Of what is no function in Python, the call itself will tell.
        return
    # A wrapper is called, and not what it wraps.
    taken = inspect.signature(function, follow_wrapped=False)
    bound = () if isinstance(found, staticmethod) else (None,)
    parameters = list(inspect.signature(wanted).parameters.values())[1:]
    optional = [each for each in parameters if each.default is not inspect.Parameter.empty]
    for left_out in ((), optional) if optional else ((),):
        given = [each for each in parameters if each not in left_out]
        by_place = [each.name for each in given if each.kind in _BY_PLACE]
        by_name = [each.name for each in given if each.kind not in _BY_PLACE]
        try:
            taken.bind(*bound, *by_place, **dict.fromkeys(by_name))
        except TypeError as error:
            called = ", ".join([*by_place, *(f"{each}=..." for each in by_name)])
            yield f"{name}{taken} is called as {name}({called}): {_told(taken, [*bound, *by_place], error)}"
            return


def takes_context(factory: Any) -> bool:
    """Whether ``factory`` can be called with one argument by place and any by name."""
    plain: Any = factory
    if isinstance(factory, type) and _found(type(factory), "__call__") is _TYPE_CALL and _plainly_new(factory):
        plain = _found(factory, "__init__")
    if isinstance(plain, FunctionType) and not hasattr(plain, "__wrapped__"):
        # Known without a signature, which takes many times as long.
        return plain.__code__.co_argcount > (plain is not factory) or bool(plain.__code__.co_flags & inspect.CO_VARARGS)
    try:
        inspect.signature(factory).bind_partial(None)
    except ValueError:
        return True  # Some callables written in C have no signature; the call itself will tell.
    except TypeError:
        return False
    return True


_TYPE_CALL = vars(type)["__call__"]


def _plainly_new(cls: type) -> bool:
    return _found(cls, "__new__") is vars(object)["__new__"]


def _told(taken: inspect.Signature, by_place: list[Any], error: TypeError) -> str:
    """``error``, with the first argument for which there is no place."""
    for count in range(1, len(by_place) + 1):
        try:
            taken.bind_partial(*by_place[:count])
        except TypeError:
            return f"it does not take {by_place[count - 1]!r}" if by_place[count - 1] else "it does not take 'self'"
    return str(error)


def _alike(found: Any, wanted: FunctionType) -> bool:
    """Whether both take as many arguments by place, and the same by name: then nothing has to be bound to know."""
    if not isinstance(found, FunctionType):
        return False
    mine, theirs = found.__code__, wanted.__code__
    if mine.co_argcount != theirs.co_argcount or mine.co_kwonlyargcount != theirs.co_kwonlyargcount:
        return False
    by_name = frozenset(theirs.co_varnames[theirs.co_argcount :][: theirs.co_kwonlyargcount])
    return (
        by_name == frozenset(mine.co_varnames[mine.co_argcount :][: mine.co_kwonlyargcount])
        and (found.__kwdefaults__ or {}).keys() >= (wanted.__kwdefaults__ or {}).keys()
        and len(found.__defaults__ or ()) >= len(wanted.__defaults__ or ())
    )


def _shown(contract: type, name: str) -> str:
    wanted = _found(contract, name)
    if not isinstance(wanted, FunctionType):
        return f"the property {name}"
    return f"{name}({', '.join(list(inspect.signature(wanted).parameters)[1:])})"


#: Attribute that ``polyshard.hookimpl`` leaves on a function, and that of a specification.
_IMPLEMENTATION, _SPECIFICATION = f"{hookspecs.PROJECT_NAME}_impl", f"{hookspecs.PROJECT_NAME}_spec"


def hook_faults(cls: type) -> Iterator[str]:
    """Hooks that a listener's class implements and that do not exist, and arguments that a hook does not have."""
    specs = {name: each for name, each in vars(hookspecs).items() if hasattr(each, _SPECIFICATION)}
    for name, found in sorted(
        {name: each for base in reversed(cls.__mro__) for name, each in vars(base).items()}.items()
    ):
        options = getattr(found, _IMPLEMENTATION, None)
        if options is None or not isinstance(found, FunctionType):
            continue
        hook = options.get("specname") or name
        if hook not in specs:
            if not options.get("optionalhook"):
                yield f"it implements a hook {hook!r} that does not exist.{did_you_mean(hook, specs)}"
            continue
        known = inspect.signature(specs[hook]).parameters
        for asked in list(inspect.signature(found, follow_wrapped=False).parameters.values())[1:]:
            if asked.name not in known and asked.default is inspect.Parameter.empty:
                yield f"the hook {hook} has no argument {asked.name!r}; it has {', '.join(known)}"
