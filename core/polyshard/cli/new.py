"""``polyshard new``: writes a package with a plugin, to be changed by its author."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..scaffold import Kind, write_plugin

_DESCRIPTION = """\
Write a small plugin that works, its test and its entry point, for you to change. A FOLDER that is not there becomes a
package of that name; a package that is there gets one plugin more. Without --into, the package that you are in does, if
it has plugins of polyshard; otherwise a new folder polyshard-NAME is made."""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to ``commands``."""
    new = commands.add_parser(
        "new",
        help="write a package with a plugin of your own",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = [kind.value for kind in Kind]
    new.add_argument("kind", metavar="KIND", choices=kinds, help=f"what the plugin is for: {', '.join(kinds)}")
    new.add_argument("name", metavar="NAME", help="what a configuration calls it: lower-case words and underscores")
    new.add_argument("--into", type=Path, metavar="FOLDER", help="the package's folder")
    new.set_defaults(run=_new)


def _new(arguments: argparse.Namespace) -> int:
    written = write_plugin(Kind(arguments.kind), arguments.name, arguments.into)
    for path in written.added:
        print(f"wrote    {written.folder / path}")
    for path in written.changed:
        print(f"changed  {written.folder / path}")
    # pip takes a folder for one only where it looks like a path.
    bare = written.folder.parts[:1] in ((), ("..",), ("/",))
    where = written.folder.as_posix() if bare else f"./{written.folder.as_posix()}"
    print(f"\nNext:\n  pip install --editable '{where}[test]'")
    print(f"  python -m pytest {where}")
    print(f"  polyshard plugins check {written.distribution}:{written.name}")
    print(f"\nA configuration picks it by: {written.kind.setting(written.name)}")
    return 0
