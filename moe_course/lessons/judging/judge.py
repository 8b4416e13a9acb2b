"""Try a function on all cases of an exercise and say the first thing that is wrong. Built in: notebook 00."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from moe_course.lessons.exercise import Case, Cost, Exercise
from moe_course.lessons.judging.compare import difference
from moe_course.lessons.judging.limit import TooSlow, within
from moe_course.lessons.judging.rebuild import CannotRebuild, Rebuilt, rebuild
from moe_course.lessons.judging.trial import Trial, attempt
from moe_course.lessons.judging.verdict import Verdict

#: Seeds of the cases that are shown, and of those with other numbers.
SHOWN, HIDDEN = 1, 2
#: Ranks wait for each other, on a busy machine for long; one that never comes is found a little before time is up.
PATIENT = 3


def judge(exercise: Exercise, fn: Callable, kept: dict[str, Any] | None = None) -> Verdict:
    """The verdict on `fn`. What it prints itself stays visible.

    Args:
        kept: functions of earlier exercises, by name.
    """
    number = exercise.number
    try:
        rebuilt = rebuild(fn, {**(kept or {}), **exercise.names})
    except CannotRebuild as refused:
        return Verdict("refused", f"{number} cannot be checked: {refused}")
    if rebuilt.source and _is_stub(rebuilt.source):
        return not_attempted(exercise)
    bill, count = (Cost(), Cost()), 0
    for hidden in (False, True):
        for case in exercise.cases(HIDDEN if hidden else SHOWN):
            count += 0 if hidden else 1
            verdict, spent = _try(exercise, rebuilt, case, hidden)
            if verdict is not None:
                return verdict
            if not hidden:
                bill = tuple(Cost(a.rows + b.rows, a.nbytes + b.nbytes) for a, b in zip(bill, spent, strict=True))
    return Verdict("ok", f"{number} ok · {count} cases, and {count} more with other numbers{_costs(*bill)}")


def not_attempted(exercise: Exercise) -> Verdict:
    return Verdict("not attempted", f"{exercise.number} not attempted yet")


def _try(exercise: Exercise, rebuilt: Rebuilt, case: Case, hidden: bool) -> tuple[Verdict | None, tuple[Cost, Cost]]:
    row_bytes = exercise.row_bytes(case) if exercise.row_bytes else None
    key = attempt(exercise.answer, case, row_bytes=row_bytes)
    budget = exercise.budget(case) if exercise.budget else key.cost
    where = f"smallest failing case: {case.title}"
    if hidden:
        where += ", with other numbers. It passed on the numbers that are shown: are values written into the code?"
    if refusal := _signature(exercise, rebuilt.function, case):
        return refusal, (Cost(), Cost())
    seconds = exercise.seconds if case.ranks is None else PATIENT * exercise.seconds
    try:
        trial = within(
            seconds,
            lambda join: attempt(rebuilt.function, case, row_bytes=row_bytes, join=join, wait=0.8 * seconds),
        )
    except NotImplementedError:
        return not_attempted(exercise), (Cost(), Cost())
    except TooSlow as slow:
        return _slow(exercise, rebuilt, slow, where), (Cost(), Cost())
    except (Exception, SystemExit) as error:
        return _raised(exercise, rebuilt, error, where), (Cost(), Cost())
    found = (
        _changed(exercise, trial, where)
        or _wrong(exercise, case, key, trial, where)
        or _dear(exercise, case, trial.cost, budget, where)
    )
    return found, (trial.cost, budget)


def _wrong(exercise: Exercise, case: Case, key: Trial, trial: Trial, where: str) -> Verdict | None:
    for look in exercise.looks:
        for rank, (expected, result) in enumerate(zip(key.results, trial.results, strict=True)):
            wanted = look.of(expected)
            place = f"{look.name}{_on(case, rank)}"
            try:
                yours = look.of(result)
                found = difference(wanted, yours, look.tolerance)
            except Exception:  # whatever a strange result does when it is looked at
                says = f"{exercise.number} not right yet: no {place}, the function returned {_what(result)}"
                also = f"expected {_what(expected)}"
                return Verdict("wrong", says, [where, also], look.name)
            if found is not None:
                says = f"{exercise.number} not right yet: {place} {found.what}"
                why = found.cure or _why(exercise, case, look.name, wanted, yours)
                return Verdict("wrong", says, [where, *([why] if why else [])], look.name, found.table)
    return None


def _why(exercise: Exercise, case: Case, look: str, wanted: Any, yours: Any) -> str | None:
    try:
        return exercise.why(case, look, wanted, yours)
    except Exception:  # it explains known mistakes; this is none of them
        return None


def _dear(exercise: Exercise, case: Case, cost: Cost, budget: Cost, where: str) -> Verdict | None:
    over = []
    if cost.rows > budget.rows:
        over.append(f"{cost.rows} rows sent, budget {budget.rows}")
    if cost.nbytes > budget.nbytes:
        over.append(f"{cost.nbytes} bytes sent, budget {budget.nbytes}")
    if not over:
        return None
    why = exercise.why(case, "cost", budget, cost)
    says = f"{exercise.number} right, but too dear: {', '.join(over)}" + (f": {why}" if why else "")
    return Verdict("dear", says, [where], "cost")


def _costs(cost: Cost, budget: Cost) -> str:
    if not budget.nbytes:
        return ""
    return f" · {cost.rows} rows (budget {budget.rows}), {cost.nbytes} bytes (budget {budget.nbytes})"


def _changed(exercise: Exercise, trial: Trial, where: str) -> Verdict | None:
    if trial.changed is None:
        return None
    argument = trial.changed[1]
    if isinstance(argument, int):
        argument = list(inspect.signature(exercise.answer).parameters)[argument]
    says = f"{exercise.number} not right yet: it changes its input `{argument}` in place; work on a new tensor"
    return Verdict("changed", says, [where])


def _raised(exercise: Exercise, rebuilt: Rebuilt, error: Exception, where: str) -> Verdict:
    says = str(error).strip().splitlines()
    if isinstance(error, SystemExit):
        says = ["it ends the whole program; let the function return"]
    text = f"{exercise.number} raised {type(error).__name__}" + (f": {says[0]}" if says else "")
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith("raised on rank ")]
    if notes:
        text += f" ({notes[0].removeprefix('raised ')})"
    line, busy = _line_of(error, rebuilt), _busy(getattr(error, "still_running", ()), rebuilt)
    says = [f"line {line[0]} of your function: {line[1]}"] if line else []
    says += [reason] if (reason := exercise.why_raised(error)) else []
    return Verdict("raised", text, [where, *says, *([f"a rank was still in {busy}"] if busy else [])])


def _busy(frames: Sequence[FrameType], rebuilt: Rebuilt) -> str | None:
    """Where a thread was that does not end. Those that only wait for others have given up by then."""
    lines = [line for line in map(rebuilt.line_of, frames) if line and rebuilt.source]
    return f"line {lines[0][0]} of your function: {lines[0][1]}" if lines else None


def _line_of(error: BaseException | None, rebuilt: Rebuilt) -> tuple[int, str] | None:
    """The innermost line of the learner's own; run_threads chains the error of a rank behind its own."""
    while error is not None and rebuilt.source:
        found, step = None, error.__traceback__
        while step is not None:
            if step.tb_frame.f_code.co_filename == rebuilt.filename:
                found = step.tb_lineno
            step = step.tb_next
        if found is not None:
            return found, rebuilt.text(found)
        error = error.__cause__
    return None


