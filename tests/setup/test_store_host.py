"""The rank that hosts the store fails, or ends, while the others come to shard: they say so by name."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from processes import start_script

SCRIPT = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
import polyshard

rank, world_size, port, case = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timedelta(seconds=60))
dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
precision = "none"
if rank == 0:
    # The others wait in the exchange by then, or come later.
    time.sleep(0 if case == "late" else 1)
    if case == "killed":
        os._exit(9)
    precision = "bf61"
elif case == "late":
    time.sleep(2)
elif case == "absent" and rank == 2:
    time.sleep(25)
    os._exit(0)
try:
    polyshard.shard(model, polyshard.ShardConfig(precision=precision, timeout_s=50))
except BaseException as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    # As a script that fails: what it hosts ends with it.
    os._exit(1)
"""


def outputs(tmp_path: Path, world_size: int, case: str, of: int) -> list[str]:
    """What the first ``of`` of ``world_size`` processes print, which all must end by themselves."""
    script = tmp_path / "rank.py"
    script.write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    written = [tmp_path / f"output{rank}" for rank in range(world_size)]
    processes = [
        start_script(script, [str(rank), str(world_size), str(port), case], environ, written[rank], tmp_path / "errors")
        for rank in range(world_size)
    ]
    try:
        for process in processes[:of]:
            process.join(60)
            assert process.exitcode is not None, (tmp_path / "errors").read_text()
        return [file.read_text() for file in written[:of]]
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["waiting", "late"])
def test_the_host_of_the_store_fails(tmp_path: Path, case: str) -> None:
    texts = outputs(tmp_path, 3, case, 3)
    assert texts[0].startswith("PluginNotFoundError: ")
    for text in texts[1:]:
        assert text.startswith("RankMismatchError: Sharding failed on other ranks")
        assert "rank 0: PluginNotFoundError: " in text
        assert "'bf61'" in text


@pytest.mark.nightly
def test_a_failure_is_known_before_the_last_rank_has_come(tmp_path: Path) -> None:
    texts = outputs(tmp_path, 3, "absent", 2)
    assert texts[1].startswith("RankMismatchError: Sharding failed on other ranks")
    assert "rank 0: PluginNotFoundError: " in texts[1]


@pytest.mark.slow
def test_the_host_of_the_store_is_gone_without_a_word(tmp_path: Path) -> None:
    texts = outputs(tmp_path, 3, "killed", 3)
    for rank, text in enumerate(texts[1:], 1):
        assert text.startswith("RankMismatchError: ")
        assert f"while rank {rank} waited" in text
        assert "rank 0's unless the launcher has it" in text
        assert "The store of the ranks ended" in text
