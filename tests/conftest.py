"""Plugins for all tests."""

pytest_plugins = ["watchdog"]
