"""Time one generate() of a model, in this process or in one that runs an earlier commit.

`Earlier` starts a process over the packages of an earlier commit, which imports nothing of this
commit but this module. So nothing here may import what the earlier one lacks.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from attn_core.integrations.transformers import enable
from attn_core.selection.result import Overrides
from torch import Tensor
from transformers import AutoModelForCausalLM

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LINEAR = "intel_amx, linear layers too"  # as `attn generate` runs a model
ROOT = pathlib.Path(__file__).parent.parent


def read_model(path: pathlib.Path, dtype: torch.dtype) -> Any:
    """Load the weights of a GGUF file or of a model's folder, outside of inference mode.

    torch's bf16 products of many rows with weights that were made inside take seven times as long.
    """
    folder, files = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with torch.inference_mode(False):
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, attn_implementation="sdpa", **files
        ).eval()


class Stamps:
    """A stopping criterion that never stops, and notes when each token is there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@contextlib.contextmanager
def attending(model: Any, name: str) -> Iterator[None]:
    """Let the model attend by a backend of ours, or by transformers' own sdpa."""
    if name == "sdpa":
        yield
        return
    with contextlib.ExitStack() as stack:
        flags = Overrides(attention_backend=name.partition(",")[0])
        engine = stack.enter_context(enable(model, overrides=flags))
        if name == LINEAR:
            from attn_core.integrations.transformers import few_rows

            changed = few_rows.speed_up_linear(model, engine.dispatcher.backend("decode"))
            stack.callback(few_rows.slow_down_linear, changed)
        yield


def generate(model: Any, ids: Tensor, mask: Tensor, new: int) -> tuple[float, float, Tensor]:
    """Return the seconds of the prompt and of the steps after it, and the new tokens [B, new]."""
    stamps, start = Stamps(), time.perf_counter()
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None,
        pad_token_id=0, stopping_criteria=[stamps],
    )  # fmt: skip
    times = stamps.times
    return times[0] - start, times[-1] - times[0], out[:, ids.shape[1] :]


class Earlier:
    """A backend of an earlier commit, in a process with a copy of the weights.

    folder: a checkout of that commit. Between calls the process waits, without using a core.
    """

    def __init__(self, folder: pathlib.Path, model: pathlib.Path, dtype: str, name: str) -> None:
        paths = sorted(folder.resolve().glob("packages/*/src"))
        command = ["git", "-C", str(folder), "rev-parse", "--short", "HEAD"]
        self.commit = subprocess.run(command, capture_output=True, text=True).stdout.strip()
        if not paths or not self.commit:
            raise SystemExit(
                f"generate_cpu: {folder} is no checkout of this repository; make one with "
                "`git clone . FOLDER && git -C FOLDER checkout COMMIT`"
            )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.generate_calls", str(model), dtype, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))},
        )
        imported = pathlib.Path(self._answer()["attn_core"])
        if not any(imported.is_relative_to(path) for path in paths):
            raise SystemExit(f"generate_cpu: the process imported {imported}, not {folder}")

    def __enter__(self) -> Earlier:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def __call__(self, ids: Tensor, mask: Tensor, new: int) -> tuple[float, float, Tensor]:
        """Return what `generate` does."""
        assert self._process.stdin is not None
        requested = {"ids": ids.tolist(), "mask": mask.tolist(), "new": new}
        self._process.stdin.write(json.dumps(requested) + "\n")
        self._process.stdin.flush()
        message = self._answer()
        return message["prompt_s"], message["steps_s"], torch.tensor(message["tokens"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("generate_cpu: the process of the earlier commit ended; see above")
        message: dict[str, Any] = json.loads(line)
        return message


def main() -> None:
    """Answer the calls of an `Earlier`: one line of JSON in, one out."""
    import attn_core

    answers, sys.stdout = sys.stdout, sys.stderr
    path, dtype, name = sys.argv[1:]
    model = read_model(pathlib.Path(path), DTYPES[dtype])
    print(json.dumps({"attn_core": attn_core.__file__}), file=answers, flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            requested = json.loads(line)
            ids, mask = torch.tensor(requested["ids"]), torch.tensor(requested["mask"])
            with attending(model, name):
                first, rest, tokens = generate(model, ids, mask, requested["new"])
            message = {"prompt_s": first, "steps_s": rest, "tokens": tokens.tolist()}
            print(json.dumps(message), file=answers, flush=True)


if __name__ == "__main__":
    main()
