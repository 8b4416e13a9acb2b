"""Compare a run with the untouched Hugging Face model: text, logits, and every row's experts.

The reference runs in a process of its own (`glm/hf_reference.py`), each prompt alone, while the ranks work.
Built in: notebook 13.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from moe_course.errors import VerificationFailed
from moe_course.launch import die_with_parent

LOGIT_TOLERANCE = 1e-4  # fp32, largest absolute difference
NEAR_TIE = 1e-5  # gap of choice scores below which two experts may swap

Routed = dict[tuple[int, int], dict[int, torch.Tensor]]  # (prompt, layer) -> position -> sorted ids [K]


@dataclass
class Comparison:
    """What was found. `equal` is the verdict; `failures` says in words what differs."""

    matches: list[bool | None]
    max_abs_logit_diff: float = 0.0
    topk_ids_equal: bool = True
    rows_compared: int = 0
    excused: int = 0  # rows that differ behind a near tie
    near_ties: list[dict] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not self.failures


class Reference:
    """The reference process: `start` it early, `finish` waits for its answer."""

    def __init__(self, request: dict):
        self._folder = tempfile.TemporaryDirectory(prefix="moe-course-check-")
        folder = Path(self._folder.name)
        (folder / "request.json").write_text(json.dumps(request))
        self._answer = folder / "answer.pt"
        script = Path(__file__).parent / "glm" / "hf_reference.py"
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(folder / "request.json"), str(self._answer)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )

    def finish(self) -> dict[str, torch.Tensor]:
        """The reference's tensors. Raises VerificationFailed when it could not run."""
        _, errors = self._process.communicate()
        if self._process.returncode:
            last = (errors.strip().splitlines() or ["no message"])[-1]
            raise VerificationFailed(f"the reference process ended with {self._process.returncode}: {last}")
        answer = torch.load(self._answer, weights_only=True)
        self._folder.cleanup()
        return answer

    def cancel(self) -> None:
        self._process.kill()
        self._process.wait()
        self._folder.cleanup()


def compare(
    answer: dict[str, torch.Tensor],
    prompts: list[list[int]],
    tokens: list[list[int]],
    logits: list[torch.Tensor],
    routed: Routed,
    layers: tuple[int, ...],
) -> Comparison:
    """Compare per prompt: token ids; logits of the generated positions; expert sets of every row and layer.

    Every row is compared. Where K-th and (K+1)-th choice are within `NEAR_TIE`, a different set is a near tie: it
    is listed, and differences in later rows of that prompt are counted as excused and not held against the run.
    """
    found = Comparison(matches=[])
    for index, prompt in enumerate(prompts):
        expected, got = answer[f"tokens.{index}"].tolist(), tokens[index]
        same = _common(expected, got)
        fed = len(prompt) + min(same, len(expected) - 1)  # rows that had the same tokens before them
        tie = _compare_routes(found, answer, index, routed, layers, fed)
        for step in range(min(same + 1, len(expected), len(got), len(logits[index]))):
            difference = (logits[index][step] - answer[f"logits.{index}"][step]).abs().max().item()
            if tie is not None and len(prompt) - 1 + step >= tie:
                continue  # follows from the near tie, as the routes do
            if not difference <= found.max_abs_logit_diff:  # so that NaN is kept, too
                found.max_abs_logit_diff = difference
            if not difference <= LOGIT_TOLERANCE:
                found.failures.append(
                    f"prompt {index}, token {step}: logits differ by {difference:.2e}, limit {LOGIT_TOLERANCE:g}"
                )
                break
        found.matches.append(expected == got)
        if not found.matches[-1] and tie is None:
            found.failures.append(
                f"prompt {index}: token {same} is {_at(got, same)}, the reference has {_at(expected, same)}"
            )
        if len(logits[index]) != len(got):
            found.failures.append(f"prompt {index}: {len(got)} tokens with {len(logits[index])} rows of logits")
    return found


def _compare_routes(found: Comparison, answer, index: int, routed: Routed, layers, rows: int) -> int | None:
    """Compare positions `0 … rows-1`; returns the position of the first near tie, if any."""
    tie = None
    for position in range(rows):
        for layer in layers:
            ours = routed.get((index, layer), {}).get(position)
            theirs = answer[f"topk_ids.{index}.{layer}"][position]
            found.rows_compared += 1
            if ours is not None and torch.equal(ours.int(), theirs):
                continue
            gap = answer[f"gap.{index}.{layer}"][position].item()
            if ours is not None and gap <= NEAR_TIE:
                found.near_ties.append({"prompt": index, "position": position, "layer": layer, "gap": gap})
                tie = position if tie is None else tie
            elif ours is not None and tie is not None:
                found.excused += 1
            else:
                found.topk_ids_equal = False
                listed = "none" if ours is None else ours.tolist()
                found.failures.append(
                    f"prompt {index}, position {position}, layer {layer}: experts {listed}, "
                    f"the reference has {theirs.tolist()}"
                )
                return tie  # everything after it follows from it
    return tie


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _at(tokens: list[int], index: int) -> int | str:
    return tokens[index] if index < len(tokens) else "missing"
