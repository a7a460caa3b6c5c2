"""Plugins by name: ``find`` what is installed, ``check`` it against contracts, ``make`` instances.

``identity`` says what ranks compare of each.
"""

from .find import STATES, Installed, Permission, PluginState, installed
from .identity import engine_digest, fingerprint
from .make import Constructed, Resolved, UsedPlugin, construct, resolve, resolve_setting, used
