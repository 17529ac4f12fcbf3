"""The explorer page has every answer, each is select()'s own, and it needs nothing else."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import random
import re
import shutil
import subprocess

import pytest
from attn_core.plugins.registry import load_plugins

ROOT = pathlib.Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "site" / "explorer"
SAMPLE = 12
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def explorer():
    spec = importlib.util.spec_from_file_location("explorer", ROOT / "docs" / "explorer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data():
    text = (FOLDER / "data.js").read_text()
    head = "window.EXPLORER = "
    assert text.startswith(head)
    return json.loads(text.removeprefix(head).rstrip().removesuffix(";"))


def read(answer, texts, verdicts):
    """Return an answer with its sentences in place of their numbers."""
    shown = dict(answer)
    shown["others"] = [
        (*v[:3], texts[v[3]], *v[4:]) for v in map(verdicts.__getitem__, shown["others"])
    ]
    shown["roles"] = {role: (name, texts[why]) for role, (name, why) in shown["roles"].items()}
    shown["notes"] = [texts[n] for n in shown.get("notes", ())]
    shown["commands"] = [(e, texts[a], texts[b]) for e, a, b in shown.get("commands", ())]
    if "page" in shown:
        shown["page"] = (shown["page"][0], texts[shown["page"][1]])
    if "error" in shown:
        shown["error"] = texts[shown["error"]]
    return shown


def test_every_model_has_an_answer_on_every_device_with_every_profile(explorer, data):
    assert set(data["models"]) == {p.stem for p in explorer.CONFIGS.glob("*.json")}
    assert set(data["devices"]) == set(explorer.DEVICES)
    wanted = {
        f"{model}|{device}|{profile}"
        for model in data["models"]
        for device in explorer.DEVICES
        for profile in explorer.profiles(device)
    }
    assert set(data["answers"]) == wanted
    assert any("|shipped" in key for key in wanted)
    for key, answer in data["answers"].items():
        result = read(answer, data["texts"], data["verdicts"])
        assert result["roles"] or "error" in result or result["notes"], key
        assert len(result["others"]) > 1, key
    assert (FOLDER / "data.js").stat().st_size < 1_000_000


def test_answers_are_those_of_select(explorer, data):
    """A sample that changes with the data; the long test compares all."""
    registry = load_plugins()
    keys = sorted(data["answers"])
    sample = random.Random(len(data["texts"])).sample(keys, SAMPLE)
    for key in [*sample, "qwen3-8b|h200|shipped", "deepseek-v3|cuda:sm100|priorities"]:
        once = explorer.Once()
        now = explorer.answer(*key.split("|"), registry, once)
        now = read(json.loads(json.dumps(now)), list(once.texts), [list(v) for v in once.verdicts])
        there = read(data["answers"][key], data["texts"], data["verdicts"])
        assert now == there, f"{key}: run python docs/explorer.py"


@pytest.mark.long
def test_the_file_is_what_the_command_writes(explorer):
    text = explorer.script(explorer.data(load_plugins()))
    assert (FOLDER / "data.js").read_text() == text, "run python docs/explorer.py"


def test_costs_are_those_of_the_selection(explorer, data):
    """What the page shows of a measured model is what `attn select --explain-cost` adds up."""
    chosen, error = explorer.ask("qwen3-8b", "h200", explorer.SHIPPED, load_plugins())
    assert not error
    wanted = {(v.spec.name, v.phase.value): v.expected.us for v in chosen.verdicts if v.expected}
    shown = [data["verdicts"][n] for n in data["answers"]["qwen3-8b|h200|shipped"]["others"]]
    result = {(v[0], v[1]): v[4] for v in shown if len(v) > 4}
    assert result.keys() == wanted.keys()
    assert len(result) > 3
    assert all(result[key] == pytest.approx(us, rel=1e-3) for key, us in wanted.items())


def test_commands_name_what_was_selected(data):
    answer = read(data["answers"]["qwen3-8b|h200|shipped"], data["texts"], data["verdicts"])
    names = {role: name for role, (name, _) in answer["roles"].items()}
    inside = (
        f"ATTN_PREFILL_ATTENTION_BACKEND={names['prefill']} "
        f"ATTN_DECODE_ATTENTION_BACKEND={names['decode']}"
    )
    lines = {engine: line for engine, line, _ in answer["commands"]}
    assert lines["SGLang"] == (
        f"{inside} python -m sglang.launch_server --model-path MODEL "
        f"--attention-backend attn_core --page-size {answer['page'][0]}"
    )
    assert lines["vLLM"] == f"{inside} vllm serve MODEL --attention-backend CUSTOM"
    assert lines["attn"] == "attn select --model MODEL --device h200 --assume-installed all"


@pytest.mark.parametrize(
    ("key", "engine", "words"),
    [
        ("llama-4-scout|h200|priorities", "SGLang", "chunked local"),
        ("bert-base|h200|priorities", "vLLM", "encoders"),
        ("deepseek-v3.2|h200|priorities", "vLLM", "sparse MLA"),
        ("qwen3-8b|npu:910b|priorities", "vLLM", "not tried"),
        ("t5-base|h200|priorities", "SGLang", "position bias"),
    ],
)
def test_a_model_that_an_engine_refuses_has_no_command(data, key, engine, words):
    answer = read(data["answers"][key], data["texts"], data["verdicts"])
    ((line, why),) = [(a, b) for name, a, b in answer["commands"] if name == engine]
    assert line == ""
    assert words in why


def test_the_page_needs_no_network_and_no_inline_script():
    page = (FOLDER / "index.html").read_text()
    for name in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert name == "../index.html" or (FOLDER / name).is_file()
    for file in ("index.html", "explorer.js", "explorer.css"):
        text = (FOLDER / file).read_text()
        assert not re.search(r"https?://|\bfetch\(|\bimport\b|XMLHttpRequest|@import|url\(", text)


def test_the_logic_of_the_page():
    node = shutil.which("node") or shutil.which("nodejs")
    if node is None:
        pytest.skip("node is not installed; the data was compared with select()")
    script = pathlib.Path(__file__).with_name("explorer_test.js")
    done = subprocess.run([node, script, FOLDER], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("question", ["", "#model=deepseek-v3&device=cuda:sm100"])
def test_a_browser_shows_the_answer(question, data):
    """The DOM after the scripts ran, of the page opened as a file."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"no browser is installed ({', '.join(BROWSERS)})")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
    address = (FOLDER / "index.html").as_uri() + question
    done = subprocess.run(
        [browser, *options, "--dump-dom", address], capture_output=True, text=True, timeout=120
    )
    model = "deepseek-v3" if question else "qwen3-8b"
    assert f"<h2>{model} " in done.stdout, done.stderr
    key = f"{model}|cuda:sm100|priorities" if question else f"{model}|h200|shipped"
    for name, _ in data["answers"][key]["roles"].values():
        assert f"<b>{name}</b>" in done.stdout
    assert ("<svg " in done.stdout) == (not question)
