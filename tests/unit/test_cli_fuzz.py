"""Any command line and any config: an exit code that says what happened, and never a traceback."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import random
import sys

import pytest
from attn_core import cli
from attn_core.cli.app import COMMANDS, command
from attn_core.errors import UsageError
from attn_core.plugins.registry import load_plugins

CONFIGS = sorted((pathlib.Path(__file__).parent.parent / "data" / "configs").glob("*.json"))
# long: the same with other seeds and more of them
SEEDS = [
    *range(2),
    *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 32)),
]
RUNS = 25
NUMBERS = ("0", "1", "-1", "8", "64", "128", "1000000000000", "9" * 5000, "1e3", "nan", "inf", "٣")
TEXTS = ("", " ", ",", "-", "--", "x" * 5000, "\udcff", "\x1b[2J", "é🙂", "%s{0}", "[bold]", "a=b")
NAMES = ("triton", "fa3", "torch_native", "flashinfer", "triton,fa3", "nobody", "trtllm_mla")
PLACES = ("cpu", "cuda:sm90", "cuda:sm100", "rocm", "npu:910b", "cuda:", ":sm90", "tpu", "cuda:sm9")
WORDS = (
    "mha",
    "mla",
    "gdn",
    "bf16",
    "fp8_e4m3",
    "auto",
    "json",
    "html",
    "prefill",
    "decode",
    "12.8",
)
LIBRARIES = ("all", "triton", "triton==3.4", "triton==", "torch==" + "9" * 5000, "a b", "triton>=3")
JUNK = (
    *(None, "", "x", "\udcff", "\x1b[2J", True, False, 0, 1, -1, 2, 64, 10**12, 10**400, 1.5),
    *(float("nan"), float("inf"), [], [1] * 3, [None], ["full_attention"] * 3, ["\ud800"], {}),
    *({"a": {"b": {"c": [1]}}}, {"model_type": "llama"}, [0, 1], ["sliding_attention"], "alibi"),
)
KEYS = (
    *("layer_types", "attn_type_list", "hybrid_layer_pattern", "sliding_window", "vision_config"),
    *(
        "text_config",
        "linear_attn_config",
        "attn_config",
        "quantization_config",
        "num_hidden_layers",
    ),
    *("multi_query_group_num", "swa_head_dim", "swa_num_key_value_heads", "kv_lora_rank", "alibi"),
    *("architectures", "model_type", "torch_dtype", "is_encoder_decoder", "use_mla", "index_topk"),
    *("position_embedding_type", "\udcff", "attn_\x1b", "head_dim", "cross_attention_layers"),
)


@pytest.fixture
def run(monkeypatch, capfd):
    """Run `attn` in this process, with the kernels left out; return exit code, output, errors."""
    registry = functools.cache(load_plugins)()
    for name in ("backends", "check", "doctor", "lock", "select", "tune", "warmup"):
        monkeypatch.setattr(f"attn_core.cli.{name}.load_plugins", lambda: registry)
    for name in [n for n in os.environ if n.startswith("ATTN_")]:
        monkeypatch.delenv(name)

    def no_kernels(*args, **kwargs):
        raise UsageError("no kernels here")

    monkeypatch.setattr("attn_core.costs.store.put", no_kernels)  # it would write anywhere
    monkeypatch.setattr("attn_core.cli.doctor.run_probes", no_kernels)
    monkeypatch.setattr("attn_core.cli.check._run", no_kernels)
    monkeypatch.setattr("attn_core.cli.generate._load", no_kernels)
    monkeypatch.setattr("attn_core.runtime.warmup.create", no_kernels)
    monkeypatch.setattr("attn_core.measure.candidates.jobs", no_kernels)

    def call(arguments):
        monkeypatch.setattr(sys, "argv", ["attn", *arguments])
        capfd.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return (code, *capfd.readouterr())

    return call


def hold(arguments, code, out, err):
    """Check what every call must hold to."""
    about = (arguments, err[-2000:])
    assert code in (0, 1, 2, 3), about
    assert code != 1 or arguments[0] in ("doctor", "check", "diff") or "--locked" in arguments, (
        about
    )
    assert "internal error" not in err, about
    assert "Traceback" not in out + err or "--debug" in arguments, about
    assert "\x1b" not in out + err, about
    assert code in (0, 1) or len(err) > 10 or "--json" in arguments, about  # says why
    if "--json" in arguments and "--help" not in arguments and code in (0, 3) and out:
        assert isinstance(json.loads(out), dict | list), about


def arguments(rng, folder):
    """Draw a command with some of its options, known or not, and values of any kind."""
    name = rng.choice(sorted(COMMANDS))
    paths = [
        *map(str, folder.iterdir()),
        "/dev/zero",
        "/proc/self/mem",
        "/nowhere",
        "/" + "a/" * 3000,
    ]
    pools = (NUMBERS, NUMBERS, TEXTS, NAMES, PLACES, WORDS, LIBRARIES, paths)
    line = [name]
    for option in command(name).commands[name].params:
        flag = max((*option.opts, ""), key=len)
        chance = 0.7 if option.param_type_name == "argument" else 0.12
        if rng.random() > chance:
            continue
        value = rng.choice(rng.choice(_fitting(flag, pools, paths)))
        if option.param_type_name == "argument":
            line.append(value)
        elif getattr(option, "is_flag", False):
            line.append(flag)
        else:
            line += [flag, value]
    if rng.random() < 0.05:
        line.append(rng.choice(("--no-such", "--debug", "--help", "", "-x")))
    return [x for x in line if "\0" not in x]


def _fitting(flag, pools, paths):
    """Return mostly the values that an option is made for, so that what lies behind it is met."""
    numbers, _, _, names, places, words, libraries, _ = pools
    for part, pool in (
        ("backend", names), ("device", places), ("model", paths), ("evidence", paths),
        ("installed", libraries), ("size", numbers), ("head", numbers), ("topk", numbers),
        ("profile", paths), ("workload", paths), ("locked", paths), ("old", paths),
        ("new", paths), ("file", paths),
        ("dtype", words), ("kind", words), ("format", words), ("mode", words), ("version", words),
    ):  # fmt: skip
        if part in flag:
            return (pool, pool, pool, *pools)
    return pools


def junk(rng, config):
    """Spoil some keys of a config, at any depth that it has."""
    spots = [config, *(v for v in config.values() if isinstance(v, dict))]
    for _ in range(rng.randrange(1, 5)):
        spot = rng.choice(spots)
        spot[rng.choice((*KEYS, *spot))] = rng.choice(JUNK)
    return config


@pytest.fixture
def folder(tmp_path):
    """Paths that a user may give, few of them models."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(CONFIGS[0].read_text())
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "bytes.json").write_bytes(bytes(range(256)))
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "digits.json").write_text('{"hidden_size": ' + "9" * 5000 + "}")
    lock = {"schema": 1, "asked": {}, "decision": {}, "environment": {}, "profile": ""}
    lock |= {"conflicts": [], "weighed": []}
    (tmp_path / "a.lock").write_text(json.dumps(lock))
    (tmp_path / "short.gguf").write_bytes(b"GGUF\3\0\0\0")
    return tmp_path


