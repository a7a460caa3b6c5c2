"""Builds sdist and wheel, installs them in an environment that has what they declare and nothing else, and tries them.

    python tests/support/built_package.py

The wheel is built from the sdist and compared with the checkout, so that no file is left out of either. No network is
needed: the build backend is this interpreter's, and the new environment sees its copies of what the package depends on,
by links. A module that the package imports and does not declare is missing there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
SMOKE = Path(__file__).with_name("smoke.py")


class UnfitPackageError(Exception):
    """What was built cannot be published so."""


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a program. Raises ``UnfitPackageError`` with what it printed, where it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnfitPackageError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist, and from it the wheel, into ``folder``; returns both files."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def compare(wheel: Path) -> None:
    """Raise ``UnfitPackageError`` where ``wheel`` has not the checkout's modules, each as it is there."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    expected = {
        file.relative_to(package.parent).as_posix(): file.read_bytes()
        for package in (ROOT / name for name in settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}
    differing = sorted({name for name, _ in expected.items() ^ found.items()})
    if differing:
        raise UnfitPackageError(f"the wheel that the sdist builds differs from the checkout in {', '.join(differing)}")


def declared(requirements: Iterable[str], extra: str) -> dict[str, Distribution]:
    """What ``requirements`` with ``extra``, and what they require in turn, ask for here, by name."""
    found: dict[str, Distribution] = {}
    waiting = [(each, extra) for each in requirements]
    while waiting:
        text, of = waiting.pop()
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": of})):
            continue
        found[name] = distribution(name)
        waiting += [(each, "") for each in found[name].requires or []]
    return found


def bare_environment(folder: Path, wheel: Path, extra: str = "") -> Path:
    """A new environment with ``wheel`` and what it declares, ``extra`` included; returns its interpreter."""
    venv.create(folder, with_pip=False, symlinks=True)
    interpreter = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if name.split("/")[0].endswith(".dist-info")}
    requirements = PathDistribution(zipfile.Path(wheel, f"{info}/")).requires or []
    for each in declared(requirements, extra).values():
        for top in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(each.locate_file(top))))
    pip = (sys.executable, "-m", "pip", "--python", interpreter, "--disable-pip-version-check")
    run(*pip, "install", "--no-index", "--no-deps", wheel)
    run(*pip, "check")
    return interpreter


def build_and_try(folder: Path) -> tuple[Path, Path]:
    """Sdist and wheel in ``folder``, as they may be published. Raises ``UnfitPackageError``."""
    built = build(folder / "built")
    run(sys.executable, "-m", "twine", "check", "--strict", *built)
    compare(built[1])
    # Isolated: neither PYTHONPATH nor the working directory may lend it the checkout's modules.
    run(bare_environment(folder / "environment", built[1]), "-I", SMOKE, cwd=folder)
    return built


def main() -> int:
    """Build into ``dist/``, and say what was built; returns the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="folder of the two files (default: %(default)s)"
    )
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as temporary:
        try:
            built = build_and_try(Path(temporary))
        except UnfitPackageError as error:
            print(error, file=sys.stderr)
            return 1
        out.mkdir(parents=True, exist_ok=True)
        for file in built:
            print(shutil.copy(file, out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
