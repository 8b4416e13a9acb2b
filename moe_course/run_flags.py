"""Flags of `moe-course run` about how rows travel, and the values flags take. Does not import torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Strategy(StrEnum):
    linear = "linear"
    round_robin = "round_robin"


class Transport(StrEnum):
    auto = "auto"
    threads = "threads"
    gloo = "gloo"
    nccl = "nccl"
    shm = "shm"
    vendor = "vendor"


class Quant(StrEnum):
    """`quant.FORMATS`, and none."""

    none = "none"
    fp8_group = "fp8_group"
    fp8_group_ue8m0 = "fp8_group_ue8m0"
    fp8_token = "fp8_token"
    fp8_tensor = "fp8_tensor"
    int8_token = "int8_token"


BackendFlag = Annotated[
    str,
    typer.Option(
        help="How rows travel. vLLM's names: allgather_reducescatter (also naive, pplx), deepep_high_throughput, "
        "deepep_low_latency, deepep_v2, mori_high_throughput, mori_low_latency, nixl_ep, flashinfer_nvlink_one_sided, "
        "flashinfer_nvlink_two_sided: no library is called, between ranks of one node the same rows go the same way. "
        "Names of this package: all_to_all, two_hop. moe-course backends compares them."
    ),
]
TransportFlag = Annotated[
    Transport,
    typer.Option(
        help="What carries the rows: gloo (CPU), shm (memory shared on one host, CPU), nccl (GPU). auto picks and says "
        "why; vendor asks for the backend's own library."
    ),
]
RanksPerNodeFlag = Annotated[
    str | None, typer.Option(help="Ranks that share a host: 2, or one number a host: 1,3. Decides the way of two_hop.")
]
MaxTokensFlag = Annotated[
    int,
    typer.Option(
        help="T_max: rows a rank may bring at once to deepep_low_latency and the like; longer prompts go in parts."
    ),
]
QuantFlag = Annotated[
    Quant,
    typer.Option(help="Quantise rows for dispatch: one byte per number and its scales. Text may change, the run says."),
]
CombineDtypeFlag = Annotated[
    Dtype, typer.Option(help="What comes home. auto: sums in float32, outputs as they are. bfloat16: half the bytes.")
]
StaticShapesFlag = Annotated[
    bool,
    typer.Option(
        "--static-shapes",
        help="deepep_low_latency, nixl_ep: experts compiled once for fixed shapes, as graph capture needs them. Every "
        "step pays for all T_max slots, so lower --max-num-batched-tokens with it. Within 1e-5 in float32, not to the "
        "bit.",
    ),
]
ReduceInNodeFlag = Annotated[
    bool, typer.Option("--reduce-in-node", help="two_hop: add a node's partial sums before they leave it.")
]
