"""What a notebook needs besides the package itself. Importing it loads no torch, transformers, matplotlib, IPython.

`start()` checks the environment, `show(function)` prints package source, `run_live(argv, world_size)` starts a real
run with a progress bar in the cell, `report(guess, answer)` compares a guess with what was measured.
`check.<exercise>(fn)` checks your function, `check.reveal` shows the answer, `check.keep` stores yours in `my_moe/`,
and `use("my_moe")` brings it back; `run_mine(argv, world_size)` puts it into real processes.
"""

from moe_course.lessons.check import check
from moe_course.lessons.environment import start
from moe_course.lessons.guesses import report
from moe_course.lessons.own import run_mine, use
from moe_course.lessons.progress import run_live
from moe_course.lessons.source import show

__all__ = ["check", "report", "run_live", "run_mine", "show", "start", "use"]
