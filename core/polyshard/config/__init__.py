"""Settings of sharding, and where each came from."""

from ..errors import did_you_mean
from .shard_config import FILE_FIELDS, ShardConfig, Strategy, config_of
from .sources import ENVIRONMENT_PREFIX, GROUP_OF_SETTING, NO_SETTINGS, Origin, PluginChoice, PluginSpec, Source

__all__ = [
    "ENVIRONMENT_PREFIX",
    "FILE_FIELDS",
    "GROUP_OF_SETTING",
    "NO_SETTINGS",
    "Origin",
    "PluginChoice",
    "PluginSpec",
    "ShardConfig",
    "Source",
    "Strategy",
    "config_of",
    "did_you_mean",
]
