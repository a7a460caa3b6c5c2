"""Every exception that polyshard raises, and how it warns: once, by one rank, of what all ranks see alike.

Each leaf is also the built-in exception that ``torch.distributed.fsdp`` raises for the same input, so that ``except``
clauses written for FSDP go on working. A message has three parts, in this order: what was
wrong, where (fully-qualified name, rank), what to do.

``PolyshardDeprecationWarning`` is a warning and stands beside the tree; ``deprecation`` words it.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "AlreadyShardedError",
    "BackgroundSaveError",
    "CaptureError",
    "CheckpointDamagedError",
    "CollectiveAbortedError",
    "CollectiveError",
    "CollectiveTimeoutError",
    "ConfigAssertionError",
    "ConfigError",
    "ConfigTypeError",
    "DeviceError",
    "EmptyUnitError",
    "NonFiniteError",
    "ParameterChangedError",
    "ParameterError",
    "ParameterMovedError",
    "PeerFailedError",
    "PluginConflictError",
    "PluginContractError",
    "PluginError",
    "PluginLoadError",
    "PluginNotFoundError",
    "PluginRefusedError",
    "PluginVersionError",
    "PolyshardDeprecationWarning",
    "PolyshardError",
    "RankFailedError",
    "RankMismatchError",
    "ShardingError",
    "StateError",
    "StepAssertionError",
    "StepError",
    "TrainingStateError",
    "UnshardedUseError",
    "UnsupportedError",
    "WorldSizeError",
    "deprecation",
    "warn_once",
]


class PolyshardError(Exception):
    """Base of everything that polyshard raises on purpose."""


class ConfigError(PolyshardError, ValueError):
    """A setting that does not exist, or a value that the setting cannot take."""


class ConfigTypeError(ConfigError, TypeError):
    """A value of a type that the setting cannot take."""


class ConfigAssertionError(ConfigError, AssertionError):
    """Arguments that contradict each other."""


class UnsupportedError(PolyshardError, NotImplementedError):
    """A combination of settings that is not served."""


class PluginError(PolyshardError):
    """A plugin could not be found, loaded or used."""


class PluginNotFoundError(PluginError, LookupError):
    """No installed distribution offers a plugin of this name in the group."""


class PluginLoadError(PluginError, ImportError):
    """The plugin is installed, but importing or constructing it failed; the cause is chained."""


class PluginConflictError(PluginError, LookupError):
    """Several installed distributions offer the same name; ``"distribution:name"`` chooses one."""


class PluginRefusedError(PluginError, PermissionError):
    """``POLYSHARD_ALLOWED_PLUGINS`` or ``POLYSHARD_DISABLE_PLUGINS`` forbids the plugin; nothing of it ran."""


class PluginVersionError(PluginError, RuntimeError):
    """The plugin's ``api_version`` lies outside the range that this polyshard serves."""


class PluginContractError(PluginError, TypeError):
    """The plugin returned or lacks something that its contract does not allow."""


class ShardingError(PolyshardError):
    """A model cannot be sharded as asked. The model is left as it was."""


class ParameterError(ShardingError, ValueError):
    """A parameter that cannot be sharded: packed and trained, sparse, or with hooks that would never fire."""


class DeviceError(ShardingError, RuntimeError):
    """Parameters are on a device, or on several, that the chosen collectives do not serve."""


class AlreadyShardedError(ShardingError, ValueError):
    """The module, or one inside it, is managed by polyshard already."""


class EmptyUnitError(ShardingError, ValueError):
    """A module chosen as a unit has no parameter of its own left to shard."""


class WorldSizeError(ShardingError, ValueError):
    """The number of ranks cannot be served by the backend or divided as the strategy needs."""


class StepError(PolyshardError):
    """Something in a training step is not possible."""


class StateError(StepError, RuntimeError):
    """A call that the current phase of the step does not allow."""


class CheckpointDamagedError(StateError):
    """A file of a checkpoint is gone, or holds something else than was written; the message names it."""


class StepAssertionError(StateError, AssertionError):
    """A call that comes before or inside another one that it must follow."""


class TrainingStateError(StepError, ValueError):
    """A call that a module's training state does not allow."""


class UnshardedUseError(StepError, RuntimeError):
    """A parameter was used, or escaped from a forward, where its memory is not gathered."""


class ParameterChangedError(StepError, RuntimeError):
    """A parameter or gradient was replaced by something that cannot be written back."""


class ParameterMovedError(ParameterChangedError, AssertionError):
    """A parameter replaced between forward and backward: autograd has saved the old one."""


class CaptureError(StepError, RuntimeError):
    """A training step that cannot be captured in a CUDA graph, or not replayed for the arguments given."""


class NonFiniteError(StepError, FloatingPointError, RuntimeError):
    """A gradient, a norm or an output is infinite or not a number where that was to be refused."""


class BackgroundSaveError(StepError, RuntimeError):
    """A save in the background failed, as a later call tells on all ranks alike; this rank's own error is its cause."""


class RankMismatchError(StepError, RuntimeError):
    """Ranks resolved different plugins, or are about to issue different collectives."""


