"""`attn generate` streams a local model's text, says what ran, and loses nothing on an error."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from attn_core import cli  # noqa: E402
from attn_core.integrations.transformers import text as text_module  # noqa: E402
from attn_core.integrations.transformers.text import encode, generate, load  # noqa: E402

WORDS = ["<pad>", "<unk>", "<end>", "user", "says", *(f"w{i}" for i in range(91))]
PROMPT = "w1 w2 w3 w4"
TEMPLATE = "{% for m in messages %}{{ m.role }} says {{ m.content }}{% endfor %}"


def save(path: Path, *, template: str | None = None, context: int = 4096) -> Path:
    """Save a tiny random Llama and a tokenizer of words."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        pad_token_id=0,
        eos_token_id=None,
        initializer_range=0.3,
        dtype="float32",
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"))


Attn = Callable[..., tuple[int, str, str]]


@pytest.fixture
def attn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Attn:
    """Run `attn generate …` in this process; returns exit code, stdout, stderr."""

    def run(*args: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["attn", "generate", *map(str, args)])
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def expected_text(path: Path, prompt: str, new: int) -> str:
    """What transformers alone says."""
    net = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    out = net.generate(ids, max_new_tokens=new, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def test_text_and_report(model: Path, attn: Attn) -> None:
    args = ("--model-path", model, PROMPT, "--max-new-tokens", 20, "--page-size", 16)
    code, out, err = attn(*args, "--decode-attention-backend", "torch_native")
    text, report = out.split("\n", 1)
    assert code == 0
    assert text == expected_text(model, PROMPT, 20)
    assert len(set(text.split())) > 5
    assert "prefill    torch_native: highest priority of those that fit" in report
    assert "decode     torch_native: named by --decode-attention-backend" in report
    assert "page size  16: named by --page-size" in report
    assert re.search(r"KV cache   fp32, \d+\.\d MB on cpu", report)
    assert re.search(r"prompt     4 tokens in \d+\.\d\d s", report)
    assert re.search(r"new tokens 20, \d+\.\d tokens/s", report)
    assert err == ""  # a bar is for terminals


def test_text_comes_token_by_token(model: Path) -> None:
    text = load(model)
    passes: list[int] = []
    text.model.register_forward_hook(lambda *_: passes.append(1))
    seen: list[tuple[int, str]] = []
    prompt = encode(text.tokenizer, PROMPT, chat=True)
    (report,) = generate(
        text, prompt, lambda piece: seen.append((len(passes), piece)), max_new_tokens=6
    )
    # each piece is written before the next pass runs
    assert [n for n, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert "".join(piece for _, piece in seen) == expected_text(model, PROMPT, 6)
    assert report.new_tokens == 6


def test_characters_come_whole() -> None:
    class Bytes:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return bytes(ids).decode("utf-8", "replace")

    said = "naïve 世界 🙂!"
    pieces: list[str] = []
    stream = text_module._Stream(Bytes(), pieces.append)
    stream.put(torch.tensor([[1, 2, 3]]))  # the prompt is not shown
    for byte in said.encode():
        stream.put(torch.tensor([byte]))
    assert pieces == list(said)
    stream.put(torch.tensor([0xE4]))  # the generation ends in the middle of a character
    assert "".join(pieces) == said
    stream.flush()
    assert "".join(pieces) == said + "\ufffd"


def test_chat_template(tmp_path: Path, attn: Attn) -> None:
    path = save(tmp_path, template=TEMPLATE)
    args = ("--model-path", path, "--max-new-tokens", 8)
    _, chat, _ = attn(*args, PROMPT, "--chat")
    _, plain, _ = attn(*args, PROMPT)
    assert chat.split("\n")[0] == expected_text(path, f"user says {PROMPT}", 8)
    assert plain.split("\n")[0] == expected_text(path, PROMPT, 8)
    assert "prompt     6 tokens" in chat
    assert "prompt     4 tokens" in plain
    broken = save(tmp_path / "broken", template="{{ raise_exception('no') }}")
    code, _, err = attn("--model-path", broken, PROMPT, "--chat")
    assert code == 2
    assert "chat template fails" in err
    assert "leave out --chat" in err


def test_out_of_pages_keeps_the_text(model: Path, attn: Attn) -> None:
    args = ("--model-path", model, PROMPT, "--page-size", 4, "--num-pages", 4)
    code, out, err = attn(*args, "--max-new-tokens", 50)
    assert code == 1
    # 12 tokens fit: the prompt, 8 more, and the token that the last pass gave
    assert out.split("\n")[0] == expected_text(model, PROMPT, 9)
    assert "new tokens 9" in out
    assert re.search(r"attn: 1 more pages of 4 tokens .* 0 of 3 are free", err)


def test_the_context_is_a_limit(tmp_path: Path, attn: Attn) -> None:
    path = save(tmp_path, context=16)
    code, out, _ = attn("--model-path", path, PROMPT)
    assert code == 0
    assert "new tokens 12," in out  # what the context has room for
    code, out, err = attn("--model-path", path, PROMPT, "--max-new-tokens", 13)
    assert (code, out) == (1, "")
    assert "a prompt of 4 tokens and 13 new tokens for a context of 16" in err
    assert "at most 12" in err
    code, _, err = attn("--model-path", path, "w5 " * 16)
    assert code == 1
    assert "a prompt of 16 tokens for a context of 16; shorten the prompt" in err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["w1", "--page-size", "0"], 2, "--page-size 0"),
        (["w1", "--attention-backend", "torch_nativ"], 2, "did you mean torch_native"),
        (["w1", "--kv-cache-dtype", "fp9"], 2, "--kv-cache-dtype fp9"),
        (["w1", "--dtype", "float32"], 2, "--dtype float32"),
        (["w1", "--num-pages", "1"], 2, "at least 2"),
        (["w1", "--max-new-tokens", "0"], 2, "at least 1"),
        (["w1", "--deny", "torch_native,flex_attention"], 3, "no backend fits"),
        ([""], 2, "the prompt is empty"),
    ],
)
def test_bad_flags(model: Path, attn: Attn, args: list[str], code: int, message: str) -> None:
    got, out, err = attn("--model-path", model, *args)
    assert (got, out) == (code, "")
    assert message in err
    assert "Traceback" not in err


