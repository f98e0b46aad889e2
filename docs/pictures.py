"""Each picture of docs/, with the command that draws it again.

    python docs/pictures.py                                    # lists them
    python docs/pictures.py operands.png --sweep runs/operands  # from a sweep that `ada-loss sweep operands` has run
    python docs/pictures.py diagnose-watch.png                  # from the examples of docs/diagnose.md, all five

`--out` names another folder than docs/.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tests"))

import ada_loss  # noqa: E402
from ada_loss.files import write_atomically  # noqa: E402
from ada_loss.lab.results.figures import figure_bytes  # noqa: E402
from ada_loss.lab.studies.classics import CLASSICS  # noqa: E402
from fpsim.insight.pictures import BLUE, GREEN, RED, new_picture  # noqa: E402

DIAGNOSE = tuple(f"diagnose-{name}.png" for name in ("watch", "fp16", "fp8", "compare", "sensitivity"))  # as they come
SWEEPS: dict[str, tuple[str, Callable[[ada_loss.Results], Any]]] = {
    "operands.png": ("operands", lambda results: results.plot()),
    "digits.png": ("digits", lambda results: results.plot()),
    "underflow.png": ("formats", lambda results: results.plot_underflow()),
}
ENGINES = ("bf16 / bf16", "fp16 / fp16", "bf16 / FP8", "bf16 / FP4")  # trainer / rollouts, as rl.yaml names them
WEIGHTS = {"": "no weights", ", weights": "weights", ", truncated": "weights, cut off at 2"}
POINTS = 8  # of a curve of rl.png


def rewards(results: ada_loss.Results) -> Any:
    """The reward of what was sampled over the steps, mean over the seeds: a panel for each pair of engines.

    A dot behind the last step is the reward that the trainer's own policy is expected to have on the sums of the test.
    """
    found = {curve.settings["format"]: curve for curve in results.curves("sampled_reward", points=POINTS)}
    tested = results.to_frame().groupby("format")["reward"].mean()
    picture = new_picture(9.6, 3.4)
    panels = picture.subplots(1, len(ENGINES), sharey=True)
    for axes, engines in zip(panels, ENGINES, strict=True):
        lines = {"float32 / float32": "fp32", **{words: engines + weights for weights, words in WEIGHTS.items()}}
        for i, (words, name) in enumerate(lines.items()):
            if name in found:
                steps, ink = found[name].steps, ("k", BLUE, RED, GREEN)[i]
                axes.plot(steps, found[name].mean, (":", "-", "--", "-.")[i], color=ink, linewidth=1.3, label=words)
                axes.plot(1.15 * steps[-1], tested[name], "osD^"[i], color=ink, markersize=5, label=f"_{words}, tested")
        axes.set_title(engines, fontsize=9)
        axes.set_xlabel("step; dots: the trainer, tested", fontsize=8)
        axes.grid(axis="y", linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("reward of samples")
    named = [line for line in panels[-1].lines if not line.get_label().startswith("_")]
    panels[0].legend(handles=named, fontsize=7, frameon=False, loc="lower center")
    return picture


COMMANDS = {
    **{
        name: f"ada-loss sweep {sweep} && python docs/pictures.py {name} --sweep runs/{sweep}"
        for name, (sweep, _) in SWEEPS.items()
    },
    **dict.fromkeys(DIAGNOSE, "python docs/pictures.py diagnose-watch.png"),
    "depth.png": "python benchmarks/depth.py --out docs",
    "rl.png": "ada-loss sweep rl && python docs/pictures.py rl.png --sweep runs/rl",
    "updates.png": "python benchmarks/updates.py --rate 3e-4 --figure docs/updates.png",
    **{
        f"classics-{name}.png": f"ada-loss reproduce {name} && cp runs/classics/{name}.png docs/classics-{name}.png"
        for name in CLASSICS
    },
    "report.png": "ada-loss sweep operands && chromium --headless --no-sandbox --hide-scrollbars "
    '--window-size=1280,960 --screenshot=docs/report.png "file://$PWD/runs/operands/report.html"',
}


def figures_of(page: Path) -> list[Any]:
    """What `.plot()` draws in the examples of a page, in their order."""
    from readme_blocks import examples

    figures: list[Any] = []
    for code, _ in examples(page):
        drawn, count = re.subn(r"^(\w+\.plot\([^#\n]*\))", r"FIGURES.append(\1)", code, flags=re.MULTILINE)
        if count:
            exec(compile(drawn, str(page), "exec"), {"FIGURES": figures, "__name__": "__main__"})
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Draw a picture of docs/ again.")
    parser.add_argument("name", nargs="?", choices=sorted(COMMANDS))
    parser.add_argument("--sweep", type=Path, help="the folder of the sweep")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    asked = parser.parse_args(arguments)
    if asked.name is None:
        for name, command in COMMANDS.items():
            print(f"{name}: {command}")
        return 0
    if asked.name in SWEEPS and asked.sweep is not None:
        drawn = {asked.name: SWEEPS[asked.name][1](ada_loss.Results(asked.sweep))}
    elif asked.name == "rl.png" and asked.sweep is not None:
        drawn = {asked.name: rewards(ada_loss.Results(asked.sweep))}
    elif asked.name in DIAGNOSE:
        drawn = dict(zip(DIAGNOSE, figures_of(ROOT / "docs" / "diagnose.md"), strict=True))
    else:
        print(f"{asked.name} is drawn by: {COMMANDS[asked.name]}", file=sys.stderr)
        return 2
    for name, figure in drawn.items():
        write_atomically(asked.out / name, figure_bytes(figure))
        print(asked.out / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
