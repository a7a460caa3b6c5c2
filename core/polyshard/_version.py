"""The one place where the version stands; the build reads it from here without importing anything."""

__version__ = "0.3.0"
