"""Options are settled before anything starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moe_course.config import MoEConfig
from moe_course.errors import ConfigError
from moe_course.options import DEFAULT_RANKS, TINY, RunOptions, visible_gpus
from moe_course.prompts import read_prompts
from moe_course.tokenizer import ByteTokenizer, load_tokenizer


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")  # no nvidia-smi


def test_world_size_is_asked_for_or_one_per_gpu_or_four(monkeypatch):
    assert RunOptions().resolved_world_size() == DEFAULT_RANKS == 4
    assert RunOptions(world_size=3).resolved_world_size() == 3
    assert RunOptions(data_parallel_size=5).resolved_world_size() == 5
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert visible_gpus() == 3 and RunOptions().resolved_world_size() == 3
    assert RunOptions(device="cpu").resolved_world_size() == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert RunOptions().resolved_world_size() == 4


def test_torchrun_decides_and_contradictions_are_named(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert RunOptions().resolved_world_size() == 4  # some other tool's variable
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert RunOptions().resolved_world_size() == 2
    with pytest.raises(ConfigError, match="started 2 ranks, the options ask for 3"):
        RunOptions(world_size=3).resolved_world_size()


def test_the_context_is_checked_with_both_numbers():
    config = MoEConfig.from_pretrained(TINY)
    RunOptions(max_new_tokens=12).check_against(config, [500])
    with pytest.raises(ConfigError, match=r"prompt 1 has 500 tokens, with 13 new ones 513: more than .* 512"):
        RunOptions(max_new_tokens=13).check_against(config, [1, 500])


@pytest.mark.parametrize("option", ["json_file", "trace"])
def test_where_nothing_can_be_written_is_said_before_the_run(option):
    config = MoEConfig.from_pretrained(TINY)
    with pytest.raises(ConfigError, match="cannot write there|does not exist"):
        RunOptions(**{option: Path("/proc/1/nothing")}).check_against(config, [1])


def test_prompts_come_one_a_line_or_as_json(tmp_path):
    plain, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    plain.write_text("a\n\nGröße\n")
    assert read_prompts(plain) == ("a", "", "Größe")
    lines.write_text('"two\\nlines"\n{"prompt": ""}\n')
    assert read_prompts(lines) == ("two\nlines", "")
    lines.write_text('"good"\n17\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(lines)


def test_bytes_are_tokens():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("") == [0] and tokenizer.encode("aß") == [0, 97, 195, 159]
    assert tokenizer.decode([97, 195, 159, 195]) == "aß\\xc3"


def test_a_vocabulary_that_is_not_bytes_needs_its_file(tmp_path):
    raw = json.loads((TINY / "config.json").read_text())
    with pytest.raises(ConfigError, match="1000"):
        load_tokenizer(tmp_path, MoEConfig.from_json(raw | {"vocab_size": 1000}))


def test_flags_take_what_the_tables_know():
    """The values are written down twice, so that --help needs no torch."""
    from moe_course.backends.support import TRANSPORTS
    from moe_course.quant import FORMATS
    from moe_course.run_flags import Quant, Transport

    assert list(Quant) == ["none", *FORMATS]
    assert set(Transport) == {"auto", "vendor", *TRANSPORTS}


def test_the_readme_lists_every_shape_with_its_names():
    from moe_course.backends.capabilities import KNOWN_BACKENDS, OLD_NAMES, SHAPES

    rows = [line.split("|") for line in Path("README.md").read_text().splitlines() if line.startswith("| `")]
    listed = {row[1].strip(" `"): set(re.findall(r"`(\w+)`", row[2])) for row in rows if row[1].strip(" `") in SHAPES}
    named = {shape: {name for name, known in KNOWN_BACKENDS.items() if known.shape == shape} for shape in SHAPES}
    named["allgather_reducescatter"] |= {old for old, new in OLD_NAMES.items() if new == "allgather_reducescatter"}
    assert listed == {shape: names for shape, names in named.items() if shape != "no_dp_ep"}
