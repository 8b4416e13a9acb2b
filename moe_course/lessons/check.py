"""`check.<name>(fn)`, `check.reveal(name)`, `check.keep(fn)`: what an exercise cell calls. Built in: notebook 00."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_course.lessons.exercise import Exercise
    from moe_course.lessons.judging.verdict import Verdict


class Check:
    """The checks of all exercises, by name. Nothing is loaded before one is asked for."""

    def __getattr__(self, name: str) -> Callable[[Callable], None]:
        if name.startswith("_"):  # what IPython asks every object for
            raise AttributeError(name)
        return partial(_show, _exercise(name))

    def __dir__(self) -> list[str]:
        from moe_course.lessons.checks import exercises, notebooks

        return ["keep", "reveal", *(exercise.name for notebook in notebooks() for exercise in exercises(notebook))]

    def reveal(self, name: str) -> None:
        """Print the answer: a short one where there is one, and the package's code, of docstrings the first line."""
        from moe_course.lessons.source import _without_long_docstring

        exercise = _exercise(name)
        if exercise.short:
            print(f"{exercise.short}\n\nthe package's own:\n")
        for place, function in enumerate((exercise.answer, *exercise.also)):
            if place:
                print("\n")
            source = textwrap.dedent(inspect.getsource(function))
            print("\n".join([f"# {function.__module__}", *_without_long_docstring(source)]))

    def keep(self, fn: Callable, name: str | None = None) -> None:
        """Store a function that passes its check in `my_moe/`; one that does not is only told why.

        Args:
            name: of the exercise, where the function is called something else.
        """
        from moe_course.lessons.keeping import keep

        own = getattr(fn, "__name__", "").removeprefix("my_")
        print(keep(_exercise(name or own), fn))


def verdict(name: str, fn: Callable) -> Verdict:
    """What `check.<name>(fn)` shows. Raises NoSuchExercise for a name that none has."""
    from moe_course.lessons.judging.judge import judge
    from moe_course.lessons.keeping import kept_functions

    return judge(_exercise(name), fn, kept_functions())


def _show(exercise: Exercise, fn: Callable) -> None:
    verdict(exercise.name, fn).show()


def _exercise(name: str) -> Exercise:
    from moe_course.lessons.checks import find

    return find(name)


check = Check()
