"""Write the data of the explorer page: what select() answers for models, devices and profiles.

`python docs/explorer.py` writes docs/site/explorer/data.js; `--check` only compares. The page is
plain files: it opens without a server and without a network.
"""

from __future__ import annotations

import functools
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import attn_core
from attn_core.costs.model import CostModel
from attn_core.costs.profile import Profile
from attn_core.costs.shapes import Pass, forms, row_key
from attn_core.costs.workload import Workload
from attn_core.errors import AttnError
from attn_core.model_config import read_config, requirements_from_config
from attn_core.plugins.dependencies import Libraries, alternatives
from attn_core.plugins.registry import Registry, load_plugins
from attn_core.selection.ranking import shipped_profile
from attn_core.selection.result import NoBackendError, Selection, Verdict, label, notes_of
from attn_core.selection.solver import select
from attn_core.spec.device import GPUS, parse_device
from attn_core.spec.kinds import LINEAR_KINDS, Phase
from attn_core.spec.requirements import LayerRequirements, Requirements

ROOT = pathlib.Path(__file__).parent.parent
CONFIGS = ROOT / "tests" / "data" / "configs"
DATA = ROOT / "docs" / "site" / "explorer" / "data.js"
DEVICES = {
    "h200": "NVIDIA H200",
    "h100": "NVIDIA H100",
    "cuda:sm80": "NVIDIA sm80 (A100)",
    "cuda:sm89": "NVIDIA sm89 (L40S, RTX 4090)",
    "cuda:sm90": "NVIDIA sm90 (H100, H200)",
    "cuda:sm100": "NVIDIA sm100 (B200)",
    "cuda:sm120": "NVIDIA sm120 (RTX 5090)",
    "rocm:gfx942": "AMD gfx942 (MI300X)",
    "rocm:gfx950": "AMD gfx950 (MI355X)",
    "npu:910b": "Ascend 910B",
    "xpu:bmg": "Intel Battlemage",
    "cpu:amx": "CPU with AMX",
    "cpu:avx512": "CPU with AVX-512",
}
SHIPPED, PRIORITIES = "shipped", "priorities"
BATCHES, LENGTHS = (1, 4, 16, 64, 256), tuple(1 << i for i in range(7, 18))
BLOCK = 16  # vLLM's blocks hold a multiple of it


@functools.cache
def models() -> dict[str, tuple[dict[str, Any], Requirements]]:
    """Return the config and the requirements of every model that the tests know, by name."""
    found = {}
    for path in sorted(CONFIGS.glob("*.json")):
        config = read_config(path)
        found[path.stem] = config, requirements_from_config(config)
    return found


def profiles(device: str) -> dict[str, Profile | None]:
    """Return the profiles of a device as select() takes them; only a named GPU has a shipped one.

    An architecture has the order of priorities alone.
    """
    return {SHIPPED: None, PRIORITIES: Profile()} if device in GPUS else {PRIORITIES: Profile()}


def libraries(registry: Registry) -> Libraries:
    """Return every library, of a version that is new enough."""
    return {wanted.name: None for group in registry.requires() for wanted in alternatives(group)}


def ask(name: str, device: str, profile: str, registry: Registry) -> tuple[Selection, str]:
    """Return select()'s answer, and its error where no backend fits."""
    needs, known = models()[name][1], profiles(device)[profile]
    where = parse_device(device)
    try:
        chosen = select(
            needs, where, registry, libraries(registry), None, known, simulated=True, advise=False
        )
    except NoBackendError as error:
        return error.selection, str(error)
    except AttnError as error:
        return Selection(requirements=needs, device=where), str(error)
    return chosen, ""


