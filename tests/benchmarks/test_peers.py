"""The benchmark beside other sharders: its arithmetic, its model's size, its tables, and one run on two gloo ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import importing_from, run_script

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks() -> Iterator[None]:
    with importing_from(BENCHMARKS):
        yield


def row(peer: str, number: int, ms: float, **others: Any) -> dict[str, Any]:
    """A finished row of workload ``tiny``."""
    spread = {"median": ms, "q1": ms, "q3": ms, "min": ms - 1, "max": ms + 1}
    filled: dict[str, Any] = {"workload": "tiny", "peer": peer, "round": number, "ms": spread, "host_ms": spread}
    filled |= {"tokens_per_s": 1000 / ms, "wrap_s": 0.5, "first_step_s": 1.0, "alloc_retries": 0}
    filled |= {"peak_gib": 2.0, "peak_reserved_gib": 3.0, "losses": [4.0, 3.0]}
    return filled | others


def test_ratios_are_taken_within_rounds_and_then_their_median() -> None:
    from summary import summarise

    rows = [
        row("local", 0, 50.0),
        row("fsdp2", 0, 100.0),
        row("polyshard", 0, 80.0, peak_gib=1.5, losses=[4.0, 3.3]),
        row("fsdp2", 1, 120.0),
        row("polyshard", 1, 60.0, peak_gib=1.5),
        {"workload": "tiny", "peer": "local", "round": 1, "error": "out of memory"},
        row("fsdp2", 2, 90.0),
        row("polyshard", 2, 90.0, peak_gib=1.5),
        {"workload": "tiny", "peer": "ddp", "round": 0, "error": "it does not fit"},
    ]
    peers = summarise(rows)["tiny"]
    figures = peers["polyshard"]
    assert figures["ms"]["median"] == 80.0
    assert figures["ms_steps"] == {"min": 59.0, "max": 91.0}
    # 100/80, 120/60, 90/90; the ratio of the medians would be 100/80 as well, that of the means 310/230.
    assert (figures["speed_to_fsdp2"]["median"], figures["speed_to_fsdp2"]["max"]) == (1.25, 2.0)
    # Only round 0 has a local row.
    assert figures["speed_to_local"]["median"] == 50 / 80
    assert figures["peak_gib_to_fsdp2"] == 0.75
    assert figures["peak_reserved_gib_to_fsdp2"] == 1.0
    # A loss that differs in any step of any round shows.
    assert (figures["loss_difference"], peers["fsdp2"]["loss_difference"]) == (pytest.approx(0.1), 0.0)
    assert peers["ddp"] == {"error": "it does not fit"}
    assert (peers["local"]["rounds"], peers["local"]["errors"]) == (1, ["out of memory"])


def test_peers_are_named_by_what_they_are() -> None:
    from contenders import contender

    compiled = contender("polyshard:forward_prefetch=2+compile")
    assert (compiled.name, compiled.compiled) == ("polyshard:forward_prefetch=2+compile", True)
    assert contender("fsdp2", compiled=True).name == "fsdp2+compile"
    assert contender("polyshard-captured").captured
    for wrong in ("fsdp3", "polyshard:prefetch", "polyshard:without=x", "ddp+compile"):
        with pytest.raises(ValueError, match=r"peer"):
            contender(wrong)


def output_on_ranks(ranks: int, script: str, *arguments: str) -> str:
    """What ``script`` of the benchmarks prints when so many CPU ranks run it."""
    done = run_script(ranks, BENCHMARKS / script, ["--device", "cpu", *arguments])
    assert done.codes == [0] * ranks, done.errors[-3000:]
    return done.output


@pytest.mark.nightly
def test_peers_train_alike_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    peers = "local,fsdp1,fsdp2,polyshard,polyshard-keep,polyshard:strategi=x"
    measured = ["--work", "tiny", "--rounds", "1", "--steps", "2", "--peers", peers, "--out", str(out)]
    said = output_on_ranks(2, "peers.py", *measured)
    found = json.loads(out.read_text())
    peers = found["summary"]["tiny"]
    assert "CUDA" in peers["fsdp1"]["error"]
    assert "POLYSHARD_STRATEGY" in peers["polyshard:strategi=x"]["error"]
    for peer in ("fsdp2", "polyshard", "polyshard-keep"):
        assert peers[peer]["loss_difference"] < 1e-3
        assert peers[peer]["loss"]["last"] < peers[peer]["loss"]["first"]
    assert found["environment"]["world_size"] == 2
    assert "polyshard-keep" in said


@pytest.mark.nightly
def test_peers_that_take_turns_at_each_step_train_alike(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    peers = "local,fsdp1,fsdp2,polyshard,polyshard-no-shard,polyshard:without=buckets"
    measured = ["--by-step", "--work", "tiny", "--rounds", "2", "--steps", "2", "--peers", peers, "--out", str(out)]
    output_on_ranks(2, "peers.py", *measured)
    found = json.loads(out.read_text())
    assert len(found["rows"]) == 2 * 6
    assert all(len(row["ms"]["steps"]) == 2 for row in found["rows"] if row["peer"] != "fsdp1")
    summary = found["summary"]["tiny"]
    assert "CUDA" in summary["fsdp1"]["error"]
    for peer in ("polyshard", "polyshard-no-shard", "polyshard:without=buckets"):
        assert summary[peer]["rounds"] == 2
        assert summary[peer]["speed_to_polyshard"]["median"] > 0
        # Of another peer's losses, which ranks that disagree about the order would mix in, these are 3e-4 off.
        assert summary[peer]["loss_difference"] < 1e-4


@pytest.mark.nightly
def test_bandwidth_is_what_each_rank_receives_in_a_second(tmp_path: Path) -> None:
    out = tmp_path / "gathers.json"
    output_on_ranks(3, "gathers.py", "--sizes", "1", "--rounds", "1", "--out", str(out))
    found = json.loads(out.read_text())
    assert not found["problems"]
    assert {(row["operation"], row["world_size"]) for row in found["rows"]} == {
        (operation, world) for operation in ("gather", "reduce") for world in (2, 3)
    }
    for row in found["rows"]:
        world = row["world_size"]
        received = row["nbytes"] * (world - 1) / world
        # Rounded to hundredths.
        assert row["gb_s"] == pytest.approx(received / row["ms"]["median"] / 1e6, abs=0.006)


@pytest.mark.nightly
def test_gathers_are_compared_with_what_the_ranks_sent() -> None:
    assert "gathers of gloo are right with (2, 3) ranks" in output_on_ranks(3, "gathers.py", "--check")
