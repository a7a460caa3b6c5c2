"""Sizes from which on the engine takes one way rather than another, each with what speaks for it.

What they gain is in docs/performance.md.
"""

from __future__ import annotations

#: Elements from which a part is made: 4 MiB in a 16-bit dtype. Gathers of less take as long as their latency, so that
#: dividing them would only add one (docs/performance.md, "Gathers and reductions alone").
SMALLEST_PART = 1 << 21
