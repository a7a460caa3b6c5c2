"""Transformers' ``Trainer`` over models that polyshard shards, and ``generate`` with parameters gathered once a call.

Needs ``polyshard[transformers]``. Nothing else in polyshard imports it.
"""

from __future__ import annotations

from .models import initializer_of, register_generate
from .trainer import PolyshardMixin, PolyshardSeq2SeqTrainer, PolyshardTrainer, PreemptionCallback

__all__ = [
    "PolyshardMixin",
    "PolyshardSeq2SeqTrainer",
    "PolyshardTrainer",
    "PreemptionCallback",
    "initializer_of",
    "register_generate",
]
