"""What the README shows is real: its plugin runs, its examples work, its matrix is current."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest
import torch
from attn_core import (
    AttentionLayer,
    BackendConfig,
    Device,
    ForwardBatch,
    ForwardMode,
    HybridDispatcher,
    KVPool,
    Requirements,
    create_backend,
    load_plugins,
    select,
)

ROOT = pathlib.Path(__file__).parent.parent.parent
TEXT = (ROOT / "README.md").read_text()


def block(first_line: str) -> str:
    result = re.search(rf"```python\n({re.escape(first_line)}.*?)```", TEXT, re.S)
    assert result, first_line
    return result[1]


@pytest.fixture
def acme(tmp_path, monkeypatch):
    package = tmp_path / "attn_acme"
    package.mkdir()
    for name in ("__init__", "backend"):
        (package / f"{name}.py").write_text(block(f"# attn_acme/{name}.py"))
    info = tmp_path / "attn_acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: attn-acme\nVersion: 1.0\nRequires-Dist: attn-core==0.1.*\n"
    )
    (info / "entry_points.txt").write_text("[attn_core]\nacme = attn_acme\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield load_plugins()
    for name in ("attn_acme", "attn_acme.backend"):
        sys.modules.pop(name, None)


def test_the_plugin_is_25_lines():
    lines = block("# attn_acme/__init__.py") + block("# attn_acme/backend.py")
    code = [x for x in lines.splitlines() if x.strip() and not x.startswith("#")]
    assert len(code) <= 25


def test_the_plugin_joins_the_choice_and_is_right(acme):
    assert acme.broken == ()
    assert str(acme.origins["softmax", "acme"]) == "attn-acme 1.0"
    chosen = select(Requirements(dtype="fp32"), Device("cpu", "avx2"), acme, {})
    assert (chosen.backend("prefill"), chosen.backend("decode")) == ("acme", "acme")

    torch.manual_seed(0)
    layer = AttentionLayer(
        layer_id=0, num_q_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16, scale=0.25
    )
    table = torch.tensor([[3, 1], [2, 4]], dtype=torch.int32)
    lengths = [5, 7]
    batch = ForwardBatch.build(
        ForwardMode.EXTEND, query_lens=lengths, seq_lens=lengths, page_table=table, page_size=4
    )
    q, k, v = (torch.randn(12, h, 16) for h in (4, 2, 2))
    outs = []
    for name in ("acme", "torch_native"):
        spec = acme.get(name)
        pool = KVPool([layer], num_pages=5, page_size=4, kv_cache_dtype="fp32")
        config = BackendConfig(
            name=name,
            row=spec.capabilities[0],
            layers=(layer,),
            page_size=4,
            dtype="fp32",
            kv_cache_dtype="fp32",
            device=torch.device("cpu"),
        )
        backend = create_backend(spec, config)
        dispatcher = HybridDispatcher({"prefill": backend, "decode": backend}, pool)
        plan = dispatcher.init_forward_metadata(batch)
        outs.append(dispatcher.forward(q, k, v, layer, batch, plan))
    torch.testing.assert_close(outs[0], outs[1])


def test_the_plugin_passes_the_conformance_suite(acme, run_quick_checks):
    """A short part of what `attn check acme` runs."""
    ran = run_quick_checks(acme.get("acme"))
    assert len(ran) > 30
    assert "session-fp32-page16" in ran


def test_the_python_example_prints_a_decision():
    code = block("from attn_core import Overrides")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "on cuda:sm100" in done.stdout
    assert "flashinfer" in done.stdout


def test_the_console_examples_are_understood():
    lines = re.findall(r"^\$ attn (select|why-not) (.*)$", TEXT, re.M)
    assert len(lines) >= 3
    for command, rest in lines:
        if "config.json" in rest:
            continue
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                "from attn_core.cli import main; main()",
                command,
                *rest.split(),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_every_folder_of_the_core_has_a_line():
    core = ROOT / "packages" / "attn-core" / "src" / "attn_core"
    folders = {path.parent.name for path in core.glob("*/__init__.py")}
    assert folders == set(re.findall(r"^\| … (\w+)/ \|", TEXT, re.M))


def test_generated_pages_are_current():
    script = ROOT / "docs" / "generate.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + "run `nox -s readme`"
