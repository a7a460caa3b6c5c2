"""The scripts and manifests of docs/launching.md, by torchrun's parser, a shell, and the operator's schema."""

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

#: Of kubeflow.org/v1 PyTorchJob and core/v1, what the manifest uses: a type, a set of values, a list, or members.
_CONTAINER = {
    "name": {"pytorch"},  # the operator looks for this one
    "image": str,
    "command": [str],
    "resources": {"limits": {"nvidia.com/gpu": int}},
    "volumeMounts": [{"name": str, "mountPath": str}],
}
_VOLUME = {"name": str, "emptyDir": {"medium": {"", "Memory"}}, "persistentVolumeClaim": {"claimName": str}}
_REPLICAS = {
    "replicas": int,
    "restartPolicy": {"Always", "OnFailure", "Never", "ExitCode"},
    "template": {"spec": {"containers": [_CONTAINER], "volumes": [_VOLUME]}},
}
_JOB = {
    "apiVersion": {"kubeflow.org/v1"},
    "kind": {"PyTorchJob"},
    "metadata": {"name": str},
    "spec": {
        "nprocPerNode": str,
        "runPolicy": {"cleanPodPolicy": {"All", "Running", "None"}},
        "pytorchReplicaSpecs": {"Master": _REPLICAS, "Worker": _REPLICAS},
    },
}


def misfits(value: Any, schema: Any, at: str = "") -> list[str]:
    """The places of ``value`` that ``schema`` does not allow."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [at]
        return [found for name, each in value.items() for found in misfits(each, schema.get(name), f"{at}.{name}")]
    if isinstance(schema, list):
        wrong = not isinstance(value, list)
        return [at] if wrong else [found for each in value for found in misfits(each, schema[0], f"{at}[]")]
    allowed = schema is not None and (value in schema if isinstance(schema, set) else type(value) is schema)
    return [] if allowed else [at]


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
    assert set(task) <= {"resources", "num_nodes", "workdir", "setup", "run"}
    assert re.fullmatch(r"\w+:\d", task["resources"]["accelerators"])
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
    assert misfits(job, _JOB) == []
    assert misfits({**job, "spec": {**job["spec"], "nprocPerNode": 8, "replicas": 2}}, _JOB) == [
        ".spec.nprocPerNode",
        ".spec.replicas",
    ]
    for replicas in job["spec"]["pytorchReplicaSpecs"].values():
        pod = replicas["template"]["spec"]
        (container,) = pod["containers"]
        # A process a GPU.
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
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
