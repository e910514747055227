"""Settings of ``recycle-plan``: from the configuration to planning problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_recycle.arguments import at_least, is_integer, is_number
from lightning_recycle.errors import ConfigurationError
from lightning_recycle.planning import (
    Costs,
    Grid,
    Problem,
    Profile,
    Technique,
    Worker,
    load_profile,
    normalized_problem,
)
from lightning_recycle.planning.costs import Memory
from lightning_recycle.planning.normalization import contingencies, usual_limit

_PER_STAGE = ("forward", "backward_input", "backward_weight", "reduce", "optimizer")


def problem_from(config: Mapping[str, Any]) -> Problem:
    """The problem for the settings of ``conf/plan.yaml``.

    Raises:
        ConfigurationError: when a value is impossible.
        PlanningError: when there can be no plan.
    """
    base = _without_failures(config)
    failures = config["failures"]
    if is_integer(failures):
        return normalized_problem(base, failures)
    return replace(base, failed=_failures(config))


def problems_ahead(config: Mapping[str, Any]) -> list[Problem]:
    """The problems for a plan library: none failed, and the given failures.

    For a number, each distribution of 0, 1, ... failures over the stages, as far as ``library_plans`` allows, the
    likeliest first and those after normalization always. Each is there twice, within the limits that a run asks for
    before and after it has measured its memory.
    """
    base = _without_failures(config)
    failures, most = config["failures"], config["library_plans"]
    if not is_integer(most, 1):
        raise ConfigurationError(f"library_plans={most!r}: give an integer of at least 1.")
    if is_integer(failures):
        normalized = [normalized_problem(base, count) for count in (*range(failures), failures)]
        found = dict.fromkeys(normalized)
        for count in range(1, failures + 1):
            found |= dict.fromkeys(contingencies(base, count, most))
        # The plan after normalization is the last one.
        problems = sorted(list(found)[: max(most, len(normalized))], key=lambda p: (len(p.failed), p == normalized[-1]))
    else:
        problems = [base, replace(base, failed=_failures(config))]
    return list(dict.fromkeys(_limited(problem, measured) for problem in problems for measured in (False, True)))


def _limited(problem: Problem, measured: bool) -> Problem:
    """``problem`` within the limits of a run, too."""
    usual, given = usual_limit(problem.grid, problem.failed, measured=measured), problem.in_flight_limit
    if usual is None or given is None:
        return replace(problem, in_flight_limit=given if usual is None else usual)
    return replace(problem, in_flight_limit=tuple(map(min, given, usual)))


def _without_failures(config: Mapping[str, Any]) -> Problem:
    grid = Grid(*(config["grid"][name] for name in ("pipelines", "stages", "microbatches")))
    costs, profile = _costs(config["costs"], grid)
    technique = Technique(**{name: _switch(config, name) for name in ("split_backward", "staggered")})
    limit, memory = _in_flight(config["memory"], grid), _bytes(config["memory"], profile)
    checkpoint = config["memory"].get("checkpoint")
    if checkpoint is not None:
        if (limit is None and memory is None) or not is_number(checkpoint, 0):
            raise ConfigurationError(
                f"memory.checkpoint={checkpoint!r}: with memory.in_flight or memory.bytes, give the size of a"
                " stage's input as a fraction of a micro-batch's activations, e.g. 0.1, or null to compute nothing"
                " again."
            )
        if memory is None:
            assert limit is not None
            memory = Memory.counting(limit)
            limit = None
        memory = replace(memory, checkpoint=tuple(checkpoint * held for held in memory.after_forward))
    return Problem(grid, costs, technique=technique, in_flight_limit=limit, memory=memory)


def _costs(settings: Mapping[str, Any], grid: Grid) -> tuple[Costs, Profile | None]:
    if "path" in settings:
        path = settings["path"]
        if not isinstance(path, str) or not path:
            raise ConfigurationError(f"costs.path={path!r}: give the path of a profile, e.g. costs.path=profile.json.")
        profile = load_profile(path)
        if len(profile.stages) != grid.stages:
            raise ConfigurationError(
                f"{path} is the profile of {len(profile.stages)} stages: give grid.stages={len(profile.stages)}, "
                f"or a profile of {grid.stages}."
            )
        return profile.costs(), profile
    values = {}
    for name in _PER_STAGE:
        value = settings.get(name)
        if isinstance(value, Sequence) and not isinstance(value, str):
            if len(value) != grid.stages:
                raise ConfigurationError(
                    f"costs.{name} has {len(value)} values, the grid {grid} has {grid.stages} stages: "
                    "give one number, or one per stage."
                )
            values[name] = tuple(_duration(name, item) for item in value)
        else:
            values[name] = (_duration(name, value),) * grid.stages
    communication = _duration("communication", settings.get("communication"))
    return Costs(**values, communication=communication), None


def _duration(name: str, value: Any) -> float:
    if value is None:
        raise ConfigurationError(f"costs.{name} is missing: give a number of at least 0.")
    return at_least("", f"costs.{name}", value)


def _switch(config: Mapping[str, Any], name: str) -> bool:
    value = config["technique"][name]
    if not isinstance(value, bool):
        raise ConfigurationError(f"technique.{name}={value!r}: give true or false.")
    return value


def _bytes(memory: Mapping[str, Any], profile: Profile | None) -> Memory | None:
    size = memory["bytes"]
    if size is None:
        return None
    if profile is None:
        raise ConfigurationError("memory.bytes needs costs=profile, which has the size of a micro-batch.")
    if not is_number(size, 0):
        raise ConfigurationError(f"memory.bytes={size!r}: give a number of bytes, or null for no limit.")
    return profile.memory(size)


def _in_flight(memory: Mapping[str, Any], grid: Grid) -> tuple[int, ...] | None:
    limit = memory["in_flight"]
    if limit is None:
        return None
    limits = tuple(limit) if isinstance(limit, Sequence) and not isinstance(limit, str) else (limit,) * grid.stages
    if len(limits) != grid.stages or not all(is_integer(value, 1) for value in limits):
        raise ConfigurationError(
            f"memory.in_flight={limit!r}: a worker must hold at least the micro-batch it works on; give an integer of "
            f"at least 1, a list with one for each of the {grid.stages} stages, or null for no limit."
        )
    return limits


def _failures(config: Mapping[str, Any]) -> frozenset[Worker]:
    pairs = config["failures"]
    fine = isinstance(pairs, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(map(is_integer, pair)) for pair in pairs
    )
    if not fine:
        raise ConfigurationError(
            f"failures={pairs!r}: give the number of failed workers, or a list of [pipeline,stage], e.g. "
            "'failures=[[1,2]]'."
        )
    return frozenset(Worker(*pair) for pair in pairs)
