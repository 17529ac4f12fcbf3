"""`attn generate` streams a local model's text, says what ran, and loses nothing on an error."""

from __future__ import annotations

import io
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
from attn_core.cache.memory import zeros  # noqa: E402
from attn_core.cli import generate as generate_module  # noqa: E402
from attn_core.errors import OutOfPagesError, UsageError  # noqa: E402
from attn_core.integrations.transformers import chat as chat_module  # noqa: E402
from attn_core.integrations.transformers import checkpoint  # noqa: E402
from attn_core.integrations.transformers import generate as text_module  # noqa: E402
from attn_core.integrations.transformers.generate import encode, generate, load  # noqa: E402
from attn_core.integrations.transformers.text_streamer import TextStreamer  # noqa: E402
from attn_core.runtime.backend import AttentionBackend  # noqa: E402
from attn_core.selection.result import Overrides  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

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

    for name in ("HF_HUB_OFFLINE", "USE_HUB_KERNELS"):
        monkeypatch.setenv(name, "as before")  # the command sets them: put back after the test

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
    code, out, err = attn(
        *args, "--decode-attention-backend", "torch_native", "--deny", "intel_amx"
    )
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


def test_a_models_linear_layers_are_those_of_the_backend(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Counting.calls += 1
            return super().forward(x)

    tokens, torch_native = [], Overrides(attention_backend="torch_native")
    for kind in (None, Counting):
        monkeypatch.setattr(AttentionBackend, "linear_class", lambda self, kind=kind: kind)
        loaded = load(model, dtype="fp32", overrides=torch_native).model
        assert type(loaded.lm_head) is (kind or nn.Linear)
        ids = torch.arange(5, 15)[None]
        tokens.append(loaded.generate(ids, max_new_tokens=8, do_sample=False))
    assert Counting.calls
    assert torch.equal(*tokens)


def test_characters_come_whole() -> None:
    class Bytes:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return bytes(ids).decode("utf-8", "replace")

    said = "naïve 世界 🙂!"
    pieces: list[str] = []
    stream = TextStreamer(Bytes(), pieces.append)
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
        (["w1", "--page-size", "65536"], 2, "above the model's context of 4096"),
        (["w1", "--page-size", str(10**7)], 2, "at most 65536"),
        (["w1", "--num-pages", str(10**15)], 2, "ask for fewer tokens"),
        (["w1", "--max-new-tokens", str(10**30)], 2, "at most 4095 in a context of 4096"),
        (["w1", "--attention-backend", "torch_nativ"], 2, "did you mean torch_native"),
        (["w1", "--kv-cache-dtype", "fp9"], 2, "--kv-cache-dtype fp9"),
        (["w1", "--dtype", "float32"], 2, "--dtype float32"),
        (["w1", "--num-pages", "1"], 2, "at least 2"),
        (["w1", "--max-new-tokens", "0"], 2, "at least 1"),
        (["w1", "--deny", "torch_native,flex_attention,intel_amx"], 3, "no backend fits"),
        ([""], 2, "the prompt is empty"),
    ],
)
def test_bad_flags(model: Path, attn: Attn, args: list[str], code: int, message: str) -> None:
    actual, out, err = attn("--model-path", model, *args)
    assert (actual, out) == (code, "")
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


def change(path: Path, name: str = "config.json", **keys: Any) -> None:
    """Set keys of a JSON file."""
    place = path / name
    known = json.loads(place.read_text()) if place.exists() else {}
    place.write_text(json.dumps({**known, **keys}))


def rewrite(path: Path, *without: str, **more: torch.Tensor) -> None:
    """Take tensors out of a model's weights, and add some."""
    place = path / "model.safetensors"
    tensors = {k: x for k, x in load_file(place).items() if k not in without}
    save_file({**tensors, **more}, place, {"format": "pt"})


