"""Installs a pretended third-party package: a metadata folder and modules, as pip would leave them on the path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def install(
    site: Path,
    distribution: str,
    version: str,
    entry_points: Sequence[tuple[str, str, str]],
    modules: Mapping[str, str] | None = None,
) -> None:
    """Write ``distribution`` into the folder ``site``, which the caller puts on ``sys.path``.

    ``entry_points``: (group, name, "module:attribute"); ``modules``: source text by module name. Module names must be
    unique over the whole test run, because imported modules stay in ``sys.modules``.
    """
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    lines: list[str] = []
    for group in dict.fromkeys(group for group, _, _ in entry_points):
        lines.append(f"[{group}]")
        lines += [f"{name} = {value}" for in_group, name, value in entry_points if in_group == group]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for name, source in (modules or {}).items():
        (site / f"{name}.py").write_text(source)
