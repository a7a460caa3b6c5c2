"""examples/acme is what `polyshard new` writes, installs, and trains a model right."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import tomllib
import venv
from pathlib import Path
from typing import Any

import acme_ranks
import pytest
import torch
from fake_distribution import install
from polyshard_tools.cli import main
from processes import KeptRanks
from torch import nn

ROOT = Path(__file__).parents[2]
ACME = ROOT / "examples" / "acme"
PAGE = ROOT / "docs" / "plugins.md"
SUPPORT = Path(__file__).parents[1] / "support"
RANKS = KeptRanks()

#: Two ranks of gloo, with all plugins of the package but its collectives. By labels: others may offer the same names.
TOGETHER = """
[shard]
collectives = "gloo"
precision = "acme:bf16_but_norms"
policy = "acme:keep_last"
offload = { name = "acme:disk", folder = "FOLDER" }
listeners = [{ name = "acme:tally", every = 2 }]
"""
#: One rank, with the collectives that pretend.
ALONE = """
[shard]
strategy = "no_shard"
collectives = { name = "acme:metered", inner = "acme:loopback" }
policy = "acme:keep_last"
"""


def files(folder: Path) -> dict[str, bytes]:
    """Those below ``folder``, but for what Python and pytest leave."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not {"__pycache__", ".pytest_cache"} & set(path.parts)
    }


def test_the_page_makes_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ polyshard (new .*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(commands) == 6
    for command in commands:
        assert main(shlex.split(command)) == 0
    assert files(tmp_path / "acme") == files(ACME)


def reference(ranks: int, mixed: bool) -> dict[str, torch.Tensor]:
    """Parameters after plain training on the batches of all ``ranks``; ``mixed``: in bf16, normalisation aside."""
    model = acme_ranks.made()
    parameters = dict(model.named_parameters())
    low = torch.bfloat16 if mixed else torch.float32

    def forward(x: torch.Tensor) -> torch.Tensor:
        narrow = {name: parameter.to(low) for name, parameter in parameters.items()}
        x = x.to(low)
        for index in range(acme_ranks.BLOCKS):
            at = f"layers.{index}"
            scale, shift = parameters[f"{at}.norm.weight"], parameters[f"{at}.norm.bias"]
            normed = nn.functional.layer_norm(x.float(), (acme_ranks.WIDTH,), scale, shift).to(low)
            x = x + torch.tanh(nn.functional.linear(normed, narrow[f"{at}.linear.weight"], narrow[f"{at}.linear.bias"]))
        return nn.functional.linear(x, narrow["head.weight"], narrow["head.bias"])

    optimizer = torch.optim.SGD(model.parameters(), lr=acme_ranks.RATE)
    for step in range(acme_ranks.STEPS):
        for rank in range(ranks):
            (forward(acme_ranks.batch(step, rank)).float().square().mean() / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def fresh_environment(folder: Path, package: Path) -> Path:
    """A new environment with ``package``, beside what is installed here; returns its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    interpreter = folder / "bin" / "python"
    (place,) = folder.glob("lib/python*/site-packages")
    # Not only their folders: an editable install is a file there that leads elsewhere.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    (place / "beside.pth").write_text("".join(lines))
    pip = [sys.executable, "-m", "pip", "--python", str(interpreter), "--disable-pip-version-check", "install"]
    run([*pip, "--quiet", "--no-index", "--no-deps", "--no-build-isolation", str(package)], folder)
    return interpreter


def run(command: list[str], folder: Path) -> str:
    """What a program prints; raises where it fails."""
    path = os.pathsep.join(filter(None, [str(SUPPORT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train_on_path(rank: int, folder: Path, file: str) -> dict[str, Any]:
    """``acme_ranks.train`` where the example and its entry points are on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ACME / "src")
        patch.syspath_prepend(folder)
        return acme_ranks.train(str(folder / file), rank)


@pytest.fixture
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """What ranks know after training with the example, installed by pip or as far as its entry points go."""
    (tmp_path / "masters").mkdir()
    (tmp_path / "together.toml").write_text(TOGETHER.replace("FOLDER", str(tmp_path / "masters")))
    (tmp_path / "alone.toml").write_text(ALONE)
    if request.param == "entry points":
        project = tomllib.loads((ACME / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        offers = [(group, *each) for group, names in project["entry-points"].items() for each in names.items()]
        install(tmp_path, project["name"], project["version"], offers)
        together = RANKS.run(2, train_on_path, tmp_path, "together.toml")
        return {"together": together, "alone": RANKS.run(1, train_on_path, tmp_path, "alone.toml")[0]}
    shutil.copytree(ACME, tmp_path / "acme", ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
    interpreter = fresh_environment(tmp_path / "environment", tmp_path / "acme")
    run([str(interpreter), "-m", "acme_ranks", "together.toml", "alone.toml", "result.pt"], tmp_path)
    result: dict[str, Any] = torch.load(tmp_path / "result.pt", weights_only=True)
    return result


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("trained", ["entry points", pytest.param("pip", marks=pytest.mark.nightly)], indirect=True)
def test_the_installed_example_trains_by_name(trained: dict[str, Any]) -> None:
    first, second = trained["together"]
    assert first["plugins"] == [
        "bf16_but_norms (acme 0.1.0)",
        "disk (acme 0.1.0)",
        "keep_last (acme 0.1.0)",
        "tally (acme 0.1.0)",
    ]
    expected = reference(ranks=2, mixed=True)
    for whole in (first["parameters"], second["parameters"]):
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-6)
    # Without the precision plugin the numbers would be others.
    exact = reference(ranks=2, mixed=False)
    assert not torch.allclose(expected["head.weight"], exact["head.weight"], rtol=1e-4, atol=1e-4)
    assert "layers.2" in first["kept"]
    assert "layers.0" not in first["kept"]
    assert len(first["lines"]) == 1
    assert first["lines"][0].startswith("step 2: ")
    assert second["lines"] == []

    alone = trained["alone"]
    assert alone["plugins"] == ["keep_last (acme 0.1.0)", "metered (acme 0.1.0; of loopback (acme 0.1.0))"]
    torch.testing.assert_close(alone["parameters"], reference(ranks=1, mixed=False), rtol=1e-5, atol=1e-6)
