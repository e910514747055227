"""Strategies with options by their bare names, so that tests can put the options of a case into one dict."""

import os
from dataclasses import fields
from typing import Any

from lightning_recycle import ReCycleStrategy
from lightning_recycle.arguments import OptionGroup
from lightning_recycle.planning import HeuristicPlanner
from lightning_recycle.session.configuration import Options

GROUPS = {item.name: type(item.default) for item in fields(Options) if isinstance(item.default, OptionGroup)}

QUICK_PLANNER = HeuristicPlanner(effort=1_000)
"""A few tries for each plan: most runs of tests end before they need any that is made ahead."""


def recycle_strategy(*sizes: int, **options: Any) -> ReCycleStrategy:
    """``ReCycleStrategy(*sizes, **options)``, where options of groups are given without them; by default with
    :data:`QUICK_PLANNER`, unless planners go by their names: in a plan library, for a coordinator of its own.
    """
    if "RECYCLE_COORDINATOR" not in os.environ and not {"planning", "plan_library"} & options.keys():
        options.setdefault("planner", QUICK_PLANNER)
    for group, kind in GROUPS.items():
        names = {item.name for item in fields(kind)} & options.keys()
        if names:
            options[group] = kind(**{name: options.pop(name) for name in names})
    return ReCycleStrategy(*sizes, **options)
