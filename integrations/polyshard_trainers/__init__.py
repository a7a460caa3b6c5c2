"""Shared by the packages for trainers: ``polyshard_transformers``, ``polyshard_accelerate`` and
``polyshard_lightning``. Nothing here imports a trainer, and each adds what to do about an error in its own words.
"""

from __future__ import annotations
