"""Memory of tensors on the CPU, as torch's profiler counts it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def peak_of_live_bytes(function: Callable[[], Any], folder: Path) -> int:
    """Most bytes of tensor memory alive at once during ``function``, beyond those that were alive before."""
    # What earlier tests left in reference cycles must not be freed, and subtracted, in the middle.
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        function()
    trace = folder / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak
