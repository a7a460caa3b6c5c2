"""Transformers' ``Trainer`` over models that polyshard shards, and ``generate`` with parameters gathered once a call.

Needs ``polyshard[transformers]``. Nothing else in polyshard imports it.
"""

from .generation import register_generate
from .initialization import initializer_of
from .preemption import PreemptionCallback
from .trainer import PolyshardMixin, PolyshardSeq2SeqTrainer, PolyshardTrainer

__all__ = [
    "PolyshardMixin",
    "PolyshardSeq2SeqTrainer",
    "PolyshardTrainer",
    "PreemptionCallback",
    "initializer_of",
    "register_generate",
]