@pytest.mark.parametrize("seed", SEEDS)
def test_any_command_line_ends_with_a_sentence(run, folder, seed):
    rng = random.Random(seed)
    for _ in range(RUNS):
        line = arguments(rng, folder)
        hold(line, *run(line))


@pytest.mark.parametrize("seed", SEEDS)
def test_any_config_is_read_or_refused(run, tmp_path, seed):
    rng = random.Random(seed)
    for _ in range(RUNS):
        config = junk(rng, json.loads(rng.choice(CONFIGS).read_text()))
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        line = ["select", "--model", str(path), "--device", rng.choice(PLACES[:4])]
        hold(line, *run(line))
        line.append("--json")
        code, out, err = run(line)
        hold((*line, config), code, out, err)
        if code in (0, 3):
            assert json.loads(out)["layers_read"], config


@pytest.mark.parametrize("seed", SEEDS)
def test_any_value_of_an_environment_variable_ends_with_a_sentence(run, monkeypatch, seed):
    rng = random.Random(seed)
    for _ in range(RUNS // 5):
        name = rng.choice(("ATTN_PAGE_SIZE", "ATTN_MODEL", "ATTN_DEVICE", "ATTN_TP", "ATTN_PREFER",
                           "ATTN_DETERMINISTIC", "ATTN_NOBODY\x1b"))  # fmt: skip
        with monkeypatch.context() as here:
            here.setenv(name, rng.choice((*NUMBERS, *TEXTS, *NAMES, *PLACES)))
            hold(["select", name], *run(["select"]))
