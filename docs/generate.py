"""Regenerate the generated pages; --check only compares (exit code 1: a page is stale)."""

from __future__ import annotations

import inspect
import pathlib
import re
import sys
import types
from typing import Any, get_args, get_origin, get_type_hints

import matrix_page
from attn_core.cli.app import build_app
from attn_core.plugins.registry import load_plugins
from attn_core.tools.matrix import build_matrix

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks is no distribution
MARK = re.compile(r"(<!-- matrix:begin -->\n).*?(<!-- matrix:end -->)", re.S)
STEPS = re.compile(r"(<!-- steps:begin -->\n).*?(<!-- steps:end -->)", re.S)
LOGPROBS = re.compile(r"(<!-- logprobs:begin -->\n).*?(<!-- logprobs:end -->)", re.S)
DEMO = re.compile(r"(<!-- demo:begin -->.*?```\n).*?(```\n<!-- demo:end -->)", re.S)


def pages() -> dict[pathlib.Path, str]:
    """Return the text that every generated page should have."""
    registry = load_plugins()
    if registry.broken:  # pages without its backends would look complete
        raise SystemExit("\n".join(f"{b.name}: {b.error}" for b in registry.broken))
    from benchmarks.engines import table

    readme, sglang = ROOT / "README.md", ROOT / "docs/how-to/sglang.md"
    vllm, gpus = ROOT / "docs/how-to/vllm.md", ROOT / "docs/how-to/many-gpus.md"
    timed, of_vllm = table.load_all(), table.load_all(engine="vllm")
    plot = table.plot(timed)
    printed = (ROOT / "benchmarks/results/demo.txt").read_text()
    kinds = matrix_page.short(build_matrix(registry, ("mha", "mla", "gdn")))
    return {
        ROOT / "docs/reference/support-matrix.md": matrix_page.page(build_matrix(registry)),
        ROOT / "docs/reference/cli.md": cli(),
        **performance_pages(),
        **({ROOT / table.PLOT: plot} if plot else {}),
        sglang: within(STEPS, sglang.read_text(), table.page(timed)),
        vllm: within(STEPS, vllm.read_text(), table.page(of_vllm)),
        gpus: within(
            LOGPROBS,
            within(STEPS, gpus.read_text(), table.over_gpus([*timed, *of_vllm])),
            table.logprobs(),
        ),
        readme: within(
            STEPS,
            within(DEMO, within(MARK, readme.read_text(), kinds), printed),
            table.readme(timed),
        ),
    }


def within(marks: re.Pattern[str], text: str, generated: str) -> str:
    """Return a text with what is generated between its marks."""
    return marks.sub(lambda m: m[1] + generated + m[2], text)


def performance_pages() -> dict[pathlib.Path, str]:
    """Return the pages of recorded measurements: the performance page and the home page's plot."""
    from benchmarks import tables

    return tables.pages()


def cli() -> str:
    """Document every command with its arguments and options, as the application declares them."""
    parts = [
        "# The `attn` command\n\n`python docs/generate.py` generates this page from the "
        "application. Every command takes\n`--help`, and `--debug` for tracebacks. Exit codes: 0 "
        "success, 1 an error or a problem,\n2 a usage error, 3 no backend fits. If an option is "
        "not given, its variable is read.\n\n"
        'With `--json`, an error is one object on standard output, `{"error": "…"}`, beside the '
        "text on\nstandard error. Where no backend fits, `attn select` prints its own object.\n"
    ]
    for command in build_app().registered_commands:
        assert command.callback is not None
        hints = get_type_hints(command.callback, include_extras=True)
        options, usage = [], [f"attn {command.name}"]
        for parameter in inspect.signature(command.callback).parameters.values():
            annotation = hints.get(parameter.name, parameter.annotation)
            kind, info = get_args(annotation)[0], get_args(annotation)[1]
            if type(info).__name__ == "ArgumentInfo":
                name = f"`{info.metavar}`"
                default = "required" if parameter.default is inspect.Parameter.empty else ""
                usage.append(info.metavar if default else f"[{info.metavar}]")
            else:
                name, default = _option(parameter, kind, info)
            if default == "required" and name.startswith("`--"):
                usage.append(name.split("`")[1])
            variable = f"`{info.envvar}`" if info.envvar else ""
            options.append([name, variable, default, info.help])
        table = "\n".join(f"| {' | '.join(line)} |" for line in [
            ["option", "variable", "default", "meaning"], ["---"] * 4, *options
        ])  # fmt: skip
        text = inspect.getdoc(command.callback) or ""
        head = f"## attn {command.name}\n\n{text}\n\n```text\n{' '.join(usage)} [OPTIONS]\n```\n"
        parts.append(f"{head}\n{table}\n")
    return "\n".join(parts)


def _option(parameter: inspect.Parameter, kind: Any, info: Any) -> tuple[str, str]:
    """Return an option's names, each with its value's type, and its default."""
    given = info.default if isinstance(info.default, str) else ""  # typer keeps the first name here
    names = [n for n in (given, *(info.param_decls or ())) if n.startswith("--")]
    names = names or ["--" + parameter.name.replace("_", "-")]
    inner = [t for t in get_args(kind) if t is not types.NoneType] if get_args(kind) else [kind]
    plain = inner[0] if get_origin(kind) is not list else kind
    takes = {bool: "", int: " INT", float: " FLOAT", pathlib.Path: " PATH"}.get(plain, " TEXT")
    shown = ", ".join(f"`{n}{takes}`" for n in names)
    if parameter.default is inspect.Parameter.empty:
        return shown, "required"
    return shown, "" if parameter.default in (None, False) else f"`{parameter.default}`"


def main() -> int:
    stale = [p for p, text in pages().items() if not p.exists() or p.read_text() != text]
    for path in stale:
        print(f"{'stale' if '--check' in sys.argv else 'written'}: {path.relative_to(ROOT)}")
        if "--check" not in sys.argv:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(pages()[path])
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
