"""Engines beside polyshard that Accelerate's launcher may have chosen, for whoever builds on Accelerate."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import ConfigError

#: The variables by which the launcher tells of them.
_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a ParallelismConfig",
}
_TRUE = ("1", "true", "yes", "on", "y", "t")


def refuse_engines(environ: Mapping[str, str], trainer: str) -> None:
    """Raise where ``environ`` asks for an engine beside polyshard. ``trainer``: whose models polyshard shards.

    Raises:
        ConfigError: naming the variable.
    """
    for variable, engine in _ENGINES.items():
        if environ.get(variable, "false").lower() in _TRUE:
            raise ConfigError(
                f"The environment asks Accelerate for {engine} ({variable}={environ[variable]}), but polyshard shards "
                f"the models of {trainer}. Launch with torchrun, or with a configuration of accelerate launch that "
                "has no such section."
            )
