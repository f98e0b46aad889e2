"""Real signals at random instants of a public entry point, and what each leaves. Run as a process of its own.

`python tests/interrupted.py SIGNALS SEED ENTRY...` prints a JSON object for each entry point: how many signals were
handled within the call, after how many something was left, after how many still so once the next call of fpsim had
begun, and examples.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from leftovers import ENTRIES, FOR_GOOD, Net, X, left_on, model_for
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import ada_loss
import fpsim

# What these have changed in a model is put back.
PUT_BACK = ("why", "diagnose", "watch of", "compare", "sensitivity", "quantize")


def interrupted(entry: str, model: Any, delay: float) -> str:
    """Run an entry point, with a signal after `delay` seconds. Returns where it was handled; "" if after the call."""
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        ENTRIES[entry][0](model)
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt as error:
        frames = traceback.extract_tb(error.__traceback__)[-4:]
        return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    except Exception:
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise
    return ""


def forget_hooks() -> None:
    """Take off the hooks that were left on all optimizers."""
    for hooks in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
        for key in [key for key, hook in hooks.items() if hook not in FOR_GOOD]:
            del hooks[key]


def duration_of(entry: str) -> float:
    times = []
    for _ in range(5):
        model, before = model_for(entry), time.perf_counter()
        ENTRIES[entry][0](model)
        times.append(time.perf_counter() - before)
    return min(times)


def main(entry: str, signals: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    draw, counts, kinds = random.Random(seed), Counter[str](), Counter[str]()
    duration, model = duration_of(entry), model_for(entry)
    following = fpsim.quantize(Net(), "fp16")
    before = {name: x.clone() for name, x in model.state_dict().items()}
    while counts["signals"] < signals:
        try:
            came = interrupted(entry, model, draw.uniform(1e-6, 1.1 * duration))
        except KeyboardInterrupt:  # in the last line of the call's except
            came = "here"
        if not came:
            continue
        counts["signals"] += 1
        changed = [n for n, x in model.state_dict().items() if not torch.equal(x, before[n])]
        found = left_on(model) + [f"{name} is changed" for name in changed]
        if any(True for _ in fpsim.models.installed.emulated_forwards(model)) is not ENTRIES[entry][1]:
            found.append("a model that is quantised, or no longer")
        if entry.startswith(PUT_BACK) and any(p.grad is not None for p in model.parameters()):
            found.append("a gradient")
        if found:
            counts["left"] += 1
            kinds[f"{'; '.join(sorted({*found}))} after {came}"] += 1
            try:
                following(X)
                fpsim.watch(Net()).detach()
                if entry == "scaled":  # interrupted between its construction and its block
                    ada_loss.AdaLossScaled(model).detach()
                still = left_on(model)
            except RuntimeError as error:  # of torch, whose stack is in disorder
                still = [str(error)]
            counts["still left"] += bool(still)
            while torch.overrides._get_current_function_mode_stack():
                torch.overrides._pop_mode()
            fpsim.emulation.scope.active.emulation = None
            forget_hooks()
            fpsim.tensors.noise._inside.clear()
            fpsim.tensors.noise._here.streams.clear()
            torch.set_grad_enabled(True)
            model = model_for(entry)
    return {"entry": entry, **{n: counts[n] for n in ("signals", "left", "still left")}, "kinds": kinds.most_common(8)}


if __name__ == "__main__":
    for name in sys.argv[3:]:
        print(json.dumps(main(name, int(sys.argv[1]), int(sys.argv[2]))), flush=True)
