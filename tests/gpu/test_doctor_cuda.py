"""The doctor where there are CUDA devices."""

from __future__ import annotations

import os

import pytest
import torch
from polyshard_tools import doctor
from polyshard_tools.doctor import TrialState

pytestmark = pytest.mark.gpu


def test_devices_are_those_of_torch() -> None:
    machine = doctor.read_machine(dict(os.environ))
    assert [device.name for device in machine.devices] == [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]
    for index, device in enumerate(machine.devices):
        assert device.total_nbytes == torch.cuda.mem_get_info(index)[1]
        assert 0 < device.free_nbytes <= device.total_nbytes
        assert index not in device.peers
    assert machine.nccl is not None
    assert machine.nvidia_devices >= len(machine.devices)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.timeout(240)
def test_all_devices_train_over_nccl_as_an_unsharded_model_does() -> None:
    machine = doctor.read_machine(dict(os.environ))
    trial = next(each for each in doctor.trials_for(machine) if each.backend == "nccl")
    assert trial.world_size == torch.cuda.device_count()
    outcome = doctor.run_trial(trial, os.environ, limit_s=200.0)
    assert outcome.state is TrialState.EQUAL, outcome
