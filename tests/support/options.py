"""Strategies with options by their bare names, so that tests can put the options of a case into one dict."""

from dataclasses import fields
from typing import Any

from lightning_recycle import ReCycleStrategy
from lightning_recycle.option_table import OptionGroup
from lightning_recycle.session.configuration import Options

GROUPS = {item.name: type(item.default) for item in fields(Options) if isinstance(item.default, OptionGroup)}


def recycle_strategy(*sizes: int, **options: Any) -> ReCycleStrategy:
    """``ReCycleStrategy(*sizes, **options)``, where options of groups are given without them."""
    for group, kind in GROUPS.items():
        names = {item.name for item in fields(kind)} & options.keys()
        if names:
            options[group] = kind(**{name: options.pop(name) for name in names})
    return ReCycleStrategy(*sizes, **options)
