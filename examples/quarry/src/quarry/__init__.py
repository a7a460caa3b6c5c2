"""Plugins of quarry for polyshard."""