class Once:
    """Every sentence, and every verdict, once: the answers have its number."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.verdicts: dict[tuple[Any, ...], int] = {}

    def __call__(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))

    def verdict(self, v: Verdict) -> int:
        """Keep backend, phase, whether it fits, why, and what it is expected to cost."""
        linear = "linear " if v.spec.family == "linear" else ""
        why = "; ".join(map(str, v.reasons)) or f"priority {v.row.priority}"
        shown = (v.spec.name, linear + v.phase.value, int(v.fits), self(why))
        if (x := v.expected) is not None:
            shown += tuple(map(_digits, (x.us, x.low, x.high, x.covered)))
        return self.verdicts.setdefault(shown, len(self.verdicts))


def answer(name: str, device: str, profile: str, registry: Registry, text: Once) -> dict[str, Any]:
    """Return one answer as the page's data; sentences are numbers of `text`."""
    chosen, error = ask(name, device, profile, registry)
    roles = {label(role): [c.backend, text(c.reason)] for role, c in chosen.roles.items()}
    found: dict[str, Any] = {"roles": roles, "others": [text.verdict(v) for v in chosen.verdicts]}
    if error:
        return found | {"error": text(error)}
    if chosen.page_size is not None:
        found["page"] = [chosen.page_size, text(chosen.page_size_reason)]
        found["cache"] = f"{chosen.kv_cache_dtype}, layout {chosen.layout}"
    said = [notes_of(chosen), *chosen.assumptions, *chosen.conflicts]
    found["notes"] = [text(sentence) for sentence in said if sentence]
    found["commands"] = [
        [engine, text(line), text(why)]
        for engine, line, why in commands(name, device, profile, chosen)
    ]
    return found


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def commands(
    name: str, device: str, profile: str, chosen: Selection
) -> Iterator[tuple[str, str, str]]:
    """Yield the engine, its command, and a remark; without a command it says why."""
    inside = ""
    for role, variable in (("prefill", "PREFILL"), ("decode", "DECODE")):
        if backend := chosen.backend(role):  # type: ignore[arg-type]  # both are roles
            inside += f"ATTN_{variable}_ATTENTION_BACKEND={backend} "
    page = chosen.page_size or 1
    sglang = f"{inside}python -m sglang.launch_server --model-path MODEL"
    sglang += f" --attention-backend attn_core --page-size {page}"
    layers = chosen.requirements.layers
    if any(x.kind == "dsa" for x in layers):
        sglang += " --kv-cache-dtype bfloat16"
    if any(x.kind == "dsa" or x.dual_chunk for x in layers):
        sglang += " --cuda-graph-backend-prefill disabled"
    if any(x.dual_chunk and x.dual_chunk.sparse_threshold is not None for x in layers):
        sglang += " --disable-radix-cache --chunked-prefill-size -1"
    vllm = f"{inside}vllm serve MODEL --attention-backend CUSTOM"
    vllm += f" --block-size {page}" if page > BLOCK and not page % BLOCK else ""
    if any(x.kind == "mla" for x in layers):  # else prefill stays vLLM's own
        vllm += """ --attention-config '{"mla_prefill_backend": "CUSTOM"}'"""
    for engine, line in (("SGLang", sglang), ("vLLM", vllm)):
        why = unserved(engine, models()[name][0], chosen)
        if engine == "vLLM" and not why and page % BLOCK:
            remark = f"vLLM's blocks hold {BLOCK} tokens or a multiple, not {page}"
            yield engine, line, remark
        else:
            yield engine, "" if why else line, why
    own = f"attn select --model MODEL --device {device} --assume-installed all"
    yield "attn", own + (" --profile none" if profile == PRIORITIES else ""), ""


def unserved(engine: str, config: dict[str, Any], chosen: Selection) -> str:
    """Say why attn-core inside an engine does not serve this model, by the how-to pages, or ""."""
    layers, where = chosen.requirements.layers, chosen.device.type
    if where != "cuda" and not (engine == "SGLang" and where == "cpu"):
        return f"attn-core was not tried inside {engine} on {where}"
    text = json.dumps(config)
    if "attention_chunk_size" in text:
        return "chunked local attention is refused at the start"
    if "relative_attention" in text:
        return "a relative position bias is added to the scores, which no backend does"
    if "jet" in str(config.get("model_type")):
        return f"layers of Jet-Nemotron stay {engine}'s own"
    if engine == "SGLang":
        return ""
    if any(x.encoder or x.cross for x in layers):
        return "encoders and cross attention are refused at the start"
    if any(x.kind == "dsa" for x in layers):
        return "sparse MLA is refused at the start"
    if any(x.dual_chunk for x in layers):
        return "attn-core serves dual chunk attention in transformers and SGLang alone"
    if any(x.kind in LINEAR_KINDS for x in layers):
        return "models with linear layers were not tried"
    return ""


