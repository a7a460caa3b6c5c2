"""The scripts and manifests of docs/launching.md, by torchrun's parser and a shell."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed.run import get_args_parser

PAGE = Path(__file__).parents[2] / "docs" / "launching.md"
TEXT = PAGE.read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`([\w.]+)`\n\n```\w+\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL))


def launched(script: str, folder: Path, **variables: str) -> list[Any]:
    """What ``script`` gives torchrun, by torchrun's parser, where Slurm's commands stand for two nodes."""
    stubs = {
        "torchrun": 'printf "%q " "$@"; echo; echo "${TORCH_ELASTIC_SHUTDOWN_TIMEOUT-}" >> waits',
        "scontrol": "echo host0; echo host1",
        "srun": 'shift; for SLURM_NODEID in 0 1; do export SLURM_NODEID; "$@"; done',
    }
    for name, body in stubs.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    environ = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **variables}
    done = subprocess.run(["bash", "-euc", script], cwd=folder, env=environ, capture_output=True, text=True, check=True)
    return [get_args_parser().parse_args(shlex.split(line)) for line in done.stdout.splitlines()]


def test_torchrun_takes_the_commands() -> None:
    commands = [get_args_parser().parse_args(words.split()) for words in re.findall(r"`torchrun (--.*?)`", TEXT)]
    assert [each.training_script for each in commands] == ["train.py"] * 4
    assert [(each.nnodes, each.node_rank) for each in commands[1:3]] == [("2", 0), ("2", 1)]
    assert commands[3].rdzv_endpoint == "host0:29500"


def test_slurm_starts_one_torchrun_a_node(tmp_path: Path) -> None:
    variables = {"SLURM_JOB_NODELIST": "host[0-1]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8"}
    found = launched(FILES["job.sh"], tmp_path, **variables)
    assert [each.node_rank for each in found] == [0, 1]
    for each in found:
        assert (each.nnodes, each.nproc_per_node, each.master_addr) == ("2", "8", "host0")
        assert each.training_script == "train.py"
    # Behind the signal's 120 seconds, Slurm kills.
    assert "--signal=TERM@120" in FILES["job.sh"]
    assert (tmp_path / "waits").read_text().split() == ["110", "110"]


def test_skypilot_numbers_the_nodes(tmp_path: Path) -> None:
    task = yaml.safe_load(FILES["sky.yaml"])
    (found,) = launched(
        task["run"],
        tmp_path,
        SKYPILOT_NUM_NODES="2",
        SKYPILOT_NODE_RANK="1",
        SKYPILOT_NUM_GPUS_PER_NODE="8",
        SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
    )
    assert (found.nnodes, found.node_rank, found.master_addr) == ("2", 1, "10.0.0.1")


def test_the_manifest_is_a_job_of_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    job = yaml.safe_load(FILES["pytorchjob.yaml"])
    for replicas in job["spec"]["pytorchReplicaSpecs"].values():
        (container,) = replicas["template"]["spec"]["containers"]
        # A process a GPU.
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
    # What the operator sets is what torchrun reads.
    for name, value in {
        "NNODES": "2",
        "NODE_RANK": "1",
        "NPROC_PER_NODE": "8",
        "MASTER_ADDR": "train-master-0",
    }.items():
        monkeypatch.setenv(f"PET_{name}", value)
    found = get_args_parser().parse_args(container["command"][1:])
    assert (found.nnodes, found.node_rank, found.nproc_per_node) == ("2", 1, "8")
    assert found.master_addr == "train-master-0"
