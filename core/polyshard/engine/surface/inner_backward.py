"""Backwards that the program runs inside of a sharded module's forward.

``loss.backward()`` in a ``training_step``, say, or a block's own loss. A stage notices a backward where it comes
through one of the tensors that the stage returned, and a module that has not returned yet has none. A hook on every
parameter would notice, and cost more than the rest of a step's Python. What stands behind ``torch.autograd.backward``,
which ``Tensor.backward`` calls, is therefore exchanged as in [Note: torch's functions], and asks the models that run a
forward once it has ended.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _torch_private
from .live_roots import live_roots


def follow_inner_backwards() -> None:
    """Let models know of backwards inside of their forwards, for good. To be called once in a process."""

    def called(*args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            hidden(*args, **kwargs)
            return
        try:
            before(*args, **kwargs)
        except Exception as error:
            for reference in live_roots.references:
                root = reference()
                if root is not None:
                    root.tell_failed_backward(error)
            raise
        for reference in live_roots.references:
            root = reference()
            # One inside of another backward is a part of that, and asks when it ends.
            if root is not None and root.active is not None and not _torch_private.in_backward():
                root.end_inner_backward()

    hidden = _torch_private.hidden_from_compile(called)
    before = _torch_private.exchange_body(torch.autograd.backward, called)