def test_bad_models(tmp_path: Path, model: Path, attn: Attn) -> None:
    code, _, err = attn("--model-path", tmp_path / "nothing", PROMPT)
    assert code == 2
    assert "no such file or directory" in err
    (tmp_path / "empty").mkdir()
    code, _, err = attn("--model-path", tmp_path / "empty", PROMPT)
    assert code == 2
    assert "no config.json" in err
    no_weights = shutil.copytree(model, tmp_path / "no_weights")
    (no_weights / "model.safetensors").unlink()
    code, _, err = attn("--model-path", no_weights, PROMPT)
    assert code == 2
    assert f"cannot load {no_weights}" in err
    other = shutil.copytree(model, tmp_path / "other")
    config = {**json.loads((model / "config.json").read_text()), "model_type": "gpt2"}
    (other / "config.json").write_text(json.dumps(config))
    code, _, err = attn("--model-path", other, PROMPT)
    assert code == 1
    assert "supports" in err
    assert "llama" in err


def test_code_beside_the_weights_is_never_run(tmp_path: Path, attn: Attn) -> None:
    path = save(tmp_path / "model")
    mark = tmp_path / "it-ran"
    (path / "evil.py").write_text(f"open({str(mark)!r}, 'w')\nclass Evil: ...\n")
    auto = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    for name, maps in (
        ("config.json", auto),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}),
    ):
        keys = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**keys, "auto_map": maps}))
    custom = path / "custom_generate"
    custom.mkdir()
    shutil.copy(path / "evil.py", custom / "generate.py")
    code, out, err = attn("--model-path", path, PROMPT, "--max-new-tokens", 5)
    assert not mark.exists()
    assert code == 0, err
    assert out.split("\n")[0] == expected_text(save(tmp_path / "plain"), PROMPT, 5)
    assert "never run" in out  # the decision says that it saw auto_map


def test_ctrl_c_keeps_what_was_written(tmp_path: Path) -> None:
    model, most = save(tmp_path, context=100_000), 90_000
    command = "from attn_core.cli import main; main()"
    # so many are not done before a busy machine comes to sending the signal
    args = ["generate", "--model-path", model, PROMPT, "--max-new-tokens", most]
    run = subprocess.Popen(
        [sys.executable, "-c", command, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # a shell's background job ignores the signal, and so would its children
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert run.stdout is not None
    try:
        begun = os.read(run.stdout.fileno(), 1)  # text is there before the generation ends
        run.send_signal(signal.SIGINT)
        rest, err = run.communicate(timeout=60)
    finally:
        run.kill()
    text, _, report = (begun + rest).decode().partition("\n")
    written = re.search(r"new tokens (\d+)", report)
    assert run.returncode == 130, err
    assert written is not None
    assert len(text.split()) == int(written[1]) < most
    assert expected_text(model, PROMPT, 5).startswith(text[:10])
    assert "ended      by Ctrl-C" in report
    assert b"Traceback" not in err
