"""The launcher's judgement, and which torchrun it starts on which of several nodes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from moe_course.errors import ConfigError
from moe_course.exit_code import judge, killed_rank
from moe_course.launch import EVENT_MARK, EVENTS_ENV, launch
from moe_course.nodes import Nodes, gloo_environment, slurm_nodes, torchrun_command

REPORT = """
Failures:
  [1]:
  rank      : 1 (local_rank: 1)
  exitcode  : 5 (pid: 11)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 2 (local_rank: 2)
  exitcode  : {code} (pid: 12)
  traceback : Signal 9 (SIGKILL) received by PID 12
"""


def error(rank, kind="ExchangeMismatch", code=4):
    return {"event": "error", "rank": rank, "kind": kind, "message": f"about {rank}", "exit_code": code}


def test_a_killed_rank_is_the_cause_whatever_the_others_say():
    lost = [error(0, "RankLost", 5), error(1, "RankLost", 5)]
    assert killed_rank(REPORT.format(code=-9)) == (2, "SIGKILL")
    assert judge(1, False, 9, lost, [REPORT.format(code=-9)]) == (
        5,
        "error: rank 2: killed by SIGKILL, by somebody or for want of memory; all were ended",
    )


def test_an_error_of_a_ranks_own_comes_before_those_who_lost_it():
    events = [error(0, "RankLost", 5), error(2, "CheckpointError", 2)]
    assert killed_rank(REPORT.format(code=2)) is None
    assert judge(1, False, 9, events, [REPORT.format(code=2)]) == (2, "error: rank 2: about 2")


@pytest.mark.parametrize(("late", "code", "expected"), [(True, 1, 5), (False, 0, 0), (False, 7, 7)])
def test_time_limit_success_and_unknown_failures(late, code, expected):
    returncode, line = judge(code, late, 9, [], ["last words\n"])
    assert returncode == expected and (line is None) == (expected == 0)
    if expected == 7:
        assert "last words" in line


def test_events_are_single_lines_only_under_a_launcher():
    code = "from moe_course.launch import emit; emit('hello', text='a\\nb')"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={EVENTS_ENV: "1"})
    assert shown.stdout.startswith(EVENT_MARK) and shown.stdout.count("\n") == 1
    assert not subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={}).stdout


def test_an_interrupt_in_a_callback_ends_the_ranks(tmp_path):
    """What a notebook's stop button does: the exception passes through, the processes do not stay."""
    program = tmp_path / "sleeper.py"
    program.write_text(
        "import os, time\nfrom moe_course.launch import emit\nemit('start', pid=os.getpid())\ntime.sleep(60)\n"
    )
    pids = []

    def on_event(event):
        pids.append(event["pid"])
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch([], 2, on_event, timeout=60, module="sleeper", env={"PYTHONPATH": f"{tmp_path}:{sys.path[0]}"})
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_node_that_waited_in_vain_says_for_whom():
    returncode, line = judge(1, True, 9, [], [], Nodes(2, 1, "gpu1", 4000))
    assert returncode == 5 and "node 1 of 2" in line and "gpu1:4000" in line and "\n" not in line
    assert "not finished after 9 s" in judge(1, True, 9, [{"event": "start"}], [], Nodes(2, 1, "gpu1"))[1]
    slow = [{"event": "warn", "rank": rank, "text": f"at line {rank}"} for rank in (0, 1)]
    assert judge(1, True, 9, slow, [])[1].endswith("sets the limit; the last that rank 1 said: at line 1")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"nnodes": 0}, ["--nnodes is 0", "at least 1"]),
        ({"node_rank": 1}, ["--node-rank is 1", "--nnodes is 1"]),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "a"}, ["--node-rank is 2", "--nnodes is 2", "last one is 1"]),
        ({"nnodes": 2, "node_rank": -1, "master_addr": "a"}, ["--node-rank is -1"]),
        ({"nnodes": 2}, ["--nnodes is 2", "--master-addr is missing", "node 0"]),
        ({"nnodes": 2, "master_addr": "a:29500"}, ["--master-addr a:29500", "--master-port"]),
        ({"nnodes": 2, "master_addr": "a", "master_port": 70000}, ["--master-port is 70000", "65535"]),
    ],
)
def test_nodes_that_cannot_be(fields, says):
    with pytest.raises(ConfigError) as raised:
        Nodes(**fields)
    assert all(part in str(raised.value) for part in says)


def test_ranks_are_shared_equally_by_the_nodes():
    nodes = Nodes(3, 1, "gpu1")
    assert nodes.processes_here(6) == 2
    for world_size, instead in ((7, 6), (2, 3)):
        with pytest.raises(ConfigError, match=f"--world-size {world_size} .* --nnodes 3; use --world-size {instead}$"):
            nodes.processes_here(world_size)


def test_torchrun_reads_the_command_as_it_was_meant():
    """Its own parser is the judge."""
    from torch.distributed.run import config_from_args, get_args_parser

    def read(*args):
        command = torchrun_command(["--prompt", "a b"], 3, *args)
        assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
        read = get_args_parser().parse_args(command[3:])
        assert (read.module, read.training_script, read.max_restarts) == (True, "moe_course.run", 0)
        assert read.training_script_args == ["--prompt", "a b"] and read.nproc_per_node == "3"
        return read

    one = read()
    assert one.standalone and one.local_addr == "127.0.0.1" and one == read(Nodes())
    for address in ("gpu1", "10.0.0.1", "fd00::1"):
        config = config_from_args(read(Nodes(2, 1, address, 4000)))[0]
        assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 3)
        assert config.rdzv_backend == "static" and config.rdzv_configs["rank"] == 1
        assert config.rdzv_endpoint == f"{address}:4000"


