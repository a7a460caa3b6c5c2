"""The doctor's checks are functions of values; its trial starts real ranks, and ends those that hang."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_distribution import install
from polyshard.interfaces import Group
from polyshard.registry import installed
from polyshard_tools.cli import main
from polyshard_tools.doctor import checks, trial
from polyshard_tools.doctor.machine import Device, Machine, read_machine
from polyshard_tools.doctor.report import Finding, Level, Section
from polyshard_tools.doctor.trial import Trial, TrialState

GIB = 2**30
H200 = Device("NVIDIA H200", (9, 0), 140 * GIB, 139 * GIB, frozenset({1}))
#: With nothing to say of it.
BARE = Machine(
    environ={},
    installed={"polyshard": importlib.metadata.version("polyshard"), "torch": "2.13.0+cpu"},
    requirements=("torch>=2.11",),
    backends=frozenset({"gloo"}),
    interfaces=("lo", "eth0", "ib0"),
    host_addresses=("10.0.0.5",),
    cpus=8,
    open_files=65536,
    shared_memory_nbytes=8 * GIB,
)
#: Two devices that reach each other.
PAIR = dataclasses.replace(
    BARE,
    environ={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    devices=(H200, dataclasses.replace(H200, peers=frozenset({0}))),
    nvidia_devices=2,
    cuda="13.0",
    nccl="2.28.9",
    backends=frozenset({"gloo", "nccl"}),
)
PROBLEM, HINT = Level.PROBLEM, Level.HINT


def told(section: Section) -> dict[str, Level]:
    """The level of everything that is not fine."""
    assert all(finding.why and finding.cure for finding in section.findings if finding.level is not Level.FINE)
    return {finding.about: finding.level for finding in section.findings if finding.level is not Level.FINE}


def only(section: Section) -> Finding:
    (finding,) = section.findings
    return finding


@pytest.mark.parametrize("machine", [BARE, PAIR], ids=["CPU", "two devices"])
def test_there_is_nothing_to_say_of_a_machine_in_order(machine: Machine) -> None:
    for check in (checks.versions, checks.devices, checks.links, checks.variables, checks.limits):
        assert told(check(machine)) == {}


@pytest.mark.parametrize(
    ("machine", "environ", "expected"),
    [
        (PAIR, {"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_DISABLE": PROBLEM}),
        (BARE, {"NCCL_P2P_DISABLE": "1"}, {"NCCL_P2P_DISABLE": HINT}),
        (PAIR, {"NCCL_P2P_DISABLE": "0"}, {}),
        (PAIR, {"NCCL_SHM_DISABLE": "1"}, {"NCCL_SHM_DISABLE": PROBLEM}),
        (PAIR, {"NCCL_IB_DISABLE": "1"}, {}),
        (dataclasses.replace(PAIR, infiniband=("mlx5_0",)), {"NCCL_IB_DISABLE": "1"}, {"NCCL_IB_DISABLE": PROBLEM}),
        (PAIR, {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}, {"NCCL_ALGO": HINT, "NCCL_PROTO": HINT}),
        (PAIR, {"CUDA_LAUNCH_BLOCKING": "1"}, {"CUDA_LAUNCH_BLOCKING": PROBLEM}),
        (BARE, {"CUDA_LAUNCH_BLOCKING": "1"}, {"CUDA_LAUNCH_BLOCKING": HINT}),
        (PAIR, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": HINT}),
        (PAIR, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, {}),
        (PAIR, {"TORCH_NCCL_BLOCKING_WAIT": "1"}, {"TORCH_NCCL_BLOCKING_WAIT": PROBLEM}),
        (PAIR, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": HINT}),
        (PAIR, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, {"TORCH_DISTRIBUTED_DEBUG": HINT}),
        (PAIR, {"TORCH_DISTRIBUTED_DEBUG": "INFO"}, {}),
        (PAIR, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "0"}, {"PYTORCH_NO_CUDA_MEMORY_CACHING": PROBLEM}),
        (PAIR, {"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": HINT}),
        (PAIR, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"}, {"PYTORCH_ALLOC_CONF": HINT}),
        (PAIR, {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments: True"}, {}),
        (PAIR, {"OMP_NUM_THREADS": "4"}, {}),
        (PAIR, {"OMP_NUM_THREADS": "5"}, {"OMP_NUM_THREADS": HINT}),
        (BARE, {"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "8"}, {"OMP_NUM_THREADS": HINT}),
        (BARE, {"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "16"}, {}),
        (BARE, {"LOCAL_WORLD_SIZE": "4"}, {"OMP_NUM_THREADS": HINT}),
        (BARE, {}, {}),
        (dataclasses.replace(PAIR, nvidia_devices=8), {"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": HINT}),
        (dataclasses.replace(PAIR, devices=()), {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": PROBLEM}),
        (BARE, {"POLYSHARD_PRECISON": "bf16"}, {"POLYSHARD_PRECISON": PROBLEM}),
        (BARE, {"POLYSHRAD_PRECISION": "bf16"}, {"POLYSHRAD_PRECISION": HINT}),
        (BARE, {"POLY_SHARD_PRECISION": "bf16"}, {"POLY_SHARD_PRECISION": HINT}),
        (BARE, {"POLYSHARD_PRECISION": "bf16", "POLYSHARD_COLLECTIVES__WORLD_SIZE": "4", "POLYGON_KEY": "x"}, {}),
    ],
    ids=lambda value: " ".join(f"{name}={text}" for name, text in value.items()) if isinstance(value, dict) else "",
)
def test_a_variable_is_told_where_it_hurts(
    machine: Machine, environ: dict[str, str], expected: dict[str, Level]
) -> None:
    machine = dataclasses.replace(machine, environ={**machine.environ, **environ})
    assert told(checks.variables(machine)) == expected


def test_a_misspelt_setting_is_told_with_the_one_that_was_meant() -> None:
    machine = dataclasses.replace(BARE, environ={"POLYSHARD_PRECISON": "bf16"})
    assert "Did you mean 'POLYSHARD_PRECISION'?" in only(checks.variables(machine)).cure


@pytest.mark.parametrize(
    ("variable", "value", "right"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", True),
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth0,eth9", True),
        ("NCCL_SOCKET_IFNAME", "eno1", False),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
        ("NCCL_SOCKET_IFNAME", "^lo,eth,ib", False),
        ("NCCL_SOCKET_IFNAME", "^=lo,eth,ib", True),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0,eth9", False),
    ],
)
def test_an_interface_that_is_not_there_is_a_problem(variable: str, value: str, right: bool) -> None:
    section = checks.links(dataclasses.replace(BARE, environ={variable: value}))
    assert told(section) == ({} if right else {variable: PROBLEM})
    if not right:
        assert "lo, eth0, ib0" in only(section).what


def test_a_lighthouse_that_does_not_answer_is_a_problem() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        for listens in (False, True):
            if listens:
                listening.listen()
            read = read_machine({"TORCHFT_LIGHTHOUSE": address})
            machine = dataclasses.replace(BARE, environ=read.environ, lighthouse=read.lighthouse)
            assert told(checks.links(machine)) == ({} if listens else {"TORCHFT_LIGHTHOUSE": PROBLEM})


@pytest.mark.parametrize(
    ("requirement", "version", "expected"),
    [
        ("torch>=2.11", "2.11.0+cu130", {}),
        ("torch>=2.11", "2.9.1", {"torch": PROBLEM}),
        ("torch>=2.11", None, {"torch": PROBLEM}),
        ('transformers>=5; extra == "transformers"', "4.57.3", {"transformers": HINT}),
        ('transformers>=5; extra == "transformers"', "5.0.0", {}),
        ('transformers>=5; extra == "transformers"', None, {}),
        ('pytest>=8; extra == "test"', "7.4", {}),
        ("numpy", "1.0", {}),
    ],
)
def test_versions_below_what_is_asked_for(requirement: str, version: str | None, expected: dict[str, Level]) -> None:
    name = requirement.partition(">")[0].partition(";")[0]
    installed_ = {key: value for key, value in BARE.installed.items() if key != name}
    machine = dataclasses.replace(
        BARE, requirements=(requirement,), installed=installed_ | ({name: version} if version is not None else {})
    )
    assert told(checks.versions(machine)) == expected


def test_every_requirement_of_polyshard_is_understood() -> None:
    requirements = tuple(importlib.metadata.requires("polyshard") or ())
    assert len(requirements) > 10
    section = checks.versions(dataclasses.replace(BARE, requirements=requirements))
    assert "requirements" not in {finding.about for finding in section.findings}


def test_an_installation_that_is_not_what_is_imported() -> None:
    assert told(checks.versions(dataclasses.replace(BARE, installed={"torch": "2.13.0"}))) == {"polyshard": PROBLEM}
    other = {**BARE.installed, "polyshard": "99.0"}
    assert "99.0 is installed" in only(checks.versions(dataclasses.replace(BARE, installed=other))).what


def test_a_torch_that_does_not_serve_the_devices_there_are() -> None:
    plain = dataclasses.replace(BARE, nvidia_devices=2)
    assert "without CUDA" in only(checks.versions(plain)).what
    blind = dataclasses.replace(plain, cuda="13.0")
    assert "sees no device" in only(checks.versions(blind)).what


def test_devices_are_told_apart() -> None:
    apart = tuple(dataclasses.replace(device, peers=frozenset()) for device in PAIR.devices)
    assert told(checks.devices(dataclasses.replace(PAIR, devices=apart))) == {"peer access": HINT}
    # Which is why nothing is copied; that alone is another matter.
    unreached = dataclasses.replace(PAIR, devices=apart, uncopied="device 0 cannot access device 1")
    assert told(checks.devices(unreached)) == {"peer access": HINT}
    multicast = checks.devices(dataclasses.replace(PAIR, uncopied="symmetric memory would set up multicast"))
    assert only(multicast).what == "do not move units: symmetric memory would set up multicast"
    assert ("units from 64 MiB", "by NCCL") in multicast.facts
    assert ("units from 64 MiB", "by copy engines, with collectives 'auto'") in checks.devices(PAIR).facts
    taken = dataclasses.replace(H200, free_nbytes=20 * GIB)
    section = checks.devices(dataclasses.replace(PAIR, devices=(taken, PAIR.devices[1])))
    assert "120.0 GiB are taken already" in only(section).what
    old = Device("Tesla V100", (7, 0), 32 * GIB, 32 * GIB, frozenset({0}))
    assert told(checks.devices(dataclasses.replace(PAIR, devices=(H200, old)))) == {"cuda:1": HINT, "devices": HINT}


LOOPBACK = dataclasses.replace(BARE, host_addresses=("127.0.1.1", "::1"))


@pytest.mark.parametrize(
    ("check", "machine", "expected"),
    [
        (checks.limits, dataclasses.replace(BARE, open_files=1024), {"ulimit -n": HINT}),
        (checks.limits, dataclasses.replace(BARE, open_files=None), {}),
        (checks.limits, dataclasses.replace(BARE, shared_memory_nbytes=64 * 2**20), {"/dev/shm": HINT}),
        (checks.limits, dataclasses.replace(PAIR, shared_memory_nbytes=64 * 2**20), {"/dev/shm": PROBLEM}),
        (checks.limits, dataclasses.replace(PAIR, shared_memory_nbytes=None), {"/dev/shm": PROBLEM}),
        (checks.limits, dataclasses.replace(BARE, locked_nbytes=8 * 2**20), {}),
        (checks.limits, dataclasses.replace(BARE, locked_nbytes=8 * 2**20, infiniband=("ib",)), {"ulimit -l": HINT}),
        (checks.links, dataclasses.replace(BARE, backends=frozenset()), {"torch.distributed": PROBLEM}),
        (checks.links, dataclasses.replace(PAIR, backends=frozenset({"gloo"})), {"nccl": PROBLEM}),
        (checks.links, LOOPBACK, {"host name": HINT}),
        (checks.links, dataclasses.replace(BARE, host_addresses=()), {"host name": HINT}),
        (checks.links, dataclasses.replace(LOOPBACK, environ={"GLOO_SOCKET_IFNAME": "eth0"}), {}),
    ],
)
def test_limits_backends_and_addresses(
    check: Callable[[Machine], Section], machine: Machine, expected: dict[str, Level]
) -> None:
    assert told(check(machine)) == expected


@pytest.mark.usefixtures("no_other_plugins")
def test_plugins_that_cannot_be_used_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offers = [("polyshard.offload", "torn", "acme_ill:Torn"), ("polyshard.offload", "none", "acme_ill_not:Fine")]
    sources = {
        "acme_ill": "import a_library_that_is_absent",
        "acme_ill_not": "from polyshard_plugins.offload import NoOffload\nclass Fine(NoOffload):\n    api_version = 1",
    }
    install(tmp_path, "acme-ill", "1.0", offers, sources)
    monkeypatch.syspath_prepend(tmp_path)
    section = checks.plugins(installed(Group.OFFLOAD))
    assert told(section) == {
        "polyshard.offload torn (acme-ill)": PROBLEM,
        "polyshard.offload none (acme-ill)": HINT,
    }
    assert "a_library_that_is_absent" in next(each.why for each in section.findings if each.level is PROBLEM)


PAIR_OF_RANKS = Trial("gloo", "cpu", 2, 1e-12)


def pretended(program: str) -> tuple[str, ...]:
    """A rank's program that does without torch; ``settings`` are what it was given."""
    begin = "import json, os, sys, time\nsettings = json.loads(sys.argv[1])\n"
    begin += "file = f\"{settings['folder']}/rank{settings['rank']}.json\"\n"
    begin += "def note(**notes):\n    open(file, 'w').write(json.dumps(notes))\n"
    return (sys.executable, "-S", "-c", begin + program)


