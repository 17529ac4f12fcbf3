"""Contestants that note in a folder who was called with which case, from any process."""

import pathlib
import threading
import time

from benchmarks.contestant import Contestant


def make(folder, names):
    """Return contestants of these names, with commas; the last one fails when it is called.

    One that is called "staying" leaves a thread that holds its process at its end for a minute.
    """
    names = names.split(",")
    return [_contestant(pathlib.Path(folder), n, fails=n == names[-1]) for n in names]


def _contestant(folder, name, *, fails):
    def prepare(inputs):
        def call():
            (folder / f"{name} {inputs.case.name.replace('/', '-')}").touch()
            if name == "staying":
                threading.Thread(target=time.sleep, args=(60,)).start()
            if fails:
                raise RuntimeError("no such kernel")
            return inputs.q

        return call

    phases, module = frozenset({"decode", "verify"}), "torch" if name == "each" else "math"
    return Contestant(name=name, distribution="x", module=module, phases=phases, prepare=prepare)
