"""Models of links: fits, files, groups over hosts, and what is measured between real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from polyshard.errors import ConfigError
from polyshard.interfaces import PluginContext
from polyshard_backends.threaded import ThreadedCollectives, ThreadedWorld
from polyshard_tools.forecast import LINKS, Link, LinkModel, Operation, Span, find_links, fitted, read_links
from polyshard_tools.forecast.bench import bench, bench_machine

MIB = 2**20
_SIZES = (16 * 1024, 64 * 1024)


@given(
    latency=st.floats(1e-6, 1e-3),
    rate=st.floats(1e8, 1e12),
    ranks=st.integers(2, 64),
    operation=st.sampled_from(Operation),
)
def test_a_fit_finds_the_link_that_made_its_timings(
    latency: float, rate: float, ranks: int, operation: Operation
) -> None:
    made = Link(operation, ranks, latency, rate)
    sizes = [2**exponent * ranks for exponent in (14, 18, 22, 26)]
    found = fitted(operation, ranks, [(n, made.seconds(operation.received_nbytes(n, ranks), ranks, 1)) for n in sizes])
    for nbytes in sizes:
        received = operation.received_nbytes(nbytes, ranks)
        assert found.seconds(received, ranks, 1) == pytest.approx(made.seconds(received, ranks, 1), rel=1e-4)


def test_a_fit_has_no_latency_below_none() -> None:
    found = fitted(Operation.ALL_GATHER, 2, [(2 * MIB, 0.9), (4 * MIB, 2.0), (8 * MIB, 4.0)])
    assert found.latency_s == 0
    assert MIB / found.bandwidth == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("timings", [[(MIB, 1.0)], [(MIB, 1.0), (MIB, 2.0)], [(MIB, 2.0), (2 * MIB, 1.0)]])
def test_a_fit_without_growth_is_refused(timings: list[tuple[int, float]]) -> None:
    with pytest.raises(ConfigError, match="all_gather among 2 ranks"):
        fitted(Operation.ALL_GATHER, 2, timings)


def test_the_named_links_give_the_times_that_they_were_fitted_to() -> None:
    rows = json.loads((Path(__file__).parents[2] / "benchmarks/results/gathers.json").read_text())["rows"]
    kinds = {("gather", "registered"): Operation.ALL_GATHER, ("reduce", "nccl"): Operation.REDUCE_SCATTER}
    for row in rows:
        operation = kinds.get((row["operation"], row["backend"]))
        if operation is None or not row["aligned"]:
            continue
        seconds = LINKS["h200-nvlink"].seconds(operation, row["nbytes"], Span(range(row["world_size"])))
        assert seconds * 1e3 == pytest.approx(row["ms"]["median"], rel=0.2)


def test_more_ranks_than_were_measured_wait_longer_not_shorter() -> None:
    links = LINKS["h200-ndr"]
    times = [links.seconds(Operation.ALL_GATHER, 64 * MIB, Span(range(ranks))) for ranks in (16, 64, 1024, 16384)]
    assert times == sorted(times)
    # 64 MiB at 50 GB/s, and four times the latency of 16 ranks where there are 16**4.
    assert links.seconds(Operation.ALL_GATHER, 0, Span(range(65536))) == pytest.approx(
        4 * links.seconds(Operation.ALL_GATHER, 0, Span(range(16)))
    )


def test_links_come_back_from_a_file(tmp_path: Path) -> None:
    for links in LINKS.values():
        file = tmp_path / f"{links.name}.json"
        file.write_text(links.to_json())
        assert find_links(str(file)) == read_links(file) == links


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no links, but a list"),
        ("{}", "holds no links"),
        ('{"name": "x", "source": "", "ranks_per_host": 8, "inside": [{"operation": "send"}]}', "holds no links"),
        ('{"name": "x", "source": "", "ranks_per_host": 8, "inside": [], "beyond": 1}', "holds no links"),
        (
            '{"name": "x", "source": "", "ranks_per_host": 8, "inside": '
            '[{"operation": "all_gather", "ranks": 2, "latency_s": 0, "bandwidth": 0}]}',
            "bandwidth of all_gather among 2 ranks is 0",
        ),
    ],
)
def test_files_that_hold_no_links_are_named(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "links.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        find_links(str(file))


def test_links_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'h200-nvlink'|h200-nvlink"):
        find_links("h200-nvlnk")
    with pytest.raises(ConfigError, match="cannot read the links"):
        find_links(str(tmp_path / "absent.json"))
    with pytest.raises(ConfigError, match=r"nothing of all_gather among 2 hosts of 8 ranks.*bench-links"):
        LINKS["h200-nvlink"].seconds(Operation.ALL_GATHER, MIB, Span(range(16)))


# Measured.


def collectives(rank: int, world: ThreadedWorld) -> ThreadedCollectives:
    return ThreadedCollectives(PluginContext("threaded", torch.device("cpu")), world, rank)


class Counted(ThreadedCollectives):
    """Counts operations."""

    issued = 0

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> object:  # type: ignore[override]
        self.issued += 1
        return super().all_gather(out, shard)


def test_all_ranks_measure_the_same_by_as_many_operations() -> None:
    def measure(rank: int, world: ThreadedWorld) -> tuple[object, int]:
        counted = Counted(PluginContext("threaded", torch.device("cpu")), world, rank)
        return bench(counted, _SIZES, rounds=3), counted.issued

    (first, issued), (second, others) = ThreadedWorld(2).run(measure)
    assert first == second
    # Two to warm up and three rounds, of each size.
    assert issued == others == 2 * (2 + 3)
    assert {(each.operation, each.nbytes) for each in first} == {  # type: ignore[attr-defined]
        (operation, nbytes) for operation in (Operation.ALL_GATHER, Operation.REDUCE_SCATTER) for nbytes in _SIZES
    }


def test_parts_of_a_host_and_hosts_are_measured_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # On threads small buffers take as long as large ones; what is asked here is which groups were measured.
    monkeypatch.setattr(
        "polyshard_tools.forecast.bench.fitted",
        lambda operation, ranks, timings: Link(operation, ranks, 0.0, float(len(timings))),
    )

    def measure(rank: int, world: ThreadedWorld) -> LinkModel:
        return bench_machine(collectives(rank, world), 4, "threads", "a test", _SIZES, 1)

    found = ThreadedWorld(8).run(measure)
    assert all(each == found[0] for each in found)
    assert {(link.operation, link.ranks) for link in found[0].inside} == {
        (operation, ranks) for operation in (Operation.ALL_GATHER, Operation.REDUCE_SCATTER) for ranks in (2, 4)
    }
    assert {link.ranks for link in found[0].between} == {8}


@pytest.mark.parametrize(("sizes", "rounds"), [((1024,), 1), ((0, 4096), 1), (_SIZES, 0)])
def test_what_cannot_be_measured_is_named(sizes: tuple[int, ...], rounds: int) -> None:
    def measure(rank: int, world: ThreadedWorld) -> None:
        with pytest.raises(ConfigError, match="give two sizes or more"):
            bench(collectives(rank, world), sizes, rounds)

    ThreadedWorld(2).run(measure)


def test_one_rank_has_no_links() -> None:
    with pytest.raises(ConfigError, match="Start more of them with torchrun"):
        bench(collectives(0, ThreadedWorld(1)))
