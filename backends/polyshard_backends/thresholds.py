"""Sizes from which on a backend takes one way rather than another, each with what speaks for it.

What they gain is in docs/figures.md, "Gathers and reductions alone" above all.
"""

from __future__ import annotations

#: MiB of a whole unit from which on its gather buffer is registered with NCCL: gathers of 4 MiB are no faster so, those
#: of 69 MiB by a quarter on two GPUs.
SMALLEST_REGISTERED_MIB = 16
#: MiB of a whole unit from which on copy engines move what it sends. Below, two barriers of all ranks cost more than
#: the multiprocessors that the copies leave to computation.
SMALLEST_COPIED_MIB = 32
#: Results of fewer elements are summed by torch: starting the kernel would cost the host more than it saves the device.
LONG_ROW = 1 << 22