@pytest.mark.slow
def test_ranks_that_hang_are_ended_and_what_they_did_is_told(tmp_path: Path) -> None:
    program = (
        f"open(r'{tmp_path}/' + str(os.getpid()), 'w').close()\n"
        "note(stage='training' if settings['rank'] else 'comparing', difference=None)\n"
        "print('waiting for rank', settings['rank'], flush=True)\ntime.sleep(100)"
    )
    began = time.monotonic()
    outcome = trial.run_trial(PAIR_OF_RANKS, os.environ, limit_s=1.0, command=pretended(program))
    assert time.monotonic() - began < 60
    assert outcome.state is TrialState.HUNG
    assert outcome.stages == ("comparing", "training")
    processes = [int(each.name) for each in tmp_path.iterdir()]
    assert len(processes) == 2
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    finding = only(trial.trial_section([outcome]))
    assert finding.level is PROBLEM
    # Longer on a busy machine.
    assert re.search(r"did not end within \d+ s \(rank 0: comparing, rank 1: training\)", finding.what)
    # Of the rank that came least far.
    assert "waiting for rank 1" in finding.why
    assert "look at gathers and reductions" in finding.cure


@pytest.mark.slow
def test_a_rank_that_dies_is_told_by_its_own_words() -> None:
    program = (
        "note(stage='joining', difference=None)\n"
        "if settings['rank']: sys.exit('no route to host')\nprint('waiting', flush=True)\ntime.sleep(100)"
    )
    outcome = trial.run_trial(PAIR_OF_RANKS, os.environ, limit_s=60.0, command=pretended(program))
    assert (outcome.state, outcome.output) == (TrialState.FAILED, "no route to host")
    assert outcome.seconds < 50
    assert "GLOO_SOCKET_IFNAME" in only(trial.trial_section([outcome])).cure