HUB = "someone/kernel"
NAMED: dict[str, dict[str, Any]] = {
    "attention": {"attn_implementation": HUB},
    "private spelling": {"_attn_implementation": HUB, "_attn_implementation_internal": HUB},
    "a kernel of the community": {"attn_implementation": "kernels-community/flash-attn3"},
    "by part": {"attn_implementation": {"": HUB, "text_config": HUB}},
    "experts": {"experts_implementation": HUB, "_experts_implementation": HUB},
    "code": {"auto_map": {"AutoModelForCausalLM": f"{HUB}--x.Y"}, "trust_remote_code": True},
    "kernels": {"use_kernels": True, "kernel_config": {"kernel_mapping": {"RMSNorm": HUB}}},
    "generate": {"custom_generate": HUB},
}


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record and refuse every way out: the kernels of the hub, its files, code, the network."""
    tried: list[str] = []

    def refuse(name: str) -> Callable[..., Any]:
        def refused(*args: Any, **kwargs: Any) -> Any:
            tried.append(f"{name} {args[:2]}")
            raise OSError(f"{name} is not to be reached")

        return refused

    kernels, code = "transformers.integrations.hub_kernels", "transformers.dynamic_module_utils"
    monkeypatch.setattr(f"{kernels}.is_kernels_available", lambda *args, **kwargs: True)
    monkeypatch.setattr(f"{kernels}.get_kernel", refuse("get_kernel"))
    monkeypatch.setattr(f"{code}.get_class_in_module", refuse("get_class_in_module"))
    monkeypatch.setattr(f"{code}.get_cached_module_file", refuse("get_cached_module_file"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse("hf_hub_download"))
    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse("snapshot_download"))
    monkeypatch.setattr("socket.socket.connect", refuse("connect"))
    monkeypatch.setattr("socket.getaddrinfo", refuse("getaddrinfo"))
    return tried


@pytest.mark.parametrize("what", NAMED)
def test_what_a_config_names_is_never_loaded(
    model: Path, tmp_path: Path, attn: Attn, outside: list[str], what: str
) -> None:
    path = shutil.copytree(model, tmp_path / "model")
    change(path, **NAMED[what])
    if what in ("code", "generate"):
        change(path, "tokenizer_config.json", **NAMED[what])
        change(path, "generation_config.json", **NAMED[what])
    code, out, err = attn("--model-path", path, PROMPT, "--max-new-tokens", 5)
    assert (os.environ["HF_HUB_OFFLINE"], os.environ["USE_HUB_KERNELS"]) == ("1", "0")
    assert outside == []
    assert code == 0, err
    assert out.split("\n")[0] == expected_text(model, PROMPT, 5)


def test_what_a_part_of_a_config_names_is_never_loaded() -> None:
    keys = {
        "model_type": "qwen2_vl",
        "text_config": {"attn_implementation": HUB, "hidden_size": 64, "num_attention_heads": 4},
        "vision_config": {"_attn_implementation": HUB, "depth": 2},
    }
    config = checkpoint.plain_config(keys, Path("model"))
    assert HUB not in str(config.to_dict())
    for part in (config, config.text_config, config.vision_config):
        assert part._attn_implementation is None
    assert config.text_config.hidden_size == 64
    assert config.vision_config.depth == 2


@pytest.mark.parametrize("method", ["nothing_known", "gptq", "eetq", "fbgemm_fp8", None])
def test_a_quantization_is_honoured_or_refused(
    model: Path, tmp_path: Path, attn: Attn, outside: list[str], method: str | None
) -> None:
    path = shutil.copytree(model, tmp_path / "model")
    change(path, quantization_config={"quant_method": method, "bits": 4})
    code, out, err = attn("--model-path", path, PROMPT)
    assert (code, out, outside) == (2, "", [])
    assert f"are quantized by {str(method)!r} (attn generate loads fp8, mxfp4, deq" in err


def test_fp8_weights_are_dequantized(tmp_path: Path, attn: Attn, outside: list[str]) -> None:
    plain, path = save(tmp_path / "plain"), save(tmp_path / "fp8")
    name, eighths = "model.layers.1.mlp.up_proj.weight", {}
    tensors = load_file(path / "model.safetensors")
    for key in tensors:
        if key.endswith("proj.weight"):  # all that is quantized; up_proj of layer 1 not by 1.0
            eighths[key] = tensors[key].to(torch.float8_e4m3fn)
            scale = 0.5 if key == name else 1.0
            tensors[key] = eighths[key].float() * scale
            eighths[f"{key}_scale_inv"] = torch.full((1, 1), scale)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    rewrite(path, *eighths, **eighths)
    change(path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    code, out, err = attn("--model-path", path, PROMPT, "--max-new-tokens", 8)
    assert (code, outside) == (0, []), err
    assert out.split("\n")[0] == expected_text(plain, PROMPT, 8)


def test_mxfp4_weights_are_dequantized(tmp_path: Path, attn: Attn, outside: list[str]) -> None:
    """Expected: what transformers says, which dequantizes by itself where no kernels are."""
    path = save(tmp_path)
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=32,
        head_dim=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
        dtype="float32",
    )
    transformers.GptOssForCausalLM(config).save_pretrained(path)
    experts, more = "model.layers.0.mlp.experts", {}
    for name, rows in (("gate_up_proj", 64), ("down_proj", 32)):
        more[f"{experts}.{name}_blocks"] = torch.randint(0, 256, (2, rows, 1, 16)).byte()
        more[f"{experts}.{name}_scales"] = torch.randint(123, 127, (2, rows, 1)).byte()
    rewrite(path, f"{experts}.gate_up_proj", f"{experts}.down_proj", **more)
    change(path, quantization_config={"quant_method": "mxfp4"})
    code, out, err = attn("--model-path", path, PROMPT, "--max-new-tokens", 8)
    assert (code, outside) == (0, []), err
    assert out.split("\n")[0] == expected_text(path, PROMPT, 8)


def cut(path: Path) -> None:
    place = path / "model.safetensors"
    place.write_bytes(place.read_bytes()[:5000])


def index_of(path: Path, text: str) -> None:
    (path / "model.safetensors").unlink()
    (path / "model.safetensors.index.json").write_text(text)


def pickled(path: Path) -> None:
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04junk")


SHARD = "model-00001-of-00002.safetensors"
BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (cut, "model.safetensors is cut short or broken"),
    "empty": (lambda p: (p / "model.safetensors").write_bytes(b""), "cut short or broken"),
    "pickle": (pickled, "cannot load"),
    "index": (lambda p: index_of(p, "{nope"), "is no index of weights"),
    "list": (lambda p: index_of(p, '{"weight_map": [1]}'), "is no index of weights"),
    "far": (lambda p: index_of(p, '{"weight_map": {"a": "../b"}}'), "expected files beside it"),
    "shard": (
        lambda p: index_of(p, json.dumps({"weight_map": {"lm_head.weight": SHARD}})),
        f"lacks 1 of 1 files of weights: {SHARD}",
    ),
    "end": (lambda p: change(p, eos_token_id="2"), "has eos_token_id '2' (expected the number"),
    "ends": (
        lambda p: change(p, "generation_config.json", eos_token_id=[2, "</s>"]),
        "has eos_token_id '</s>'",
    ),
    "settings": (lambda p: (p / "generation_config.json").write_text("{"), "cannot load"),
    "tokenizer": (lambda p: (p / "tokenizer.json").write_text('{"a'), "cannot load"),
    "missing": (
        lambda p: rewrite(p, "lm_head.weight", "model.layers.1.mlp.up_proj.weight"),
        "lacks 2 weights of the model, which would be random numbers: lm_head.weight, model.layers",
    ),
    "layers": (lambda p: change(p, num_hidden_layers=3), "lacks 9 weights"),
    "shape": (
        lambda p: change(p, intermediate_size=64),
        "model.layers.0.mlp.down_proj.weight (32, 48) (expected (32, 64))",
    ),
    "adapter": (lambda p: change(p, "adapter_config.json", base="a/b"), "holds an adapter"),
    "vocabulary": (
        lambda p: (
            change(p, vocab_size=4),
            rewrite(p, **{k: torch.ones(4, 32) for k in ("lm_head.weight", EMBED)}),
        ),
        "the model knows 4: they do not belong together",
    ),
}
EMBED = "model.embed_tokens.weight"


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_refused_in_a_sentence(
    model: Path, tmp_path: Path, attn: Attn, what: str
) -> None:
    path = shutil.copytree(model, tmp_path / "model")
    breaks, message = BROKEN[what]
    breaks(path)
    code, out, err = attn("--model-path", path, PROMPT, "--max-new-tokens", 5)
    assert (code, out) == (2, "")
    assert message in err
    assert "internal error" not in err
    assert err.count("\n") == 1


def test_tensors_without_a_place_are_named(model: Path, tmp_path: Path, attn: Attn) -> None:
    path = shutil.copytree(model, tmp_path / "model")
    rewrite(path, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    code, out, err = attn("--model-path", path, PROMPT, "--max-new-tokens", 5)
    assert code == 0
    assert out.split("\n")[0] == expected_text(model, PROMPT, 5)
    assert "are not used: model.layers.0.self_attn.q_proj.bias" in err


def test_tied_weights_are_not_missing(model: Path, tmp_path: Path, attn: Attn) -> None:
    path = shutil.copytree(model, tmp_path / "model")
    rewrite(path, "lm_head.weight")
    change(path, tie_word_embeddings=True)
    code, out, err = attn("--model-path", path, PROMPT, "--max-new-tokens", 5)
    assert (code, err) == (0, "")
    assert out.split("\n")[0] == expected_text(path, PROMPT, 5)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "computes for more than 1 seconds",
        ),
        (
            "{% set n = namespace(x='aaaaaaaa') %}"
            "{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
            "takes more than 64 MiB of memory",
        ),
        ("{{ 'a' * 3000000 }}", "makes 3000000 characters out of one message"),
        ("{% for", "TemplateSyntaxError"),
    ],
    ids=["loop", "growth", "length", "syntax"],
)
def test_a_chat_template_ends(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    template: str,
    message: str,
) -> None:
    if request.node.callspec.id == "loop":  # the others must not meet this limit first
        monkeypatch.setattr(chat_module, "SECONDS", 1)
    monkeypatch.setattr(chat_module, "MEMORY", 1 << 26)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    with pytest.raises(UsageError, match=f"the chat template fails: .*{message}.*leave out --chat"):
        encode(tokenizer, PROMPT, chat=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"\xff\xfe", "no text: 'utf-8' codec"),
        (b"a\0b", "NUL characters"),
        (b"", "the prompt is empty"),
        (b"w1 " * 9, "more than 20 characters"),
    ],
)
def test_standard_input_that_is_no_prompt(
    attn: Attn, monkeypatch: pytest.MonkeyPatch, model: Path, given: bytes, message: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
    monkeypatch.setattr(generate_module, "_LONGEST", 20)
    code, out, err = attn("--model-path", model, "-")
    assert (code, out) == (2, "")
    assert message in err


def test_nothing_is_loaded_for_a_bad_prompt(
    model: Path, attn: Attn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "load_weights", None)
    for args in (["w1\udc80"], ["w1", "--max-new-tokens", 10**9], ["w1", "--num-pages", 10**15]):
        code, out, err = attn("--model-path", model, *args)
        assert (code, out) == (2, "")
        assert "internal error" not in err
    code, _, err = attn("--model-path", model, "w5 " * 5000)
    assert code == 1
    assert "a prompt of 5000 tokens for a context of 4096" in err


@pytest.mark.parametrize(
    ("error", "message"),
    [(PermissionError(13, "Permission denied"), "Permission denied"), (None, "File name too long")],
)
def test_a_path_that_cannot_be_read(
    attn: Attn, monkeypatch: pytest.MonkeyPatch, error: OSError | None, message: str
) -> None:
    path = Path("x" * 5000)
    if error is not None:  # the tests may run as root, who may enter any directory
        path, stat = Path("/closed/model"), os.stat

        def refuse(place: Any, *args: Any, **kwargs: Any) -> Any:
            if str(place).startswith("/closed"):
                raise error
            return stat(place, *args, **kwargs)

        monkeypatch.setattr(os, "stat", refuse)
    code, out, err = attn("--model-path", path, PROMPT)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err) < 400


def test_memory_that_is_short_ends_the_text_and_keeps_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attn_core.integrations.transformers.paged_cache._SLACK", 4)
    text, pieces = load(model, page_size=4), []
    prompt = encode(text.tokenizer, PROMPT, chat=False)

    def short(*args: Any) -> torch.Tensor:
        if len(pieces) > 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return zeros(*args)

    with monkeypatch.context() as patched:
        patched.setattr("attn_core.cache.pool.zeros", short)
        with pytest.raises(OutOfPagesError, match="does not fit on cpu"):
            list(generate(text, prompt, pieces.append, max_new_tokens=60))
    assert len(pieces) > 3
    assert expected_text(model, PROMPT, 60).startswith("".join(pieces))


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
