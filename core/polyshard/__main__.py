"""``python -m polyshard``."""

from __future__ import annotations

import sys

from polyshard_tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
