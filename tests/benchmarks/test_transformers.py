"""The benchmark beside ``Trainer`` with FSDP2: its table."""

from __future__ import annotations

from typing import Any

import pytest


def row(peer: str, number: int, ms: float, **others: Any) -> dict[str, Any]:
    found = {"ms": {"median": ms}, "tokens_per_s": 1e6 / ms, "peak_gib": 2.0 + number, "reserved_gib": 3.0, "loss": 4.0}
    return {"case": "4 x 1024", "peer": peer, "round": number, **found, **others}


def test_ratios_are_taken_within_a_round_and_errors_stay_in_the_table() -> None:
    from trainer import summarise, table

    rows = [
        row("polyshard", 0, 100.0), row("fsdp2", 0, 110.0),
        row("fsdp2", 1, 240.0), row("polyshard", 1, 200.0),
        row("polyshard", 2, 100.0), {"case": "4 x 1024", "peer": "fsdp2", "round": 2, "error": "out of memory"},
        {"case": "4 x 2048", "peer": "polyshard", "round": 0, "error": "out of memory"},
    ]  # fmt: skip
    first, second, *errors = summarise(rows)
    assert (first["peer"], first["rounds"], first["ms"], first["peak_gib"]) == ("polyshard", 3, 100.0, 4.0)
    assert first["fsdp2_over_it"] == pytest.approx((1.1 + 1.2) / 2)
    assert (second["peer"], second["rounds"], second["fsdp2_over_it"]) == ("fsdp2", 2, 1.0)
    assert [each["error"] for each in errors] == ["out of memory", "not run"]
    lines = table(summarise(rows)).splitlines()
    assert lines[2] == "| 4 x 1024 | polyshard | 3 | 100.0 | 10,000 | 1.150 | 4.00 | 3.00 | 4.0000 |"
    assert lines[4].startswith("| 4 x 2048 | polyshard | out of memory |")
    assert len({line.count("|") for line in lines}) == 1
