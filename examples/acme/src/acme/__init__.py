"""Plugins of acme for polyshard."""
