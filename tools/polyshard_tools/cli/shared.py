"""Shared by several commands: the configuration's file, the user's model and functions."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import Any

import torch
from polyshard.config import ShardConfig, did_you_mean
from polyshard.errors import ConfigError
from polyshard.io.progress import reporting_progress
from polyshard.planning.meshes import WorldMesh
from torch import nn


def config_of(arguments: argparse.Namespace) -> tuple[ShardConfig, int]:
    """The configuration in ``arguments.file`` over the ranks that ``arguments`` name, and the number of these.

    Raises ConfigError: as ``ShardConfig.from_toml``; the mesh is no names with sizes, or is missing.
    """
    if arguments.mesh is not None:
        sizes = _sizes_of(arguments.mesh)
        mesh: Any = WorldMesh.pretended(sizes)
        return ShardConfig.from_toml(arguments.file, arguments.table, mesh=mesh), math.prod(sizes.values())
    config = ShardConfig.from_toml(arguments.file, arguments.table)
    for setting in ("shard", "replicate"):
        names = getattr(config, setting)
        if names is not None:
            raise ConfigError(
                f"{setting} of [{arguments.table}] in {arguments.file} names {', '.join(map(repr, names))}, of which "
                f"--world-size says no sizes. Give those of the mesh instead: --mesh "
                f"{','.join(f'{name}=N' for name in names)}, with all of its dimensions, outermost first."
            )
    return config, arguments.world_size


def _sizes_of(text: str) -> dict[str, int]:
    pairs = [each.partition("=") for each in text.split(",")]
    sizes = {name.strip(): int(size) for name, _, size in pairs if size.strip().isdecimal() and int(size) > 0}
    if len(sizes) != len(pairs) or "" in sizes:
        raise ConfigError(f"--mesh {text!r} is no mesh. Write sizes of different dimensions, as dp=4,tp=2.")
    return sizes


@contextmanager
def shown_progress(work: str, unit: str, rank: int = 0) -> Iterator[None]:
    """Show what is told of progress inside as a line of stderr, on rank 0 and where that is a terminal."""
    # Here, since other commands need no plugin's package.
    from polyshard_plugins.progress import ProgressLine

    line = ProgressLine(rank=rank, unit=unit)
    try:
        with reporting_progress(partial(line, work)):
            yield
    finally:
        line.end()


@contextmanager
def importing_beside(file: str) -> Iterator[None]:
    """Find modules in the working directory and beside ``file``, as the script that is trained with it would."""
    before = list(sys.path)
    sys.path[:0] = [os.getcwd(), os.path.dirname(os.path.abspath(file))]
    try:
        yield
    finally:
        sys.path[:] = before


def function_at(reference: str, option: str) -> Callable[..., Any]:
    """The function or class that ``"package.module:name"`` names. ``option`` is where it was written.

    To be called inside of ``importing_beside``.

    Raises ConfigError: it cannot be imported, there is no such name, or it cannot be called.
    """
    module_name, _, path = reference.partition(":")
    if not (module_name and path):
        raise ConfigError(f"{option} {reference!r} names no function. Write it as package.module:name.")
    if module_name.endswith(".py"):
        written = module_name.removesuffix(".py").replace("/", ".")
        raise ConfigError(f"{option} {reference!r} names a file. Write its module: {written}:{path}.")
    try:
        found: Any = importlib.import_module(module_name)
    except KeyboardInterrupt:
        raise
    # A module may call sys.exit() when it is imported: the command must not end without a word.
    except BaseException as error:
        raise ConfigError(
            f"{option} {reference!r}: importing {module_name} raised {type(error).__name__}: {error}. It is looked for "
            f"in {os.getcwd()}, beside the configuration file, and among what is installed."
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            callables = [each for each in dir(found) if callable(getattr(found, each, None))]
            raise ConfigError(f"{option} {reference!r}: {module_name} has no {path}.{did_you_mean(name, callables)}")
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"{option} {reference!r} is of class {type(found).__name__}, which cannot be called.")
    function: Callable[..., Any] = found
    return function


def model_of(arguments: argparse.Namespace, *first: Any) -> nn.Module:
    """The model that ``--model`` and ``--model-args`` name, on the meta device; raises as ``model_from`` does.

    ``first``: arguments before those.

    To be called inside of ``importing_beside``, like whatever else imports modules of the user's. Their prints go to
    stderr: a command's own output may be JSON.
    """
    with redirect_stdout(sys.stderr):
        return model_from(arguments.model, _parsed(arguments.model_args), first)


def model_from(
    reference: str, arguments: Mapping[str, Any] | Sequence[Any] = (), first: Sequence[Any] = ()
) -> nn.Module:
    """The module that the factory ``"package.module:Name"`` makes of ``first`` and ``arguments``.

    ``arguments`` are keywords, or further positional ones.

    It is called under ``torch.device("meta")``: parameters have shapes and dtypes, and no memory. A tensor that the
    factory puts on another device by name stays there.

    Raises ConfigError: there is no such name, it cannot be called with ``arguments``, it failed, on the meta device or
    anywhere, or it returned no module.
    """
    factory = function_at(reference, "--model")
    # A module can be called, with a batch.
    if isinstance(factory, nn.Module):
        raise ConfigError(
            f"--model {reference!r} is {_kind(factory)}. Name the model's class, or a function that returns it."
        )
    positional, keywords = ((), arguments) if isinstance(arguments, Mapping) else (arguments, {})
    positional = (*first, *positional)
    try:
        inspect.signature(factory).bind(*positional, **keywords)
    except TypeError as error:
        shown = ", ".join([*map(str, first), *([json.dumps(arguments)] if arguments else [])]) or "no arguments"
        raise ConfigError(
            f"the model's factory {reference!r} cannot be called with {shown}: {error}. Give its arguments "
            "by --model-args as JSON, or name a function that takes none."
        ) from error
    except ValueError:
        pass  # Some callables written in C have no signature; the call itself will fail.
    try:
        with torch.device("meta"):
            made = factory(*positional, **keywords)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(
            f"the model's factory {reference!r} raised {type(error).__name__}: {error}. It was called on the meta "
            "device, where tensors have shapes and no values: let it not read any, nor load weights, or name a "
            "function that leaves these steps out."
        ) from error
    if not isinstance(made, nn.Module):
        raise ConfigError(
            f"the model's factory {reference!r} returned {_kind(made)}. Name the model's class, or a function that "
            "returns the model."
        )
    return made


def _parsed(text: str | None) -> Mapping[str, Any] | Sequence[Any]:
    if text is None:
        return ()
    example = """Write for example '{"depth": 4}'."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--model-args {text!r} is not JSON: {error}. {example}") from error
    if not isinstance(value, dict | list):
        raise ConfigError(f"--model-args {text!r} is neither an object nor a list. {example}")
    return value


def _kind(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, nn.Module):
        return f"a {type(value).__name__} that was built already"
    return f"an object of class {type(value).__name__}"
