"""Experiments: many points in one job, written as they would be typed.

Concept: Hydra's ``-m`` makes one cross product; a comparison needs several. An experiment maps sections of
the report to lines such as ``policy=spares policy.spares=0,1,2 failures.mtbf=6h,2h``, and each line is a separate
cross product. Values from the command line go before those of the lines.

Must not know: what is done at a point.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from lightning_recycle.errors import ConfigurationError

__all__ = ["Point", "points_of"]

_ITSELF = "experiment"


@dataclass(frozen=True, slots=True)
class Point:
    """One point: the section that shows it, and the overrides to compose it with."""

    section: str
    overrides: tuple[str, ...]


def points_of(sections: Mapping[str, Any], given: Sequence[str] = ()) -> list[Point]:
    """All points in the order of the lines, the last value of a line changing fastest.

    Args:
        sections: the lines of each section.
        given: overrides from the command line.

    Raises:
        ConfigurationError: when a section holds anything other than lines.
    """
    parser = OverridesParser.create()
    usual = {item.key_or_group: str(item.input_line) for item in parser.parse_overrides(list(given))}
    usual = {key: line for key, line in usual.items() if key.partition(".")[0] != _ITSELF}
    found = []
    for section, lines in sections.items():
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise ConfigurationError(f"experiment.{section}={lines!r}: give a list of lines of overrides.")
        for line in lines:
            choices: dict[str, list[str]] = {}
            for item in parser.parse_overrides(shlex.split(line)):
                key = item.get_key_element()
                values = item.sweep_string_iterator() if item.is_sweep_override() else [item.get_value_element_as_str()]
                choices[item.key_or_group] = [f"{key}={value}" for value in values]
            choices |= {key: [override] for key, override in usual.items()}
            found += [Point(section, values) for values in itertools.product(*choices.values())]
    return found
