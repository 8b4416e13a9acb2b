"""What goes wrong ends as one line that names the thing, with its exit code and no process left."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_course.cli import main
from moe_course.options import TINY

sys.path.insert(0, str(Path(__file__).parents[1] / "glm"))
from tiny_models import edit_config, edit_weights, write_model  # noqa: E402


def assert_one_line(course, ended, code, *says):
    assert ended.returncode == code, ended.stderr
    assert len(ended.error_lines) == 1 and "Traceback" not in ended.stderr
    for part in says:
        assert part in ended.error_lines[0]
    assert not course.wait_until_gone()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--world-size", "300"], ["256 experts", "300"]),
        (["--world-size", "0"], ["--world-size is 0"]),
        (["--world-size", "many"], ["--world-size"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--device", "tpu"], ["tpu", "cuda"]),
        (["--dtype", "fp7"], ["fp7"]),
        (["--all2all-backend", "carrier_pigeon"], ["carrier_pigeon", "allgather_reducescatter"]),
        (["--transport", "threads"], ["threads", "run_threads"]),
        (["--all2all-backend=flashinfer_nvlink_one_sided", "--transport=gloo"], ["gloo has none that ranks share"]),
        (["--all2all-backend", "high_throughput"], ["high_throughput", "deepep_high_throughput"]),
        (["--ranks-per-node", "2,x"], ["--ranks-per-node is '2,x'"]),
        (["--all2all-backend", "two_hop", "--ranks-per-node", "3,2"], ["3,2 has 5 ranks", "4"]),
        (["--reduce-in-node"], ["--reduce-in-node", "two_hop"]),
        (["--static-shapes"], ["--static-shapes", "deepep_low_latency"]),
        (["--max-num-batched-tokens", "0"], ["--max-num-batched-tokens is 0"]),
        (["--all2all-backend", "deepep_high_throughput", "--dispatch-quant", "fp8_token"], ["fp8_token", "per token"]),
        (["--dispatch-quant", "fp7"], ["fp7"]),
        (["--expert-placement-strategy", "random"], ["random", "round_robin"]),
        (["--prompt", "x" * 600], ["601 tokens", "512", "633"]),
        (["--max-new-tokens", "0"], ["--max-new-tokens is 0"]),
        (["--prompts-file", "/does/not/exist"], ["/does/not/exist"]),
        (["--model", "/does/not/exist"], ["/does/not/exist"]),
        (["--trace-values"], ["--trace"]),
        (["--world-size", "2", "--data-parallel-size", "3"], ["2", "3"]),
        (["--world-size", "3", "--no-enable-expert-parallel"], ["moe_intermediate_size", "3 equal parts"]),
        (["--world-size", "5", "--tensor-parallel-size", "2"], ["--world-size 5", "--tensor-parallel-size 2"]),
        (["--data-parallel-size", "2", "--prefill-context-parallel-size", "2"], ["data_parallel_size 2", "vLLM"]),
        (["--pipeline-parallel-size", "2"], ["--pipeline-parallel-size 2", "drill pipeline"]),
        (["--tensor-parallel-size", "2", "--trace", "t"], ["--trace needs expert parallelism"]),
        (["--world-size", "4", "--sequence-parallel-moe"], ["tensor_parallel_size > 1"]),
        (["--all2all-backend", "deepep_v2", "--transport", "vendor"], ["deepep_v2", "package deep_ep"]),
        (["--timeout", "0"], ["--timeout is 0"]),
        (["--fault", "explode@rank=1"], ["explode", "kill"]),
        (["--world-size", "2", "--override", "4:dtype=bfloat16"], ["rank 4", "ranks 0 to 1"]),
    ],
)  # fmt: skip
def test_wrong_options_end_before_a_rank_starts(args, says, capfd, monkeypatch):
    def started(*args, **more):
        raise AssertionError("processes were started")

    monkeypatch.setattr("moe_course.launch.launch", started)
    assert main(["run", *args]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ")
    for part in says:
        assert part in lines[0]


def test_a_gpu_that_is_not_there_ends_before_a_rank_starts(capfd, monkeypatch):
    monkeypatch.setattr("moe_course.launch.launch", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["run", "--device=cuda"]) == 2
    assert capfd.readouterr().err == "error: device 'cuda' was asked for and torch sees no GPU here; use --device cpu\n"


def test_a_wrong_option_of_the_command_is_one_line(course):
    """The same through a process of its own."""
    assert_one_line(course, course.run("--all2all-backend", "carrier_pigeon"), 2, "carrier_pigeon", "two_hop")


def test_checking_options_needs_no_torch():
    """So that a typing error costs a second, not five."""
    code = (
        "import sys; from moe_course.cli import main; "
        "assert main(['run', '--world-size', '300']) == 2; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_json_is_written_on_failure_too(warm, tmp_path):
    model = write_model(tmp_path / "model")
    edit_weights(model, lambda t: t.pop("model.layers.1.mlp.experts.7.up_proj.weight"))
    ended = warm.run("--model", str(model), "--world-size", "2", "--max-new-tokens", "2", "--prompt", "x")
    assert_one_line(warm, ended, 2, "rank ", "model.layers.1.mlp.experts.7.up_proj.weight")
    assert ended.result["verdict"] == "failed" and "experts.7" in ended.result["error"]


def test_a_truncated_file_and_quantised_weights(warm, tmp_path):
    model = tmp_path / "tiny"
    shutil.copytree(TINY, model)
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert_one_line(warm, warm.run("--model", str(model), "--world-size", "2"), 2, "truncated", path.name)
    edit_config(model, quantization_config={"quant_method": "fp8"})
    assert_one_line(warm, warm.run("--model", str(model), "--world-size", "1"), 2, "quantised checkpoint (fp8)")


def test_a_model_that_is_not_the_reference_is_noticed(warm, monkeypatch):
    """A wrong combine — here one that drops the highest rank's partial sums — passes neither canary nor check."""
    broken = warm.folder / "sitecustomize.py"
    broken.write_text(
        "import os\n"
        "if os.environ.get('RANK') is not None:\n"
        "    import moe_course.comm.base as base\n"
        "    good = base.Comm.reduce_scatter_rows\n"
        "    base.Comm.reduce_scatter_rows = lambda self, rows, *more: "
        "good(self, rows * (self.rank != self.world_size - 1), *more)\n"
    )
    path = f"{warm.folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    args = ["--world-size", "2", "--prompt", "def add(", "--max-new-tokens", "4", "--check"]
    assert_one_line(warm, warm.run(*args, PYTHONPATH=path), 3, "canary", "were never reduced")
    ended = warm.run(*args, "--no-guard", PYTHONPATH=path)
    assert_one_line(warm, ended, 3, "rank 0", "logits differ")
    assert ended.result["verdict"] == "different" and "different" in ended.stdout


def wait_for_ranks(course, process, world_size, seconds=60):
    """Until every rank is up and has loaded libraries (a running exchange is what we want to disturb)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        ranks = course.ranks()
        if len(ranks) == world_size and all(
            Path(f"/proc/{pid}/maps").read_text().count("libtorch") for pid in ranks.values()
        ):
            return ranks
        time.sleep(0.1)
    raise AssertionError(f"ranks did not start: {process.poll()}")


LONG = ["--world-size", "3", "--prompt", "x", "--max-new-tokens", "480"]


@pytest.mark.parametrize("after", [0.5, 6.0])
def test_ctrl_c_leaves_nothing(course, after):
    """While the ranks load, and while they generate; one of them stopped by a debugger."""
    process = course.start(*LONG)
    ranks = wait_for_ranks(course, process, 3)
    time.sleep(after)
    if process.poll() is None and after > 1:
        os.kill(ranks[2], signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=10)
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr and "Traceback" not in stderr
    assert not course.wait_until_gone(5)


def test_a_rank_killed_from_outside_is_named(course, rank=0):
    """Rank 0, which the others' results come to; tests/run/test_guard.py kills another one."""
    process = course.start(*LONG)
    ranks = wait_for_ranks(course, process, 3)
    time.sleep(6)
    os.kill(ranks[rank], signal.SIGKILL)
    killed = time.monotonic()
    stdout, stderr = process.communicate(timeout=20)
    ended = course.ended(process.returncode, stdout, stderr)
    assert_one_line(course, ended, 5, f"rank {rank}: killed by SIGKILL")
    assert time.monotonic() - killed < 6
    assert ended.result["verdict"] == "failed"


def test_a_killed_launcher_takes_everything_along(course):
    process = course.start(*LONG)
    wait_for_ranks(course, process, 3)
    process.kill()
    process.communicate(timeout=10)
    assert not course.wait_until_gone(5)


def test_the_time_limit_ends_all_ranks(warm):
    ended = warm.run(*LONG, "--time-limit", "6")
    assert_one_line(warm, ended, 5, "not finished after 6 s")


def test_two_runs_at_once_do_not_meet(warm):
    """Each takes a port of its own."""
    short = ["--world-size", "2", "--prompt", "x", "--max-new-tokens", "1"]
    processes = [warm.start(*short) for _ in range(2)]
    for process in processes:
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
    assert not warm.wait_until_gone()


def test_a_port_that_is_taken_is_named(warm):
    """One that was asked for: several machines have to agree on it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = warm.run(
            "--world-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port),
        )  # fmt: skip
    assert_one_line(warm, ended, 5, f"port {port}", "--master-port")