def surfaces(registry: Registry) -> list[dict[str, Any]]:
    """Return what passes cost by requests and length, where a shipped profile has an estimate.

    One entry for each device, distinct form of layers and phase; times: backend → requests → µs
    and its bounds for every length, None where nothing was measured near.
    """
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for device in GPUS:
        where = parse_device(device)
        model = CostModel(shipped_profile(where, registry, libraries(registry))[0])
        for name in models():
            chosen, _ = ask(name, device, SHIPPED, registry)
            layers = forms(chosen.requirements, chosen.page_size)
            for layer, phase in ((x, p) for x in layers for p in (Phase.PREFILL, Phase.DECODE)):
                key = device, str(layer), phase.value
                if key not in found:
                    times = dict(_times(model, chosen, layer, phase))
                    found[key] = {"models": [], "times": times}
                if name not in found[key]["models"]:
                    found[key]["models"].append(name)
    return [
        {"device": device, "layer": layer, "phase": phase, **entry}
        for (device, layer, phase), entry in found.items()
        if entry["times"]
    ]


def _times(
    model: CostModel, chosen: Selection, layer: Any, phase: Phase
) -> Iterator[tuple[str, dict[int, list[Any]]]]:
    for v in (v for v in chosen.verdicts if v.fits and v.phase is phase):
        graphs = phase is Phase.DECODE and v.row.cuda_graph != "never"
        lines = {}
        for n in BATCHES:
            line = []
            for length in LENGTHS:
                queries = length if phase is Phase.PREFILL else 1
                size = Pass.even(phase.value, n, length, queries)  # type: ignore[arg-type]
                x = model.estimate(v.spec.name, row_key(v.row), layer, size, graphs=graphs)
                line.append(None if x is None else [_digits(us) for us in x[:3]])
            if any(line):
                lines[n] = line
        if lines:
            yield v.spec.name, lines


def data(registry: Registry) -> dict[str, Any]:
    """Return all that the page knows."""
    text = Once()
    answers = {
        f"{name}|{device}|{profile}": answer(name, device, profile, registry, text)
        for name in models()
        for device in DEVICES
        for profile in profiles(device)
    }
    workload = Workload()
    return {
        "version": attn_core.__version__,
        "models": {name: describe(needs) for name, (_, needs) in models().items()},
        "devices": {d: {"label": DEVICES[d], "profiles": [*profiles(d)]} for d in DEVICES},
        "workload": {"prompts": workload.prompts, "requests": workload.requests,
                     "output": workload.output},
        "lengths": LENGTHS,
        "answers": answers,
        "surfaces": surfaces(registry),
        "verdicts": list(text.verdicts),
        "texts": list(text.texts),
    }  # fmt: skip


def describe(needs: Requirements) -> str:
    """Say what layers a model has: "mha, 32/8 heads of 128"."""
    return "; ".join(dict.fromkeys(map(_layer, needs.layers)))


def _layer(x: LayerRequirements) -> str:
    parts = [x.kind, *(["encoder"] * x.encoder), *(["cross"] * x.cross)]
    parts += ["dual chunk"] if x.dual_chunk else []
    if x.head_dim is not None:
        parts.append(f"{x.num_q_heads}/{x.num_kv_heads} heads of {x.head_dim}")
    parts += [f"window {x.sliding_window}"] if x.sliding_window else []
    return ", ".join(parts)


def script(found: dict[str, Any]) -> str:
    """Return the data as a script, which a page that was opened as a file may load."""
    text = json.dumps(found, separators=(",", ":"), ensure_ascii=False)
    text = text.replace("</", "<\\/").replace('},"', '},\n"')  # a line each, for diffs
    return f"window.EXPLORER = {text};\n"


def main() -> int:
    registry = load_plugins()
    if registry.broken:  # a page without its backends would look complete
        raise SystemExit("\n".join(f"{b.name}: {b.error}" for b in registry.broken))
    text = script(data(registry))
    if "--check" in sys.argv:
        same = DATA.exists() and DATA.read_text() == text
        print(f"{DATA.relative_to(ROOT)} is {'up to date' if same else 'stale'}")
        return 0 if same else 1
    DATA.write_text(text)
    print(f"wrote {DATA.relative_to(ROOT)}: {len(text) / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
