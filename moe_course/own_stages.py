"""Your own stages as files: `my_moe/<stage>.py` defines the function of the same name. Built in: notebook 13."""

from __future__ import annotations

import hashlib
import importlib.util
import linecache
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_course.errors import ConfigError
from moe_course.options import RunOptions
from moe_course.stages import Stages

if TYPE_CHECKING:
    from moe_course.parallel import Plan

#: Stages that a file may bring.
NAMES = tuple(field.name for field in fields(Stages))


@dataclass(frozen=True)
class OwnStages:
    """What a folder brings.

    Attributes:
        stages: its functions, and the package's for the rest.
        files: stage -> file, of its own ones, in the order of `NAMES`.
        digests: stage -> fingerprint of the file.
    """

    stages: Stages
    files: dict[str, Path]
    digests: dict[str, str]


def load_own_stages(folder: Path, missing_ok: bool = False) -> OwnStages:
    """Load every stage that `folder` has a file for; other files are not looked at.

    Raises:
        ConfigError: no such folder, no stage in it, or a file that does not load.
    """
    files = {name: folder / f"{name}.py" for name in NAMES if (folder / f"{name}.py").is_file()}
    if not files and not missing_ok:
        others = sorted(path.name for path in folder.glob("*.py"))
        there = "has no stage in it" if folder.is_dir() else "does not exist"
        beside = f", only {', '.join(others)}" if others else ""
        raise ConfigError(
            f"--stages {folder} {there}{beside}; a stage is a file of one of the names {', '.join(NAMES)} (.py) that "
            "defines the function of that name; check.keep writes one after an exercise about a whole stage"
        )
    functions = {name: load_function(path, name) for name, path in files.items()}
    return OwnStages(Stages(**functions), files, {name: _digest(path) for name, path in files.items()})


def stages_for(options: RunOptions, plan: Plan | None = None) -> OwnStages | None:
    """Those of `--stages`, or None.

    Raises:
        ConfigError: also for options that only the package's stages follow, and for stages that a plan has no use for.
    """
    if options.stages is None:
        return None
    own = load_own_stages(options.stages)
    for name, flag, taken in (
        ("experts", "--static-shapes", options.static_shapes),
        ("dispatch", f"--dispatch-quant {options.dispatch_quant}", options.dispatch_quant != "none"),
        ("combine", f"--combine-dtype {options.combine_dtype}", options.combine_dtype != "auto"),
        ("combine", "--reduce-in-node", options.reduce_in_node),
        ("dispatch", "--reduce-in-node", options.reduce_in_node),
    ):
        if taken and name in own.files:
            raise ConfigError(
                f"{flag} is done by the package's {name}, and --stages brings its own ({own.files[name]}); "
                "leave the option out, or move the file away"
            )
    if plan is not None and plan.dispatch_group is None:
        _check_nothing_travels(own, plan)
    return own


def _check_nothing_travels(own: OwnStages, plan: Plan) -> None:
    """On one rank your own pair of dispatch and combine fits, for it brings back what it took; half of it does not."""
    mine = [name for name in ("dispatch", "combine") if name in own.files]
    if not mine or (plan.world_size == 1 and len(mine) == 2):
        return
    sizes = plan.parallel
    shape = f"TP {sizes.tensor_parallel_size}, DP {sizes.data_parallel_size}, PCP {sizes.prefill_context_parallel_size}"
    raise ConfigError(
        f"no rows travel in this plan ({shape}), and --stages brings its own {mine[0]} ({own.files[mine[0]]}) to move "
        "them; use --world-size 2 (or another plan with DP above 1), or move the file away"
    )


def load_function(path: Path, name: str) -> Callable[..., Any]:
    """The function `name` of a file. Raises ConfigError that names file, line and cure."""
    module_name = f"my_moe.{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)  # as its functions name it in tracebacks, also where the path is relative
    linecache.checkcache(str(path))
    try:
        # not through the loader: it would leave __pycache__ behind, and trust it within one second of an edit
        exec(compile(path.read_text(encoding="utf-8-sig"), str(path), "exec", dont_inherit=True), vars(module))
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: {error.msg}; repair the file or remove it") from None
    except (OSError, UnicodeError) as error:
        if line_in(error, path) is None:  # the file itself, not what it does
            raise ConfigError(f"{path}: {error}; save the file as UTF-8 text that can be read, or remove it") from None
        raise _fails(error, path) from None
    except (Exception, SystemExit) as error:
        raise _fails(error, path) from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{path} does not define a function {name}; rename the function, or remove the file")
    sys.modules[module_name] = module  # inspect finds the source of its functions through it
    return function


def _fails(error: BaseException, path: Path) -> ConfigError:
    return ConfigError(f"{path}, line {line_in(error, path)}: {said(error)}; repair the file or remove it")


def said(error: BaseException) -> str:
    """An error in one phrase; leaving the program by `sys.exit` counts as one. Without words, its line speaks."""
    if isinstance(error, SystemExit):
        return f"SystemExit: it ends the program (sys.exit({error.code!r}))"
    if words := str(error).strip():
        return f"{type(error).__name__}: {words}"
    raised = traceback.extract_tb(error.__traceback__)
    return type(error).__name__ + (f" (`{raised[-1].line}`)" if raised and raised[-1].line else "")


def line_in(error: BaseException, path: Path) -> int | None:
    """The innermost line of `path` that an error passed through."""
    found, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == str(path):
            found = step.tb_lineno
        step = step.tb_next
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
