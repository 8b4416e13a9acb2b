"""The exercises of each notebook, one module each; found by their names. Built in: notebook 00."""

from __future__ import annotations

import importlib
import pkgutil

from moe_course.errors import ConfigError
from moe_course.lessons.exercise import Exercise


class NoSuchExercise(ConfigError, AttributeError):
    """A name that no exercise has. A notebook shows the message alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython asks for it
        return [str(self)]


def notebooks() -> list[str]:
    """Names of the modules: nb00, nb02, …"""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name.startswith("nb"))


def exercises(notebook: str) -> tuple[Exercise, ...]:
    """The exercises of one of them, in order."""
    return importlib.import_module(f"{__name__}.{notebook}").EXERCISES


def find(name: str) -> Exercise:
    """The exercise of this name. Raises NoSuchExercise, which lists all there are."""
    known = {}
    for notebook in notebooks():
        for exercise in exercises(notebook):
            if exercise.name == name:
                return exercise
            known.setdefault(notebook, []).append(f"{exercise.name} ({exercise.number})")
    listed = "; ".join(f"{notebook}: {', '.join(names)}" for notebook, names in known.items())
    raise NoSuchExercise(f"there is no exercise {name!r}; there are {listed}")
