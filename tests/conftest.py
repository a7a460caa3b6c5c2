"""What must stand before torch is imported, and plugins, for all tests."""

import os

# Ranks share few cores; with more threads than cores they slow each other down, tenfold where the machine is busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["watchdog", "pace", "other_plugins"]
