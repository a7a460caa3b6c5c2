"""Entry points as they are installed now, and the distributions that offer them.

They are read at each call: stevedore's own cache forgets which distribution offers a name, and for two minutes hides a
package that was just installed.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import urllib.parse
import urllib.request
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, EntryPoints
from typing import cast

from ..interfaces import Group

#: The distribution whose names are its own: no other package changes what they stand for.
BUILT_IN = "polyshard"


def scan() -> EntryPoints:
    """All entry points of all installed distributions, as they are now: about a millisecond for each ten of them."""
    # Python 3.11's annotation still names the class that 3.10 returned.
    return cast("EntryPoints", importlib.metadata.entry_points())


@dataclass(frozen=True)
class Offer:
    """An entry point, with name and version of the distribution that offers it; both empty where there is none."""

    entry_point: EntryPoint
    distribution: str
    version: str

    @property
    def name(self) -> str:
        return self.entry_point.name

    @property
    def value(self) -> str:
        return self.entry_point.value

    @property
    def label(self) -> str:
        """The name that nobody else's plugin has."""
        return f"{self.distribution}:{self.name}"

    @property
    def origin(self) -> str:
        return f"{self.distribution} {self.version}".strip() or "an unnamed distribution"

    @property
    def built_in(self) -> bool:
        return normalised(self.distribution) == BUILT_IN


def offers_of(group: Group, scanned: EntryPoints | None = None, name: str | None = None) -> list[Offer]:
    """The group's entry points, or those called ``name``, ordered, each once.

    An editable install can leave two metadata folders of one distribution, or one file that lists a line twice.
    """
    # A package that offers many plugins is read once.
    origins: dict[int, tuple[str, str]] = {}
    found: dict[tuple[str, str, str], Offer] = {}
    for entry_point in (scan() if scanned is None else scanned).select(group=group.value):
        # Nor are those parsed that offer nothing of this name.
        if name is not None and entry_point.name != name:
            continue
        if id(entry_point.dist) not in origins:
            origins[id(entry_point.dist)] = name_and_version(entry_point.dist)
        offer = Offer(entry_point, *origins[id(entry_point.dist)])
        found[offer.name, normalised(offer.distribution), offer.value] = offer
    return [found[key] for key in sorted(found)]


def name_and_version(distribution: Distribution | None) -> tuple[str, str]:
    """As its metadata say; both empty where there is no distribution."""
    if distribution is None:
        return "", ""
    head = (distribution.read_text("METADATA") or "").partition("\n\n")[0]
    # Of the headers alone: parsing takes twenty times as long, for a README that nobody asked for, at each field anew.
    fields = {key.lower(): value for key, value in _FIELD.findall(head)}
    if fields.keys() >= {"name", "version"}:
        return fields["name"], fields["version"]
    metadata = distribution.metadata
    return metadata["Name"], metadata["Version"]


#: Headers that take one line. What goes on in another begins with a blank there.
_FIELD = re.compile(r"^(Name|Version): *(.*?) *$", re.MULTILINE | re.IGNORECASE)


def normalised(distribution: str) -> str:
    """The form in which package indexes compare names: case and the separators ``-``, ``_``, ``.`` do not matter."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def editable_folder(entry_point: EntryPoint) -> str:
    text = entry_point.dist.read_text("direct_url.json") if entry_point.dist is not None else None
    if not text:
        return ""
    try:
        record = json.loads(text)
        editable = bool(record["dir_info"].get("editable"))
        parts = urllib.parse.urlsplit(record["url"])
    except (KeyError, TypeError, AttributeError, ValueError):
        return ""
    return urllib.request.url2pathname(parts.path) if editable and parts.scheme == "file" else ""
