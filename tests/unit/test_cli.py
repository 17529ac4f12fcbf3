"""`attn` as its users meet it: outputs, exit codes and error messages.

`attn()` starts a process, for what only a process shows: its streams, plugins on its path.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from attn_core import cli
from attn_core.cli.app import COMMANDS
from attn_core.cli.backends import _entry
from attn_core.cli.inputs import selection_inputs
from attn_core.cli.options import InputFlags
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.spec.device import Device

ROWS = """
from attn_core import BackendSpec, Capabilities, hookimpl

@hookimpl
def attn_register_backends():
    return {}
"""


def attn(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from attn_core.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("ATTN_")}, **environ},
        check=False,
    )


@pytest.fixture
def data(here):
    """Return what runs `attn` in this process and reads the object that it prints."""

    def run(*arguments: str) -> dict:
        done = here(*arguments)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_arguments_as_the_reference_does(here, command):
    usage = here(command, "--help").stdout.partition("\n")[0]
    assert f"{command} [OPTIONS]" in usage
    named = usage.partition("[OPTIONS]")[2]
    assert "[[" not in named
    assert named == named.upper()


def test_select_prints_one_object():
    done = attn("select", "--device", "cuda:sm90", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    actual = json.loads(done.stdout)
    assert (actual["prefill"], actual["decode"], actual["page_size"]) == ("fa3", "fa3", 1)
    assert actual["verify"] is actual["draft"] is actual["multimodal"] is actual["linear"] is None
    assert actual["device"] == "cuda:sm90"
    assert actual["kv_cache_dtype"] == "bf16"
    assert any("newest" in a for a in actual["assumptions"])
    verdict = next(v for v in actual["verdicts"] if not v["fits"])
    assert set(verdict) >= {"backend", "phase", "fits", "reasons"}
    assert verdict["reasons"]


@pytest.mark.parametrize("value", [",", " , "])
@pytest.mark.parametrize("option", ["allow", "assume-installed"])
def test_a_list_without_a_name_is_refused(here, option, value):
    """It would allow, or assume, everything."""
    ran = here("select", "--device", "cuda:sm90", f"--{option}", value)
    assert ran.returncode == 2
    assert f"names no {'backend' if option == 'allow' else 'library'}" in ran.stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--linear-attn-decode-backend", "cutedsl"),
            "--linear-attn-decode-backend: the model has no linear attention layers; drop the flag",
        ),
        (("--assume-installed", "triton==x"), "--assume-installed triton==x: not NAME or NAME=="),
    ],
)
def test_a_wrong_flag_is_named_in_one_line(here, flags, said):
    ran = here("select", "--device", "cuda:sm90", *flags)
    assert ran.returncode == 2
    assert said in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_shared_prefix_is_asked_of_what_decodes(here):
    """By a flag or the variable that engines read; a backend that cannot is refused by name."""
    device = ("select", "--device", "cuda:sm90", "--assume-installed", "all", "--json")
    actual = json.loads(here(*device, "--shared-prefix").stdout)
    assert (actual["prefill"], actual["decode"]) == ("fa3", "triton")
    refused = here(*device, "--shared-prefix", "--decode-attention-backend", "fa3")
    assert refused.returncode == 3
    assert "shared_prefix asked (not supported)" in json.loads(refused.stdout)["error"]


def test_this_machine_never_gets_what_cannot_be_created_here(data):
    actual = data("select", "--json")
    implemented = {b["name"] for b in data("backends", "--json")["backends"] if b["implemented"]}
    assert {actual["prefill"], actual["decode"]} <= implemented


@pytest.fixture
def soon(tmp_path):
    """Install a plugin whose one backend is declared, not implemented; return the environment."""
    text = ROWS.format(
        "[BackendSpec(name='soon', capabilities=[Capabilities(kind='dsa', device='npu', "
        "dtypes={'bf16'}, kv_dtypes={'bf16'}, priority=99, head_dim_pairs='any')])]"
    )
    installed(tmp_path, "soon", text)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def installed(folder, name, text):
    """Put the module and the metadata of a plugin into a folder."""
    (folder / f"attn_{name}.py").write_text(text)
    info = folder / f"attn_{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: attn-{name}\nVersion: 1.2\nRequires-Dist: attn-core==0.1.*\n"
    )
    (info / "entry_points.txt").write_text(f"[attn_core]\n{name} = attn_{name}\n")


def test_not_implemented_is_a_note_on_a_simulated_device(soon):
    requested = ("select", "--kind", "dsa", "--attention-backend", "soon")
    done = attn(*requested, "--device", "npu:910b", "--json", **soon)
    actual = json.loads(done.stdout)
    assert actual["prefill"] == "soon"
    assert "not implemented in 0.1" in actual["why"]["notes"]
    refused = attn(*requested, "--device", "npu:910b", "--implemented-only", **soon)
    assert refused.returncode == 3
    assert "not implemented in 0.1" in refused.stderr


def test_implemented_only_and_what_runs_today(soon, data):
    requested = ("select", "--kind", "dsa", "--device", "npu:910b", "--json")
    actual = json.loads(attn(*requested, **soon).stdout)
    assert actual["prefill"] == "soon"
    today = json.loads(attn(*requested, "--implemented-only", **soon).stdout)
    assert actual["runs_today"] == {"prefill": today["prefill"], "decode": today["decode"]}
    assert (today["prefill"], today["runs_today"]) == ("ascend", {})
    implemented = {b["name"] for b in data("backends", "--json")["backends"] if b["implemented"]}
    assert today["prefill"] in implemented
    refused = attn(*requested, "--implemented-only", "--attention-backend", "soon", **soon)
    assert refused.returncode == 3


def test_no_backend_exits_3_with_the_same_object_and_an_error(here):
    done = here("select", "--device", "cuda:sm90", "--attention-backend", "trtllm_mla", "--json")
    assert done.returncode == 3
    actual = json.loads(done.stdout)
    assert actual["prefill"] is None
    assert "kind mha (supports mla)" in actual["error"]
    assert actual["verdicts"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["select", "--attention-backend", "flashinfr"], "did you mean flashinfer"),
        (["select", "--device", "cuda:sm91"], "did you mean cuda:sm90"),
        (["select", "--device", "cud"], "known: cpu, cuda, npu, rocm, xpu"),
        (["select", "--device", ""], "unknown device type ''"),
        (["doctor", "--device", ""], "unknown device type ''"),
        (["select", "--device", "xpu", "--runtime-version", "12"], "a xpu device has none"),
        (["select", "--device", "cuda", "--runtime-version", "new"], "not a version like 12.8"),
        (["select", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8: known: auto, bf16, fp16"),
        (["select", "--kind", "gqa"], "known: dsa, gdn, kda, mha, mla"),
        (["select", "--page-size", "0"], "--page-size 0: at least 1"),
        (["select", "--speculative-eagle-topk", "0"], "at least 1"),
        (["select", "--speculative-attention-mode", "decode"], "--speculative-eagle-topk"),
        (["select", "--speculative-num-draft-tokens", "8"], "--speculative-eagle-topk"),
        (["select", "--linear-attn-backend", "triton"], "no linear attention layers"),
        (["select", "--assume-installed", "triton>3"], "not NAME or NAME==VERSION"),
        (["select", "--prefer", "fa9"], "unknown backend 'fa9'"),
        (["select", "--num-q-heads", "6", "--tp", "4"], "6 KV heads do not divide over tp 4"),
        (["select", "--num-kv-heads", "3", "--tp", "2"], "3 KV heads do not divide over tp 2"),
        (
            ["select", "--num-q-heads", "8", "--num-kv-heads", "3"],
            "8 query heads are no multiple of 3 KV heads",
        ),
        (["select", "--head-dim", "0"], "--head-dim 0: above 0"),
        (["select", "--num-q-heads", "-8"], "--num-q-heads -8: above 0"),
        (["select", "--sliding-window", "0"], "--sliding-window 0: above 0"),
        (["select", "--logit-cap", "nan"], "--logit-cap nan: above 0"),
        (["select", "--v-head-dim", "128"], "--v-head-dim 128 without --head-dim"),
        (["select", "--assume-installed", "triton,tritn"], "--assume-installed tritn: no backend"),
        (["generate", "--model-path", __file__, "x"], "give the model's directory"),
        (["select", "--no-such-flag"], "no-such-flag"),
        (["why-not", "fa33"], "did you mean fa3"),
        (["matrix", "--format", "xml"], "--format xml: known: html, json, markdown, table"),
        (["select", "--model", "/nonexistent/model"], "/nonexistent/model"),
        (["select", "--model", "/dev/zero"], "/dev/zero is no regular file"),
        (["select", "--model", "/" + "a" * 5000], "cannot read /aaa"),
        (["select", "--page-size", "1000000000000"], "at least 1, at most 65536"),
        (["select", "--sliding-window", "9" * 400], "above 0, below 2147483648"),
        (["select", "--logit-cap", "1e30"], "--logit-cap 1e+30: above 0, below"),
        (["select", "--speculative-eagle-topk", "1000000000"], "at least 1, at most 1024"),
        (["select", "--device", "cuda", "--runtime-version", "9" * 5000], "not a version"),
        (["select", "--assume-installed", "triton==" + "9" * 5000], "not NAME or NAME==VERSION"),
        (["warmup", "--max-bs", "1000000000"], "--max-bs 1000000000: at least 1, at most 16384"),
        (["check", "torch_native", "--jobs", "1000000"], f"at most {os.cpu_count()}, the cores of"),
        (["check", "torch_native", "--evidence", "/proc/evidence"], "--evidence /proc/evidence: "),
        (["check", "torch_native", "--evidence", __file__], "give a folder that can be written"),
    ],
)
def test_bad_usage_exits_2_with_a_clear_message_and_no_traceback(here, arguments, message):
    done = here(*arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_a_warmup_that_would_take_the_machine_down_is_refused():
    shape = ("--head-dim", "1000000", "--num-q-heads", "1000000", "--num-kv-heads", "1000000")
    done = attn("warmup", *shape)
    assert done.returncode == 2, done.stderr
    assert "a warm-up of 1000000 query heads, head_dim 1000000" in done.stderr
    assert "--tp for one rank's share" in done.stderr


def test_a_report_is_told_where_its_evidence_cannot_be_written(monkeypatch, capsys, tmp_path):
    from attn_core.testing import runner

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("attn_core.testing.evidence.write_evidence", full)
    monkeypatch.setattr("attn_core.cli.check._run", lambda asked, jobs: [])
    monkeypatch.setattr(runner, "report", lambda *args: {})
    folder = tmp_path / "new" / "evidence"
    monkeypatch.setattr(
        sys, "argv", ["attn", "check", "torch_native", "--json", "--evidence", str(folder)]
    )
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    assert end.value.code == 1
    assert json.loads(said.out)["evidence"] == []
    assert f"attn: --evidence {folder}: No space left on device; the evidence is not" in said.err
    assert list(folder.iterdir()) == []  # it was tried, and nothing of that is left


def test_what_kernels_print_is_no_part_of_a_report(monkeypatch, capfd):
    from attn_core.testing import runner

    def loud(asked, jobs):
        os.write(1, b"compiling")
        return []

    monkeypatch.setattr("attn_core.cli.check._run", loud)
    monkeypatch.setattr(runner, "report", lambda *args: {})
    monkeypatch.setattr(sys, "argv", ["attn", "check", "torch_native", "--json", "--kind", "mha"])
    with pytest.raises(SystemExit):
        cli.main()
    said = capfd.readouterr()
    assert json.loads(said.out)["backend"] == "torch_native"
    assert said.err == "compiling"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
@pytest.mark.parametrize("command", ["select", "backends"])
def test_output_that_cannot_be_written_is_said(command):
    for target, code in (("/dev/full", 1), ("&-", 0)):
        call = f'"{sys.executable}" -c "from attn_core.cli import main; main()" {command}'
        done = subprocess.run(
            f"{call} --json >{target}", shell=True, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        assert ("attn: [Errno 28] No space left on device" in done.stderr) == bool(code)
        assert "internal error" not in done.stderr
        assert "Exception ignored" not in done.stderr


def test_any_text_can_be_written_to_any_stream():
    for encoding in ("ascii", "utf-8"):
        done = attn("why-not", "triton", "--device", "cuda:sm90", "--json",
                    PYTHONIOENCODING=encoding, ATTN_MODEL="", ATTN_PREFER="")  # fmt: skip
        assert done.returncode in (0, 2), done.stderr
    odd = os.fsdecode(b"odd-\xff-\xc3\xa9")
    for arguments in (["select", "--model", odd], ["select", "--attention-backend", odd]):
        done = attn(*arguments, PYTHONIOENCODING="ascii")
        assert done.returncode == 2, done.stderr
        assert "internal error" not in done.stderr


def test_an_impossible_page_size_says_what_can(here):
    done = here(
        "select", "--device", "cuda:sm100", "--attention-backend", "trtllm_mha", "--page-size", "8"
    )
    assert done.returncode == 3
    assert "page_size 8 (supports 16, 32, 64)" in done.stderr


def test_heads_of_one_rank_and_what_was_assumed_of_them(here, data):
    shape = ("--num-q-heads", "32", "--num-kv-heads", "4", "--tp", "8")
    actual = data("select", "--device", "cuda:sm90", *shape, "--json")
    assert "tp 8 is above the 4 KV heads: each rank holds one, replicated" in actual["assumptions"]
    latent = ("--kind", "mla", "--device", "cuda:sm100", "--attention-backend", "cutlass_mla")
    assert data("select", *latent, "--num-q-heads", "256", "--tp", "2", "--json")["prefill"]
    refused = here("select", *latent, "--num-q-heads", "128", "--tp", "2")
    assert "num_q_heads 64 (supports 128)" in refused.stderr


def test_a_vision_tower_without_a_model_is_an_assumption(data):
    actual = data("select", "--device", "cuda:sm90", "--mm-attention-backend", "fa3", "--json")
    assert actual["multimodal"] == "fa3"
    assert any("a vision tower of any shape" in text for text in actual["assumptions"])


def test_all_libraries_but_the_one_that_is_pinned(here, data):
    base = ("select", "--device", "cuda:sm75", "--json", "--attention-backend", "triton")
    assert data(*base, "--assume-installed", "all")["prefill"] == "triton"
    old = here(*base, "--assume-installed", "all,triton==3.0")
    assert old.returncode == 3
    assert "triton 3.0 (needs triton>=3.4)" in json.loads(old.stdout)["error"]


def test_all_counts_an_old_library_of_this_machine_as_new_enough(monkeypatch):
    registry = load_plugins()
    monkeypatch.setattr(Registry, "installed_libraries", lambda self: {"triton": "3.0"})
    requested = selection_inputs(InputFlags(assume_installed=["all"]), registry)
    assert requested.libraries["triton"] is None
    assert selection_inputs(InputFlags(), registry).libraries == {"triton": "3.0"}


def test_version():
    done = attn("--version")
    assert (done.returncode, done.stdout) == (0, "attn-core 0.1.0\n")


def test_a_fault_of_our_own_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr("attn_core.cli.app.build_app", lambda asked: 1 / 0)
    for debug in ([], ["--debug"]):
        monkeypatch.setattr(sys, "argv", ["attn", "select", *debug])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 1
        said = capsys.readouterr().err
        line = "attn: internal error: ZeroDivisionError: division by zero"
        assert ("Traceback" in said) == bool(debug)
        assert said.endswith(line + "\n" if debug else line + "; run again with --debug\n")


def test_a_plugin_that_prints_or_says_nothing_is_listed_and_json_stays_json(tmp_path):
    for name, text in (
        ("loud", "print('welcome')"),
        ("mute", ROWS.format("[]")),
        ("none", ROWS.format("None")),
        (
            "typed",
            ROWS.format(
                "[BackendSpec(name='typed', create='a:b', capabilities=[Capabilities(kind='mha', "
                "device='any', dtypes={'bf16'}, kv_dtypes={'bf16'}, priority=99, page_sizes={0})])]"
            ),
        ),
    ):
        installed(tmp_path, name, text)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = attn("backends", "--json", PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "welcome\n")
    broken = {b["name"]: b["error"] for b in json.loads(done.stdout)["broken"]}
    assert set(broken) == {"loud", "mute", "none", "typed"}
    assert "registers nothing" in broken["mute"]
    assert "a hook returned None, not a list" in broken["none"]
    assert broken["typed"] == "page_sizes {0} (expected a set of int, above 0)"
    for command in ("select", "matrix", "why-not triton"):
        assert attn(*command.split(), PYTHONPATH=path).returncode == 0
    assert "registers nothing" in attn("backends", PYTHONPATH=path).stdout


def test_a_pipe_honours_columns():
    for columns in ("60", "200"):
        done = attn("backends", COLUMNS=columns)
        assert max(map(len, done.stdout.splitlines())) <= int(columns)
    folded = attn("select", "--device", "cuda:sm90", COLUMNS="60").stdout
    assert max(map(len, folded.splitlines())) <= 60
    assert folded.split() == attn("select", "--device", "cuda:sm90").stdout.split()


def test_debug_adds_the_traceback(here):
    done = here("select", "--device", "cud", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_a_model_directory_without_a_config(here, tmp_path):
    done = here("select", "--model", str(tmp_path))
    assert done.returncode == 2
    assert "config.json" in done.stderr


def test_a_model_decides_its_own_shape(here, data, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["GptOssForCausalLM"],
                "model_type": "gpt_oss",
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "head_dim": 64,
                "hidden_size": 2880,
                "sliding_window": 128,
                "layer_types": ["sliding_attention", "full_attention"],
                "torch_dtype": "bfloat16",
            }
        )
    )
    actual = data("select", "--model", str(tmp_path), "--device", "cuda:sm80", "--json")
    assert actual["prefill"] == "triton"  # flashinfer has no sinks
    refused = [v for v in actual["verdicts"] if v["backend"] == "flashinfer"]
    assert refused[0]["reasons"] == ["sinks (not supported)"]
    shape = {"part": "text", "kind": "mha", "head_dim": 64, "num_q_heads": 64, "num_kv_heads": 8}
    for layer, window in zip(actual["layers_read"], (128, None), strict=True):
        assert layer.items() >= {**shape, "sliding_window": window, "sinks": True}.items()
    wide = here("select", "--model", str(tmp_path), "--device", "cuda:sm80", COLUMNS="400")
    text = wide.stdout.splitlines()
    assert text[:4] == [
        f"layers read from {tmp_path}",
        "  mha        64 query heads, 8 KV heads, head_dim 64, window 128, sinks",
        "  mha        64 query heads, 8 KV heads, head_dim 64, sinks",
        "on cuda:sm80",
    ]
    clash = here("select", "--model-path", str(tmp_path), "--head-dim", "64")
    assert clash.returncode == 2
    assert "--head-dim cannot be combined with --model" in clash.stderr


def test_unknown_variables_warn_with_the_nearest_and_known_ones_work(here):
    done = here("select", "--device", "cuda:sm90", ATTN_ATTENTION_BACKENDS="triton")
    assert "ATTN_ATTENTION_BACKENDS" in done.stderr
    assert "ATTN_ATTENTION_BACKEND" in done.stderr
    done = here("select", "--device", "cuda:sm90", "--json", ATTN_ATTENTION_BACKEND="triton")
    assert done.stderr == ""
    assert json.loads(done.stdout)["prefill"] == "triton"
    # --kind has no variable, and --device is no option of generate
    done = here("select", "--device", "cuda:sm90", ATTN_KIND="mla")
    assert "ATTN_KIND is not read by `attn select`" in done.stderr
    done = here("generate", "--help", ATTN_DEVICE="cpu", ATTN_PAGE_SIZES="1")
    assert "ATTN_DEVICE is not read by `attn generate`" in done.stderr
    assert "ATTN_PAGE_SIZES is not read by `attn generate`: did you mean ATTN_PAGE_SIZE?" in (
        done.stderr
    )
    assert here("doctor", "--json", ATTN_DEVICE="cpu").stderr == ""
    assert "it reads none" in here("matrix", ATTN_DEVICE="cpu").stderr


def test_why_not_names_the_smallest_change(here, data):
    done = here("why-not", "trtllm_mha", "--device", "cuda:sm90", "--page-size", "8")
    assert done.returncode == 0
    assert "--decode-attention-backend trtllm_mha" in done.stdout
    assert "--page-size 64" in done.stdout
    actual = data("why-not", "flashinfer", "--device", "cuda:sm80", "--sinks", "--json")
    assert actual["changes"] == ["a model without sinks"]
    assert actual["naming"] == ""  # it is then chosen by itself
    assert actual["command"] == "attn select --device cuda:sm80"
    fits = here("why-not", "triton", "--device", "cuda:sm90")
    assert "triton fits, but is not chosen" in fits.stdout
    both = data("why-not", "triton", "--device", "cuda:sm90", "--kind", "gdn", "--json")
    assert (both["family"], both["linear"]["chosen"]) == ("softmax", ["prefill", "decode"])


def test_libraries_decide_on_another_machine(data):
    base = ("select", "--device", "cuda:sm80", "--json")
    assert data(*base)["prefill"] == "flashinfer"
    assert data(*base, "--assume-installed", "triton")["prefill"] == "triton"
    old = "flashinfer-python==0.1,triton"
    assert data(*base, "--assume-installed", old)["prefill"] == "triton"
    new = "flashinfer-python==0.6.15,triton"
    assert data(*base, "--assume-installed", new)["prefill"] == "flashinfer"
    unknown = "flashinfer-python==0.7,triton"  # its wrappers' private fields may have other names
    assert data(*base, "--assume-installed", unknown)["prefill"] == "triton"


@pytest.mark.parametrize("compiled", [True, False])
def test_a_plugins_own_library_without_a_version_is_found_or_not(compiled):
    library = {"attn-intel-kernels": None} if compiled else {}
    registry = load_plugins()
    entry = _entry(registry, registry.get("intel_amx"), Device("cpu", "avx2"), library)
    assert entry["libraries"] == {"attn-intel-kernels": "found" if compiled else None}
    assert entry["usable"] == compiled


def test_markup_in_texts_is_printed_as_it_is():
    done = attn("backends")
    assert done.returncode == 0
    assert "torch_native" in done.stdout
    assert "\x1b[" not in done.stdout


def test_a_corrupt_plugin_is_printed_in_full_and_takes_nothing_down(tmp_path):
    (tmp_path / "attn_bad.py").write_text(
        "raise ImportError('try pip install attn[nvidia] [bold]')"
    )
    info = tmp_path / "attn_bad-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: attn-bad\nVersion: 1.2\nRequires-Dist: attn-core==0.1.*\n"
    )
    (info / "entry_points.txt").write_text("[attn_core]\nbad = attn_bad\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = attn("backends", PYTHONPATH=path)
    assert done.returncode == 0
    assert "broken: bad from attn-bad 1.2" in done.stdout
    assert "ImportError: try pip install attn[nvidia] [bold]" in done.stdout
    assert "attn_bad.py" in done.stdout.replace("\n", "").replace(" ", "")  # the traceback, folded
    assert "torch_native" in done.stdout
    assert attn("select", PYTHONPATH=path).returncode == 0
    named = attn("select", "--attention-backend", "bad", PYTHONPATH=path)
    assert named.returncode == 2
    assert "broken in attn-bad 1.2: ImportError" in named.stderr


@pytest.mark.parametrize("form", ["table", "markdown", "html"])
def test_matrix_formats_name_every_backend(here, form):
    out = here("matrix", "--format", form).stdout
    for name in ("fa3", "torch_native", "trtllm_mla", "cutedsl"):
        assert name in out


def test_matrix_json(data):
    actual = data("matrix", "--format", "json")
    assert set(actual) >= {"mha", "mla", "dsa", "gdn"}
    cells = actual["mha"]["trtllm_mha"]
    assert cells["page_sizes"] == [16, 32, 64]
    assert cells["spec_topk1"] is True
    assert cells["spec_topk_gt1"] is False
    assert set(cells["evidence"].values()) <= {
        "declared",
        "emulated",
        "compiled",
        "device-tested",
    }
    assert actual["gdn"]["cutedsl"]["decode"] is True
    assert actual["gdn"]["cutedsl"]["prefill"] is False
    assert "chunked_prefix_cache" in actual["mla"]["fa3"]


def test_select_answers_within_a_second_beyond_pythons_own_start(tmp_path):
    """Processor time. A busy machine lengthens runs, so that one of eight in time is enough.

    The first run writes its bytecode, as any installed program has it, wherever the environment
    forbids it elsewhere.
    """
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path)

    def seconds(code: list[str]) -> float:
        start = os.times()
        subprocess.run([sys.executable, *code], capture_output=True, check=True, env=env)
        end = os.times()
        return (end.children_user + end.children_system) - (
            start.children_user + start.children_system
        )

    least = min(seconds(["-c", "pass"]) for _ in range(8))
    main = ["-c", "from attn_core.cli import main; main()", "select", "--device", "cuda:sm100"]
    assert any(seconds(main) - least < 1.0 for _ in range(8))


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("select", "--device", "tpu"), 2, "tpu"),
        (("select", "--tp", "x"), 2, "--tp"),
        (("select", "--nothing"), 2, "--nothing"),
        (("select", "--model", "/none"), 2, "no such file"),
        (("select", "--attention-backend", "nobody"), 2, "nobody"),
        (("select", "--locked", "/none"), 2, "No such file"),
        (("why-not", "nobody"), 2, "nobody"),
        (("why-not",), 2, "argument"),
        (("diff", "/none", "/none"), 2, "/none"),
        (("check", "nobody"), 2, "nobody"),
        (("replay", "/none"), 2, "/none"),
        (("bench", "/none"), 2, "/none"),
        (("tune", "/none"), 2, "/none"),
        (("warmup", "/none"), 2, "/none"),
        (("doctor", "--device", "tpu"), 2, "tpu"),
        (("backends", "more"), 2, "more"),
        (("matrix", "--format", "html"), 2, "--format html"),
        (("matrix", "--kind", "x"), 2, "--kind x"),
    ],
)
def test_an_error_with_json_is_one_object(here, arguments, code, said):
    done = here(*arguments, "--json")
    assert done.returncode == code, done.stderr
    result = json.loads(done.stdout)
    assert result.keys() == {"error"}
    assert said in result["error"]
    assert result["error"].split("\n")[0] in done.stderr


def test_a_lock_that_differs_is_an_object_too(here, tmp_path):
    path = str(tmp_path / "a.lock")
    assert here("lock", path, "--device", "cuda:sm90").returncode == 0
    done = here("select", "--locked", path, "--device", "cuda:sm90", "--deny", "fa3", "--json")
    assert done.returncode == 1
    assert "fa3" in json.loads(done.stdout)["error"]


def test_json_that_is_no_option_changes_nothing(here):
    done = here("why-not", "--", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert here("select", "--device", "tpu").stdout == ""
    assert here("select", "--json", "--help").returncode == 0


def test_debug_behind_two_dashes_is_an_argument(here):
    done = here("why-not", "--", "--debug")
    assert done.returncode == 2
    assert "--debug" in done.stderr, "it is the name of a backend that nobody knows"


def test_the_matrix_as_json(here):
    short, long = (
        here("matrix", "--json", "--kind", "gdn"),
        here("matrix", "--format", "json", "--kind", "gdn"),
    )
    assert short.returncode == 0
    assert json.loads(short.stdout) == json.loads(long.stdout)
