"""What one rank is going to do, worked out from its options before anything is exchanged.

Built in: notebook 13.
"""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from moe_course.backends.capabilities import KNOWN_BACKENDS, current_name
from moe_course.backends.configure import Backend
from moe_course.comm.dist import pick_device
from moe_course.config import MoEConfig
from moe_course.flags import ParallelConfig
from moe_course.glm.checkpoint import read_index
from moe_course.glm.model import check_supported
from moe_course.guard.handshake import ERROR, digest
from moe_course.guard.watchdog import place
from moe_course.options import RunOptions
from moe_course.own_stages import NAMES, OwnStages, stages_for
from moe_course.parallel import Plan, make_plan
from moe_course.tokenizer import load_tokenizer
from moe_course.travel import Travel, travel

#: Options that are stated in another form: their content, not their name or their folder.
_PLACES, _SAMPLE = 64, 4096  # places in a checkpoint file that are compared, and bytes at each
_STATED_OTHERWISE = {"model", "reference_model", "prompts", "stages", "faults", "overrides"}


@dataclass(frozen=True)
class Job:
    """A rank's options, and all that follows from them."""

    options: RunOptions
    config: MoEConfig
    tokenizer: Any
    prompts: list[list[int]]  # token ids
    plan: Plan
    device: torch.device
    dtype: torch.dtype
    travel: Travel
    own: OwnStages | None = None  # of --stages

    @property
    def transport(self) -> str:
        return self.travel.transport

    @property
    def backend(self) -> Backend:
        return self.travel.backend

    def mine(self, dp_rank: int) -> dict[int, list[int]]:
        """Prompts of one data-parallel rank: index -> token ids."""
        dp = self.plan.parallel.data_parallel_size
        return {index: tokens for index, tokens in enumerate(self.prompts) if index % dp == dp_rank}


def prepare(options: RunOptions) -> Job:
    """Read the config, make the plan, choose device and dtype. Raises what `make_plan` and the readers raise."""
    config = MoEConfig.from_pretrained(options.model)
    check_supported(config, options.model)
    tokenizer = load_tokenizer(options.model, config)
    prompts = [tokenizer.encode(prompt) for prompt in options.prompts]
    options.check_against(config, [len(tokens) for tokens in prompts])
    plan = make_plan(_with_hosts(options), config, strict=options.guard, transport=options.transport)
    device = pick_device(options.device)
    dtype = dtype_of(options.dtype, device)
    one_host = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
    carried = travel(options, plan, device.type, dtype, one_host)
    return Job(options, config, tokenizer, prompts, plan, device, dtype, carried, stages_for(options, plan))


def _with_hosts(options: RunOptions) -> ParallelConfig:
    """The parallel flags; on several hosts with torchrun's number of ranks on each, where nobody said otherwise."""
    parallel = options.parallel()
    names = ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE")  # the last one: how many hosts, from torchrun only
    here, world, hosts = (int(os.environ.get(name, "1")) for name in names)
    known = KNOWN_BACKENDS.get(current_name(parallel.all2all_backend))
    if parallel.ranks_per_node or here == world or known is None:
        return parallel
    # Of two_hop it is the way of the rows, and all ranks must know it. Of others it is what a note says: where hosts
    # have different numbers of ranks no rank knows all of them, and the run goes without the note.
    if known.shape == "two_hop" or (known.across_nodes and here * hosts == world):
        return replace(parallel, ranks_per_node=here)
    return parallel


def statement(options: RunOptions, job: Job | None, error: Exception | None) -> dict[str, Any]:
    """What this rank tells the others before the first exchange, see `guard.handshake`.

    First the options as given, then the plan and what follows from it: shapes, dtypes and digests of expert map,
    checkpoint, prompts.
    """
    said: dict[str, Any] = {"moe_course": _version("moe-course"), "torch": str(torch.__version__)}
    said["transformers"] = _version("transformers")
    for option in fields(options):
        if option.name not in _STATED_OTHERWISE:
            value = getattr(options, option.name)
            said[option.name] = value if isinstance(value, bool | int | float | None) else str(value)
    said["prompts"] = digest(options.prompts)
    said |= place() | {"python": platform.python_version(), "threads": torch.get_num_threads()}
    said["local_rank"] = os.environ.get("LOCAL_RANK", "0")
    if job is not None:
        said |= _follows(job)
    if error is not None:
        said[ERROR] = [type(error).__name__, str(error)]
    return said


def _follows(job: Job) -> dict[str, Any]:
    """Fields that follow from the options and the files."""
    plan, config = job.plan, job.config
    found = {f"plan.{name}": value for name, value in plan.as_dict().items()}
    found |= {f"config.{name}": value for name, value in asdict(config).items()}
    index = read_index(job.options.model)
    files = {info.file.name: info.file.stat().st_size for info in index.values()}
    headers = sorted((info.name, info.dtype, info.shape, info.file.name, info.nbytes) for info in index.values())
    inter = config.moe_intermediate_size // plan.moe.tp_size
    own = job.own.digests if job.own else {}
    found |= {f"stages.{name}": own.get(name) for name in NAMES}  # content of the files, wherever they lie
    return found | {
        "device_type": job.device.type,
        "rows_dtype": str(job.dtype).removeprefix("torch."),
        "transport_used": job.transport,
        "expert_shapes": [[2 * inter, config.hidden_size], [config.hidden_size, inter]],
        "expert_map_digest": digest([plan.placement.owner.tolist(), plan.placement.local.tolist()]),
        "checkpoint_digest": digest([sorted(files.items()), headers, _samples(index)]),
        "config_digest": digest([(Path(job.options.model) / "config.json").read_text().split()]),
        "tokens_digest": digest(job.prompts),
    }


def _samples(index) -> list[str]:
    """A fingerprint of each file's content, from 4 KiB at 64 places: other weights of the same shapes are noticed."""
    found = []
    for path in sorted({info.file for info in index.values()}):
        size, content = path.stat().st_size, hashlib.sha256()
        with path.open("rb") as file:
            for place in range(_PLACES):
                file.seek(max(0, size - _SAMPLE) * place // (_PLACES - 1))
                content.update(file.read(_SAMPLE))
        found.append(content.hexdigest()[:16])
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def dtype_of(asked: str, device: torch.device) -> torch.dtype:
    """The dtype `--dtype` stands for on this device."""
    if asked == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, asked)
