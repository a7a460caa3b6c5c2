"""What `make release` refuses, in a repository of its own, and the version in this one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import release

ROOT = Path(__file__).parents[2]
CHANGELOG = """# Changelog

## [Unreleased]

## [1.2.0] - 2026-11-26

- A change.

## [1.1.0] - 2026-10-01

- An older one.
"""


def git(root: Path, *words: str) -> None:
    settings = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    subprocess.run(["git", *settings, *words], cwd=root, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository that may be released."""
    version = tmp_path / "core" / "polyshard" / "_version.py"
    version.parent.mkdir(parents=True)
    version.write_text('__version__ = "1.2.0"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    (tmp_path / "CITATION.cff").write_text("title: a\nversion: 1.2.0\n")
    (tmp_path / "README.md").write_text("Version 1.2.0.\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "All")
    return tmp_path


def test_this_version_stands_everywhere() -> None:
    assert release.misnamed(ROOT) == []


def test_a_named_version_in_a_clean_checkout_is_ready(checkout: Path) -> None:
    assert release.unready(checkout) == []


def test_changes_that_no_commit_has_are_refused(checkout: Path) -> None:
    (checkout / "new.py").write_text("")
    assert release.unready(checkout) == [
        "the checkout has changes that no commit has: new.py. Commit or remove them",
    ]


def test_a_version_that_was_tagged_before_is_refused(checkout: Path) -> None:
    git(checkout, "tag", "v1.2.0")
    assert release.unready(checkout) == []
    git(checkout, "commit", "--quiet", "--allow-empty", "-m", "Later")
    assert release.unready(checkout) == ["the tag v1.2.0 is at another commit: raise core/polyshard/_version.py"]


def test_a_tag_of_another_version_is_refused(checkout: Path) -> None:
    git(checkout, "tag", "v1.3.0")
    assert release.unready(checkout) == ["the tag v1.3.0 is at this commit, which has version 1.2.0"]


def test_changes_that_the_changelog_does_not_have_are_refused(checkout: Path) -> None:
    (checkout / "changes").mkdir()
    (checkout / "changes" / "12.change.md").write_text("A change.\n")
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "-m", "A change")
    assert release.unready(checkout) == ["changes/12.change.md is not in CHANGELOG.md: make changelog"]


@pytest.mark.parametrize(
    ("file", "old", "new", "reason"),
    [
        ("CHANGELOG.md", " - 2026-11-26", "", "CHANGELOG.md has no changes below '## [1.2.0] - YYYY-MM-DD'"),
        ("CHANGELOG.md", "- A change.", "", "CHANGELOG.md has no changes below '## [1.2.0] - YYYY-MM-DD'"),
        ("CHANGELOG.md", "## [Unreleased]\n", "", "CHANGELOG.md has no '## [Unreleased]'"),
        ("CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n\n- Late.\n", "CHANGELOG.md has changes under Unreleased"),
        ("CITATION.cff", "1.2.0", "1.1.0", "CITATION.cff does not say 'version: 1.2.0'"),
        ("README.md", "1.2.0", "1.1.0", "README.md does not say 'Version 1.2.0.'"),
    ],
)
def test_a_version_that_is_not_named_is_refused(checkout: Path, file: str, old: str, new: str, reason: str) -> None:
    path = checkout / file
    path.write_text(path.read_text().replace(old, new))
    git(checkout, "commit", "--quiet", "--all", "-m", "Forgotten")
    (found,) = release.unready(checkout)
    assert found.startswith(reason)
