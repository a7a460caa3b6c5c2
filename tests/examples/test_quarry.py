"""examples/quarry keeps its contracts, and a model trains with both of its plugins, picked by name."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import acme_ranks
import polyshard
import pytest
import torch
from fake_distribution import install
from packaging.requirements import Requirement
from processes import KeptRanks

QUARRY = Path(__file__).parents[2] / "examples" / "quarry"
RANKS = KeptRanks()
STEPS, RATE = 3, 0.1


@pytest.mark.slow
def test_its_own_tests_pass() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "pyproject.toml"]
    done = subprocess.run(command, cwd=QUARRY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def trained(rank: int, site: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The parameters after a few steps, and the plugins of quarry that served."""
    config = polyshard.ShardConfig(
        collectives="gloo",
        policy={"name": "module_class", "classes": [acme_ranks.Block]},
        precision="quarry:stochastic_bf16",
        offload={"name": "quarry:nvme", "folder": str(site), "min_nbytes": 0},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(QUARRY / "src")
        patch.syspath_prepend(site)
        model = polyshard.shard(acme_ranks.made(), config)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        for step in range(STEPS):
            model(acme_ranks.batch(step, rank)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with polyshard.unsharded(model):
            parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return parameters, [str(used) for used in polyshard.plugins(model) if used.distribution == "quarry"]


@pytest.mark.slow
def test_a_model_trains_with_both_by_name(tmp_path: Path) -> None:
    project = tomllib.loads((QUARRY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (needs,) = [each for each in map(Requirement, project["dependencies"]) if each.name == "polyshard"]
    assert polyshard.__version__ in needs.specifier
    offers = [(group, *each) for group, names in project["entry-points"].items() for each in names.items()]
    install(tmp_path, project["name"], project["version"], offers)
    (first, used), (second, _) = RANKS.run(2, trained, tmp_path)
    assert sorted(used) == ["nvme (quarry 0.1.0)", "stochastic_bf16 (quarry 0.1.0)"]
    torch.testing.assert_close(first, second, rtol=0, atol=0)

    # The unsharded model in fp32, on the batches of both ranks.
    model, before = acme_ranks.made(), acme_ranks.made()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        for rank in range(2):
            (model(acme_ranks.batch(step, rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for (name, expected), start in zip(model.named_parameters(), before.parameters(), strict=True):
        change = (expected - start).norm()
        # bfloat16 has 8 bits of mantissa.
        assert (first[name] - expected).norm() < 0.05 * change, name
