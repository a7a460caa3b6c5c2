"""Transformers' ``Trainer`` over models that polyshard shards, and ``generate`` with parameters gathered once a call.

Needs ``polyshard[transformers]``. Nothing else in polyshard imports it.
"""

from .generation import register_generate
from .trainer import PolyshardMixin, PolyshardSeq2SeqTrainer, PolyshardTrainer

__all__ = ["PolyshardMixin", "PolyshardSeq2SeqTrainer", "PolyshardTrainer", "register_generate"]