@pytest.mark.parametrize(("difference", "state"), [(1e-15, TrialState.EQUAL), (0.25, TrialState.DIFFERENT)])
def test_a_difference_from_the_unsharded_model_is_a_problem(difference: float, state: TrialState) -> None:
    program = f"note(stage='done', difference={difference} if settings['rank'] else 0.0)"
    outcome = trial.run_trial(PAIR_OF_RANKS, os.environ, limit_s=60.0, command=pretended(program))
    # Rank 0 alone is equal: the largest of all counts.
    assert (outcome.state, outcome.difference) == (state, difference)
    assert only(trial.trial_section([outcome])).level is (Level.FINE if state is TrialState.EQUAL else PROBLEM)


def test_nccl_is_tried_where_two_devices_are() -> None:
    assert [each.title for each in trial.trials_for(BARE)] == ["2 ranks over gloo"]
    assert [each.title for each in trial.trials_for(PAIR)] == ["2 ranks over gloo", "2 ranks over nccl"]
    alone = dataclasses.replace(PAIR, devices=(H200,))
    assert [each.backend for each in trial.trials_for(alone)] == ["gloo"]


@pytest.mark.nightly
def test_two_real_ranks_train_as_an_unsharded_model_does() -> None:
    outcome = trial.run_trial(PAIR_OF_RANKS, os.environ | {"OMP_NUM_THREADS": "1"}, limit_s=200.0)
    assert outcome.state is TrialState.EQUAL, outcome
    assert outcome.stages == ("done", "done")
    assert outcome.difference is not None
    assert outcome.difference < 1e-12


def report_of(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", "--no-trial", *options])
    return code, json.loads(capsys.readouterr().out)


def test_the_exit_code_is_one_where_there_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("POLYSHARD_", "GLOO_", "NCCL_"))]:
        monkeypatch.delenv(name)
    code, report = report_of(capsys)
    titles = ["versions", "devices", "links", "variables", "plugins", "limits"]
    assert [section["title"] for section in report["sections"]] == titles
    problems = [each for section in report["sections"] for each in section["findings"] if each["level"] == "problem"]
    assert (code, report["level"] == "problem") == ((1, True) if problems else (0, False))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    code, report = report_of(capsys)
    assert (code, report["level"]) == (1, "problem")
    assert main(["doctor", "--no-trial"]) == 1
    text = capsys.readouterr().out
    assert "problem: GLOO_SOCKET_IFNAME 'nowhere0' leaves no interface" in text
    assert text.splitlines()[-1].startswith(f"{len(problems) + 1} problem")


@pytest.mark.parametrize("seconds", ["0", "inf", "soon"])
def test_a_time_limit_that_is_none(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--limit", seconds])
    assert ended.value.code == 2
    assert "--limit" in capsys.readouterr().err
