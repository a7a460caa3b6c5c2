"""Shared by the packages for trainers: ``polyshard.transformers``, ``polyshard.accelerate`` and
``polyshard.lightning``. Nothing here imports a trainer, and each adds what to do about an error in its own words.
"""
