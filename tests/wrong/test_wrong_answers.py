"""Checks that can fail: every wrong answer gets its message, every right one passes, and no exercise is without."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from moe_course.lessons.checks import exercises, notebooks  # noqa: E402
from moe_course.lessons.judging.judge import judge  # noqa: E402

FOLDER = Path(__file__).parent
EXERCISES = {exercise.name: exercise for notebook in notebooks() for exercise in exercises(notebook)}
ANSWERS = {
    name: answers
    for file in sorted(FOLDER.glob("nb*.py"))
    for name, answers in importlib.import_module(file.stem).ANSWERS.items()
}


def cases(kind: str) -> list:
    found = []
    for name, answers in ANSWERS.items():
        for item in getattr(answers, kind):
            function, *message = item if isinstance(item, tuple) else (item,)
            found.append(pytest.param(name, function, *message, id=f"{name}-{function.__name__}"))
    return found


@pytest.mark.parametrize(("name", "function", "message"), cases("wrong") + cases("lazy"))
def test_wrong_answers_get_their_message(name, function, message):
    verdict = judge(EXERCISES[name], function)
    assert not verdict.ok, f"{function.__name__} passed"
    assert message in str(verdict)
    assert str(verdict) == str(judge(EXERCISES[name], function))  # notebooks store it


@pytest.mark.parametrize(("name", "function"), cases("right"))
def test_right_answers_pass(name, function):
    verdict = judge(EXERCISES[name], function)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("name", EXERCISES)
def test_the_answer_key_passes_its_own_check(name):
    assert judge(EXERCISES[name], EXERCISES[name].answer).ok


@pytest.mark.parametrize("notebook", notebooks())
def test_every_exercise_has_wrong_lazy_and_right_answers(notebook):
    for exercise in exercises(notebook):
        assert exercise.name in ANSWERS, f"tests/wrong/{notebook}.py has no answers to {exercise.name}"
        answers = ANSWERS[exercise.name]
        counts = [len({function.__name__ for function, _ in answers.wrong}), len(answers.lazy), len(answers.right)]
        assert [count >= least for count, least in zip(counts, (3, 2, 2), strict=True)] == [True] * 3, (
            f"{exercise.name}: {counts} wrong, lazy and right answers, expected at least 3, 2 and 2"
        )
        messages = [message for _, message in answers.wrong]
        assert len(set(messages)) >= 3, f"{exercise.name}: its wrong answers must get messages of their own"


def test_names_and_numbers_are_unique_and_known():
    everything = [exercise for notebook in notebooks() for exercise in exercises(notebook)]
    assert len({exercise.name for exercise in everything}) == len(everything)
    assert len({exercise.number for exercise in everything}) == len(everything)
    for notebook in notebooks():
        for exercise in exercises(notebook):
            assert exercise.number.split(".")[0] == str(int(notebook.removeprefix("nb"))), exercise.number


@pytest.mark.parametrize("name", EXERCISES)
def test_cases_start_small_and_the_hidden_ones_hold_other_numbers(name):
    shown, hidden = (EXERCISES[name].cases(seed) for seed in (1, 2))
    assert len(shown) == len(hidden) >= 3
    assert repr(shown) == repr(EXERCISES[name].cases(1)), "cases must follow from the seed alone"
    assert repr(shown) != repr(hidden)
