"""Cases of drawn programs: how many each test runs, and the smallest one that fails as the first that failed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from program_runs import check
from random_programs import Family, Program, Segment, Turn, Use, draw_program

_CHUNK, _RARE_CHUNK = 10, 50
#: ``POLYSHARD_PROGRAM=1020`` runs the program of that number alone, and prints it (pytest -s).
_ONE = os.environ.get("POLYSHARD_PROGRAM")


def programs(usual: int, nightly: int) -> pytest.MarkDecorator:
    """Cases ``(first, number)``: numbers of programs, of which the first ``usual`` ones are run by `make test`."""
    rare = [pytest.mark.nightly, pytest.mark.timeout(600)]
    cases: list[Any] = [(first, _CHUNK) for first in range(0, usual, _CHUNK)]
    cases += [pytest.param(first, _RARE_CHUNK, marks=rare) for first in range(0, nightly, _RARE_CHUNK)]
    return pytest.mark.parametrize(("first", "number"), cases if _ONE is None else [(int(_ONE), 1)])


#: What the drawn settings are warned of, by torch and by us.
QUIET = [
    # Torch's word on a re-entrant checkpoint inside a re-entrant one, whose first forward runs without gradients.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True"),
    pytest.mark.filterwarnings("ignore:(polyshard|FSDP) is switching to use `NO_SHARD`"),
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated"),
    pytest.mark.filterwarnings("ignore:.* has both parameters with requires_grad=True and False"),
]


def error_of(program: Program, folder: Path) -> BaseException | None:
    """What ``program`` fails with; None where it does not."""
    try:
        check(program, folder)
    except (Exception, pytest.fail.Exception) as error:
        return error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


def shrunk(program: Program, error: BaseException, folder: Path) -> tuple[Program, BaseException]:
    """The smallest program with an error of that kind that is found by leaving out one thing after the other."""
    for less in smaller(program):
        found = error_of(less, folder)
        if type(found) is type(error):
            assert found is not None
            return shrunk(less, found, folder)
    return program, error


def check_all(numbers: range, folder: Path, drawn: Callable[[int], Program] = draw_program) -> None:
    """Run all programs; one failure names all that failed, and prints the first, shrunk."""
    if _ONE is not None:
        print(drawn(numbers[0]))
    errors = {number: error_of(drawn(number), folder / str(number)) for number in numbers}
    failed = {number: error for number, error in errors.items() if error is not None}
    if failed:
        first = next(iter(failed))
        program, error = shrunk(drawn(first), failed[first], folder / "shrunk")
        pytest.fail(
            f"{len(failed)} of {len(numbers)} programs failed: {', '.join(map(str, failed))}. "
            f"POLYSHARD_PROGRAM={first} runs the first alone. What is left of it:\n{program}\n"
            f"{type(error).__name__}: {error}"
        )


def smaller(program: Program) -> Iterator[Program]:
    """Programs that do one thing less than ``program``."""
    steps = program.steps
    for index, step in enumerate(steps):
        others = steps[:index], steps[index + 1 :]
        if len(steps) > 1:
            yield replace(program, steps=others[0] + others[1])
        simpler = [
            replace(step, events=tuple(each for each in step.events if each is not event)) for event in step.events
        ]
        if step.turn is not Turn.PLAIN:
            simpler.append(replace(step, turn=Turn.PLAIN, ways=step.ways[:1]))
        if step.clip is not None:
            simpler.append(replace(step, clip=None))
        for number, way in enumerate(step.ways):
            for at, segment in enumerate(way):
                for less in _smaller_segments(segment):
                    its = (*way[:at], less, *way[at + 1 :])
                    simpler.append(replace(step, ways=(*step.ways[:number], its, *step.ways[number + 1 :])))
        yield from (replace(program, steps=(*others[0], each, *others[1])) for each in simpler)
    yield from (
        replace(program, **{name: False}) for name in ("nested", "tied", "in_backward") if getattr(program, name)
    )
    if program.form is not None:
        yield replace(program, form=None)
    if program.family is not Family.DENSE:
        yield replace(program, family=Family.DENSE)
    for name in program.small:
        yield replace(program, small={each: size for each, size in program.small.items() if each != name})


def _smaller_segments(segment: Segment) -> Iterator[Segment]:
    if segment.around is not None or segment.each is not None:
        yield replace(segment, around=None, each=None)
    if any(segment.drops):
        yield replace(segment, drops=(False,) * len(segment.drops))
    for place in range(len(segment.blocks)):
        if any(its[place] is not Use.USE for its in segment.uses):
            uses = tuple((*its[:place], Use.USE, *its[place + 1 :]) for its in segment.uses)
            yield replace(segment, uses=uses)