def test_nodes_launch_their_shares_and_meet(tmp_path):
    """Two nodes on this machine: ranks follow the node rank, and only the node of rank 0 has a result."""
    program = tmp_path / "share.py"
    program.write_text(
        "import os\nfrom moe_course.launch import RESULT_ENV, emit\n"
        "emit('share', **{name: int(os.environ[name]) for name in ('LOCAL_RANK', 'WORLD_SIZE')})\n"
        "if os.environ['RANK'] == '0':\n    open(os.environ[RESULT_ENV], 'w').write('{\"verdict\": \"equal\"}')\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def node(node_rank):
        nodes = Nodes(2, node_rank, "127.0.0.1", port)
        env = {"PYTHONPATH": f"{tmp_path}:{sys.path[0]}"}
        return launch([], 4, timeout=60, module="share", env=env, nodes=nodes)

    with ThreadPoolExecutor() as threads:
        first, second = threads.map(node, (0, 1))
    for ended, ranks in ((first, [0, 1]), (second, [2, 3])):
        assert (ended.returncode, ended.error) == (0, None), ended.output
        events = sorted((event["rank"], event["LOCAL_RANK"], event["WORLD_SIZE"]) for event in ended.events)
        assert events == [(rank, rank % 2, 4) for rank in ranks]
    assert first.result == {"verdict": "equal"} and second.result is None and "error=None" in repr(second)


def test_launching_needs_no_torch():
    code = "import sys, moe_course.launch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_way_to_node_0_is_looked_up():
    assert gloo_environment(Nodes()) == {}
    assert gloo_environment(Nodes(2, 0, "127.0.0.1")) == {}  # two nodes on one machine: gloo's own choice will do
    with pytest.raises(ConfigError, match="^--master-addr a{70}: this host does not know that name"):
        gloo_environment(Nodes(2, 0, "a" * 70))


@pytest.fixture
def step(tmp_path):
    """The environment of a Slurm job step on the second of its three hosts; the job has five."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\n"
        '[ "$*" = "show hostnames gpu[07-09]" ] && printf "gpu07\\ngpu08\\ngpu09\\n" && exit\n'
        'echo "Invalid hostlist: $3" >&2; exit 1\n'
    )
    scontrol.chmod(0o755)
    return {
        "SLURM_NNODES": "3",
        "SLURM_NODEID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_JOB_NODELIST": "gpu[05-09]",
        "SLURM_STEP_NODELIST": "gpu[07-09]",
        "PATH": str(tmp_path),
    }


def test_slurm_says_who_the_nodes_are(step):
    assert slurm_nodes(step) == Nodes(3, 1, "gpu07", 29500)
    assert slurm_nodes(step | {"SLURM_NNODES": "1", "SLURM_NODEID": "0", "PATH": "/nowhere"}) == Nodes()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"SLURM_NNODES": None}, ["SLURM_NNODES", "srun", "--nnodes"]),
        ({"SLURM_NODEID": None}, ["SLURM_NODEID", "srun"]),
        ({"SLURM_STEP_NODELIST": None}, ["SLURM_STEP_NODELIST", "srun", "batch script"]),
        ({"SLURM_NODEID": "one"}, ["SLURM_NODEID", "'one'"]),
        ({"SLURM_NODEID": "3"}, ["--node-rank is 3", "--nnodes is 3"]),
        ({"SLURM_LOCALID": "2"}, ["SLURM_LOCALID is 2", "--ntasks-per-node=1"]),
        ({"SLURM_NNODES": "2"}, ["names 3 hosts", "SLURM_NNODES is 2"]),
        ({"SLURM_STEP_NODELIST": "gpu[07-"}, ["gpu[07-", "Invalid hostlist", "--master-addr"]),
        ({"PATH": "/nowhere"}, ["scontrol", "PATH", "--master-addr"]),
    ],
)
def test_a_slurm_step_that_cannot_be_read(step, change, says):
    environ = {name: value for name, value in (step | change).items() if value is not None}
    with pytest.raises(ConfigError) as raised:
        slurm_nodes(environ)
    assert all(part in str(raised.value) for part in says), raised.value


def test_a_rank_that_stops_before_it_says_who_it_is_does_not_stay(tmp_path):
    """Its number was never announced; the launcher finds it among the agent's children."""
    program = tmp_path / "stopper.py"
    program.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n")
    mark = tmp_path / "pid"
    program.write_text(f"import os, signal\nopen({str(mark)!r}, 'w').write(str(os.getpid()))\n" + program.read_text())
    began = time.monotonic()
    ended = launch([], 1, timeout=12, module="stopper", env={"PYTHONPATH": f"{tmp_path}:{sys.path[0]}"})
    assert ended.returncode == 5 and "not finished after 12 s" in ended.error
    assert time.monotonic() - began < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