def _slow(exercise: Exercise, rebuilt: Rebuilt, slow: TooSlow, where: str) -> Verdict:
    busy = _busy(slow.still_running, rebuilt)
    text = f"{exercise.number} takes too long: ended after {slow.seconds:g} s; does a loop never end?"
    return Verdict("slow", text, [where, *([f"it was in {busy}"] if busy else [])])


def _signature(exercise: Exercise, fn: Callable, case: Case) -> Verdict | None:
    """A function that cannot even be called this way."""
    args = case.args if case.ranks is None else case.ranks[0]
    keywords = dict(case.keywords) | ({} if case.ranks is None else {"comm": None})
    try:
        inspect.signature(fn).bind(*args, **keywords)
    except TypeError as error:
        wanted = inspect.signature(exercise.answer)
        names = ", ".join(("*, " if _first_keyword(wanted, p) else "") + p.name for p in wanted.parameters.values())
        says = f"{exercise.number} cannot be called: {error}; the signature is {exercise.name}({names})"
        return Verdict("refused", says)
    return None


def _first_keyword(signature: inspect.Signature, parameter: inspect.Parameter) -> bool:
    return next((p for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY), None) is parameter


def _is_stub(source: str) -> bool:
    """Nothing but a docstring, `pass`, `...` or `raise NotImplementedError`?"""
    definition = ast.parse(source).body[0]
    for node in definition.body:
        if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            continue
        return isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node)
    return True


def _on(case: Case, rank: int) -> str:
    return "" if case.ranks is None else f" on rank {rank}"


def _what(result: Any) -> str:
    if result is None:
        return "None"
    name = type(result).__name__
    size = f" of {len(result)}" if isinstance(result, Sequence) and not isinstance(result, str) else ""
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}{size}"
