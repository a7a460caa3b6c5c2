"""Makes the files of a release and says what to do with them. It uploads nothing, and changes nothing but ``dist/``.

    python tests/support/release.py

It refuses a checkout with changes, a version that the changelog, the citation or the README does not name, and one that
another commit's tag has. Then it
builds and tries what ``built_package.py`` does, installs the wheel with its extra ``train`` in a second bare
environment, and trains the demo of the sdist in there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from built_package import ROOT, UnfitPackageError, bare_environment, build_and_try

DEMO = "examples/byte_lm"
#: Of a changelog: a version's heading, and what stands below it.
_VERSION = re.compile(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def version_of(root: Path) -> str:
    """The version that ``root`` would build."""
    text = (root / "core" / "polyshard" / "_version.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def misnamed(root: Path) -> list[str]:
    """Where another version stands than the one that ``root`` would build, and what to write there."""
    version = version_of(root)
    found = []
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    changes = {name: (date, text.strip()) for name, date, text in _VERSION.findall(changelog)}
    date, text = changes.get(version, ("", ""))
    if not date or not text:
        found.append(f"CHANGELOG.md has no changes below '## [{version}] - YYYY-MM-DD': move those of Unreleased there")
    if "Unreleased" not in changes:
        found.append("CHANGELOG.md has no '## [Unreleased]': put an empty one above the versions")
    for name, wanted in (("CITATION.cff", f"version: {version}\n"), ("README.md", f"Version {version}.")):
        if wanted not in (root / name).read_text(encoding="utf-8"):
            found.append(f"{name} does not say '{wanted.strip()}'")
    return found


def unready(root: Path) -> list[str]:
    """What keeps ``root`` from a release, each with its remedy."""
    found = misnamed(root)
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    version = version_of(root)
    for name, _, text in _VERSION.findall(changelog):
        if name == "Unreleased" and text.strip():
            found.append(f"CHANGELOG.md has changes under Unreleased: move them below [{version}]")
    changed = _git(root, "status", "--porcelain").splitlines()
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        files = ", ".join(line[3:] for line in changed[:3])
        found.append(f"the checkout has changes that no commit has: {files}{more}. Commit or remove them")
    for path in sorted((root / "changes").glob("*.change.md")):
        found.append(f"changes/{path.name} is not in CHANGELOG.md: make changelog")
    # A workflow that the tag starts finds it at this commit.
    here, there = (set(_git(root, "tag", *words).split()) for words in (("--points-at", "HEAD"), ("--list",)))
    if f"v{version}" in there - here:
        found.append(f"the tag v{version} is at another commit: raise core/polyshard/_version.py")
    found += [f"the tag {tag} is at this commit, which has version {version}" for tag in sorted(here - {f"v{version}"})]
    return found


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


def run_demo(folder: Path, sdist: Path, wheel: Path) -> str:
    """Train the demo that ``sdist`` has, with ``wheel``; returns its last lines. Raises ``UnfitPackageError``."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    interpreter = bare_environment(folder / "with-train", wheel, "train")
    command = [interpreter, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [f"{DEMO}/train.py", "--config", f"{DEMO}/run.toml"]
    # Neither may lend it the checkout's modules.
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    environ |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=source, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnfitPackageError(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return "\n".join(line for line in done.stdout.splitlines() if line.startswith("step"))


def main() -> int:
    """Build into ``dist/``, and say what is next; returns the process's exit code."""
    version = version_of(ROOT)
    reasons = unready(ROOT)
    if reasons:
        print(f"{version} is not ready:", *(f"- {reason}" for reason in reasons), sep="\n", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            built = build_and_try(folder)
            print(run_demo(folder, *built).rpartition("\n")[2])
        except UnfitPackageError as error:
            print(error, file=sys.stderr)
            return 1
        # Files of another version must not be uploaded with these.
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        (ROOT / "dist").mkdir()
        files = [shutil.copy(file, ROOT / "dist") for file in built]
    print(f"polyshard {version}, built, checked, and trained with in bare environments:", *files, sep="\n  ")
    print(
        "Nothing was uploaded. Next:",
        "the rest of the list in CONTRIBUTING.md, 'A release'",
        f"git tag -a v{version} -m 'polyshard {version}' && git push origin v{version}",
        "python -m twine upload " + " ".join(f"dist/{Path(file).name}" for file in files),
        sep="\n  ",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