def different_calls(rank: int, calls: Sequence[str]) -> RankMismatchError:
    """The error on ``rank``, where ranks are about to issue ``calls``, one each, which are not the same."""
    listed = "\n".join(f"  rank {other}: {call}" for other, call in enumerate(calls))
    advice = (
        "Let every rank make the same calls in the same order: forwards, evaluation, saves, clipping and state dicts "
        "stand outside of 'if rank == 0', and loops have as many batches on each rank."
    )
    if all("all_gather" in call or "reduc" in call for call in calls):
        advice += (
            " What some ranks skip, as a tower without an image or an expert without a token, is agreed on before the "
            "forward by polyshard.agree_on_use, and passed by there with polyshard.skip. Or it is no unit by itself: "
            "leave its class out of the policy (leave_out of 'transformers', force_leaf of 'size' and 'budget'), so "
            "that it is gathered with the module around it, and set split_root=False where that is the whole model."
        )
    return RankMismatchError(f"Ranks are about to issue different collectives (rank {rank}):\n{listed}\n{advice}")


class CollectiveError(PolyshardError):
    """A collective operation failed."""

    located: bool = False
    """Whether the message says at which of its model's communications this rank stood."""


class CollectiveTimeoutError(CollectiveError, TimeoutError):
    """A collective operation did not end in time; the message says which ranks did not arrive."""


class CollectiveAbortedError(CollectiveError, RuntimeError):
    """A collective operation was given up because another rank failed."""


class PeerFailedError(CollectiveAbortedError):
    """A collective operation was given up because another rank raised; the message has its error and traceback."""


class RankFailedError(PolyshardError, RuntimeError):
    """A process of ``polyshard_testing`` died, or returned or raised what cannot be sent to another process."""


class PolyshardDeprecationWarning(FutureWarning):
    """Something of polyshard's public API will be gone in a later version.

    A ``FutureWarning``, since Python hides a ``DeprecationWarning`` unless the program's own file caused it. What uses
    polyshard mostly is a module that a script imports, or a package of plugins, and there is one release to notice.
    """


#: The attribute of a plugin that was constructed by name: that name and the distribution, for messages.
PLUGIN_ORIGIN = "_polyshard_origin"


def plugin_name(plugin: object) -> str:
    """The class of ``plugin`` with its module, its name and its distribution, for messages."""
    origin = getattr(plugin, PLUGIN_ORIGIN, "")
    return f"{type(plugin).__module__}:{type(plugin).__qualname__}" + (f" ({origin})" if origin else "")


def told(value: object) -> str:
    """``value`` for messages: a single one as it is, anything else by its class, since a model's text fills pages."""
    # A dtype by its class's name: errors are read before torch is imported.
    plain = isinstance(value, bool | int | float | str | None) or type(value).__qualname__ == "dtype"
    return repr(value) if plain else f"an instance of {type(value).__qualname__}"


def deprecation(what: str, *, since: str, gone: str, instead: str) -> str:
    """The text of a deprecation.

    ``what``: the name as users write it; ``since``, ``gone``: versions of polyshard; ``instead``: a sentence without
    its full stop. To be given by ``warnings.warn(text, PolyshardDeprecationWarning, stacklevel=2)``, which points at
    the line that uses it.
    """
    return f"{what} is deprecated since polyshard {since} and will be gone in {gone}. {instead}."


#: Beginnings of names of modules that call each other until somebody is warned.
_INSIDE = ("polyshard", "torch.", "contextlib", "functools")
#: What ``warn_once`` has said.
_said: set[tuple[type[Warning], str]] = set()


def warn_once(text: str, category: type[Warning] = UserWarning, *, rank: int | None = None) -> bool:
    """Warn of what every rank sees alike: on rank 0 alone, and of each text once a process.

    The warning points at the line of the program that led here. What one rank may see alone is for ``warnings.warn``,
    on that rank and with its number. Python's filters are asked each time: ``always`` (also in ``pytest.warns``) shows
    and ``error`` raises it each time, and what ``ignore`` hides counts as not said.

    Args:
        text: What is wrong, where, and what to do.
        category: As of ``warnings.warn``.
        rank: This rank among those that see it. None for the job's, as ``torch.distributed`` has it; without that, 0.

    Returns:
        Whether this rank is the one that warns, also where it has done so before.
    """
    if (_rank_of_job() if rank is None else rank) > 0:
        return False
    if (category, text) not in _said:
        frame = sys._getframe(1)
        while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_INSIDE):
            frame = frame.f_back
        module, shown = frame.f_globals.get("__name__"), dict[Any, Any]()
        warnings.warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno, module, shown)
        # By its key, Python notes what it need not show again.
        if (text, category, frame.f_lineno) in shown:
            _said.add((category, text))
    return True


def _rank_of_job() -> int:
    # Here, since the errors are imported before torch is.
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def words(error: BaseException) -> str:
    """The type of ``error``, what it says, and notes of it, for other ranks. Raises nothing."""
    try:
        return " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    except Exception as failed:
        # The program's error is on its way, and another one must not take its place.
        return f"{type(error).__name__}, whose words cannot be told: its __str__ raised {type(failed).__name__}"


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """``" Did you mean 'x'?"`` for the known word nearest to ``word``, behind ``prefix``; case aside; or nothing."""
    by_folded = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(word.casefold(), by_folded, n=1)
    return f" Did you mean {prefix + by_folded[near[0]]!r}?" if near else ""
