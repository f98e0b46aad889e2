"""Generated parts of pages: tables of formats, recipes and scalers, the reference, the command line.

    python docs/site_pages.py --write    write them into docs/*.md

A part stands between `<!-- generated: NAME -->` and `<!-- end of NAME -->`. On the site Sphinx reads docstrings in the
place of the reference, and a section of README stands at `<!-- README: HEADING -->`.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path

import reference
import rooms

import ada_loss
import fpsim
from ada_loss.lab.cells.cells import OPTIONS
from ada_loss.lab.tasks import TASKS
from ada_loss.lab.training.options import TrainOptions, possible
from ada_loss.rules.layer import LAYER_RULES
from ada_loss.rules.loss import SYSTEMS
from fpsim.formats.blocks import SCALE_RULES

HERE = Path(__file__).parent
ROOT = HERE.parent
MARK = re.compile(r"<!-- README: ([^>]+) -->")
PART = re.compile(r"<!-- generated: (\w+) -->\n(?:.*?\n)??<!-- end of \1 -->", re.DOTALL)


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    lines = [[*head]]
    lines += [["---"] * len(lines[0]), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def number(x: float) -> str:
    """A number as short as it is exact, or with four digits."""
    exact = f"{x:g}"
    return exact if float(exact) == x else f"{x:.4g}"


def float_formats() -> str:
    """The floating-point formats by name."""
    head = "name bits exponent mantissa bias".split()
    head += ["largest", "smallest normal", "smallest", "ulp at 1", "finite values", "special codes"]
    rows = []
    for name, fmt in fpsim.CATALOGUE.items():
        special = [
            word for word, has in (("inf", fmt.has_inf), ("NaN", fmt.has_nan), ("-0", fmt.has_negative_zero)) if has
        ]
        ends = (number(x) for x in (fmt.largest, fmt.smallest_normal, fmt.smallest))
        codes = (f"{fmt.finite_count:,}", ", ".join(special) or "none")
        size = (fmt.bits, fmt.exponent_bits, fmt.mantissa_bits, fmt.bias)
        rows.append((f"`{name}`", *size, *ends, number(fmt.epsilon), *codes))
    return table(head, rows)


def block_formats() -> str:
    """The formats whose numbers share scales, by name."""
    head = ["name", "element", "numbers that share a scale", "scale", "rule of the scale", "bits per value"]
    return table(
        head,
        (
            (f"`{name}`", f"`{fmt.element}`", fmt.block, f"`{fmt.scale}`", fmt.scale_rule, number(fmt.bits_per_value))
            for name, fmt in fpsim.BLOCKS.items()
        ),
    )


def scale_rules() -> str:
    """The rules by which scales follow from the largest magnitude of a block."""
    return table(["rule", "scale"], ((f"`{name}`", formula) for name, formula in SCALE_RULES.items()))


def code_books() -> str:
    """The code books by name."""
    return table(
        ["name", "codes", "smallest", "largest", "ties"],
        (
            (f"`{n}`", len(b.values), number(min(b.finite)), number(b.largest), b.ties)
            for n, b in fpsim.CODEBOOKS.items()
        ),
    )


def recipes() -> str:
    """The recipes by name."""
    return table(["recipe", "what it quantises", "source"], ((f"`{n}`", *rest) for n, *rest in fpsim.recipes()))


def profiles() -> str:
    """The profiles of engines by name."""
    rows = ((f"`{row.name}`", row.description, row.source) for row in fpsim.profiles())
    return table(["profile", "where it rounds", "what computes in this way"], rows)


def updates() -> str:
    """The ways to store weights and states by name."""
    return table(["update", "what it stores"], ((f"`{name}`", f"`{update}`") for name, update in fpsim.UPDATES.items()))


def _rules(kinds: dict[str, type]) -> str:
    return table(["name", "rule"], ((f"`{n}`", (kind.__doc__ or "").splitlines()[0]) for n, kind in kinds.items()))


def loss_rules() -> str:
    """The loss rules by name, each in a line."""
    return _rules({**SYSTEMS})


def layer_rules() -> str:
    """The layer rules by name, each in a line."""
    return _rules({**LAYER_RULES})


def reference_fpsim() -> str:
    """Every public name of fpsim."""
    return reference.markdown("fpsim")


def reference_ada_loss() -> str:
    """Every public name of ada_loss."""
    assert ada_loss.__all__
    return reference.markdown("ada_loss")


def _help(module: str, *words: str) -> str:
    command = [sys.executable, "-m", module, *words, "--help"]
    environment = {**os.environ, "COLUMNS": "90", "TERM": "dumb", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    text = "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())
    return f"```text\n{text}\n```"


def command_line() -> str:
    """The help of each command."""
    main = _help("ada_loss")
    commands = re.findall(r"^  (\w+)  ", main.partition("Commands:")[2], re.MULTILINE)
    parts = ["## ada-loss", main]
    for command in commands:
        parts += [f"### ada-loss {command}", _help("ada_loss", command)]
    parts += ["## python -m fpsim", _help("fpsim")]
    for command in ("verify", "why"):
        parts += [f"### python -m fpsim {command}", _help("fpsim", command)]
    return "\n\n".join(parts)


def sweep_keys() -> str:
    """The arguments of a sweep, each with its meaning and its default."""
    defaults = {name: p.default for name, p in inspect.signature(ada_loss.sweep).parameters.items()}
    rows = []
    for line in reference.arguments(inspect.getdoc(ada_loss.sweep) or ""):
        names, meaning = re.fullmatch(r"- `([^`]+)`: (.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
        for name in names.split(", "):
            if name != "show_progress":  # of Python alone
                rows.append((f"`{name}`", meaning, f"`{json.dumps(defaults[name])}`"))
    return table(["key", "meaning", "default"], rows)


def task_options() -> str:
    """The options of a training, each with its meaning, default and possible values."""
    said = dict(re.findall(r"^(\w+): ((?:.|\n    )+)$", inspect.getdoc(TrainOptions) or "", re.MULTILINE))
    rows = [
        (f"`{name}`", reference.escaped(" ".join(said[name].split())), f"`{default}`", possible(name))
        for name, default in OPTIONS.items()
    ]
    return table(["option", "meaning", "default", "possible"], rows)


def options_of_tasks() -> str:
    """What the tasks that come with the library have in the place of the defaults."""
    own = {name: getattr(function, "options", {}) for name, function in TASKS.items()}
    rows = [
        (f"`{name}`", ", ".join(f"{k}: {v}" for k, v in options.items())) for name, options in own.items() if options
    ]
    return table(["task", "its own options"], rows)


def requirements() -> str:
    """What pyproject.toml declares."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pythons = [name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r":: 3\.\d+$", name)]
    rows = [("Python", project["requires-python"].removeprefix(">="), ", ".join(pythons))]
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line[:40])
    for needed in project["dependencies"]:
        name, _, least = needed.partition(">=")
        rows.append((name, least, pinned[name]))
    return table(["requirement", "lowest", "tested with"], rows)


PARTS: dict[str, Callable[[], str]] = {
    part.__name__: part
    for part in (
        float_formats, block_formats, scale_rules, code_books, recipes, profiles, updates, loss_rules, layer_rules,
        reference_fpsim, reference_ada_loss, command_line, requirements, sweep_keys, task_options, options_of_tasks,
    )
}  # fmt: skip


def of_readme(heading: str) -> str:
    """A section of README without its heading, with links as a page of docs/ has them; "top" is what stands first."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if heading == "top":
        section = text.partition("\n")[2].partition("\n## ")[0]
    else:
        _, mark, after = text.partition(f"\n## {heading}\n")
        if not mark:
            raise ValueError(f"README.md has no section {heading!r}.")
        section = after.partition("\n## ")[0]
    section = re.sub(r"\]\(docs/", "](", section)
    return re.sub(r"\]\((?!https?:|#)(?=benchmarks/|notebooks|[A-Z]+\.md)", "](../", section).strip()


# The site's form of a part that Markdown has in another one
ON_SITE: dict[str, Callable[[], str]] = {
    "reference_fpsim": lambda: reference.directives("fpsim"),
    "reference_ada_loss": lambda: reference.directives("ada_loss"),
}


def written(text: str) -> str:
    """A page as it stands in the repository, its generated parts made again."""
    return PART.sub(lambda m: f"<!-- generated: {m[1]} -->\n\n{PARTS[m[1]]()}\n\n<!-- end of {m[1]} -->", text)


def generated(docname: str, text: str) -> str:
    """A page as the site has it."""
    # what has no other form stays as it was written: autodoc replaces defaults of functions while it reads them
    text = PART.sub(lambda m: ON_SITE[m[1]]() if m[1] in ON_SITE else m[0], text)
    text = MARK.sub(lambda m: of_readme(m[1]), text)
    # the picture is drawn by a script of the forge that shows the repository, which the site does not have
    return rooms.BLOCK.sub(lambda _: rooms.table(), text)


def pages() -> list[Path]:
    """The pages with generated parts."""
    return [path for path in sorted(HERE.glob("*.md")) if PART.search(path.read_text(encoding="utf-8"))]


# The look


REPORT_NAMES = {  # furo's variable: the report's
    "color-foreground-primary": "ink",
    "color-foreground-secondary": "soft",
    "color-background-primary": "page",
    "color-background-secondary": "band",
    "color-background-border": "line",
    "color-brand-primary": "accent",
    "color-brand-content": "accent",
}


def report_colours() -> dict[str, dict[str, str]]:
    """The variables of the theme, light and dark, with the colours and the font of a sweep's report."""
    css = (ROOT / "ada_loss" / "lab" / "results" / "report.css").read_text()
    light, dark, _on_paper = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    (font,) = re.findall(r"font: 16px/1\.5 (.*?);", css)
    colours = {}
    for mode, block in (("light", light), ("dark", dark)):
        values = dict(re.findall(r"--(\w+): (#\w+);", block))
        colours[mode] = {name: values[mine] for name, mine in REPORT_NAMES.items()} | {"font-stack": font}
    return colours


# Docstrings


ARGUMENT = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (?=\S)")
CODE = re.compile(r"``?([^`]+)``?")
HEADS = ("Args:", "Returns:", "Raises:", "Yields:", "Note:", "Example:")


def _escaped(line: str) -> str:
    """A line of plain text with `code`, in reStructuredText."""
    parts = []
    last = 0
    for code in CODE.finditer(line):
        parts += [re.sub(r"([*_|\\])", r"\\\1", line[last : code.start()]), f"``{code[1]}``"]
        after = line[code.end() : code.end() + 1]
        parts += ["\\ "] if after.isalnum() else []
        last = code.end()
    return "".join([*parts, re.sub(r"([*_|\\])", r"\\\1", line[last:])])


def readable_docstring(lines: list[str]) -> list[str]:
    """A docstring of this library as napoleon reads it.

    Arguments that stand as paragraphs `name: text` become an `Args:` block; `code` is marked as code; what
    reStructuredText would take for markup is not; examples stay.
    """
    result: list[str] = []
    block = ""  # "" for text, "args" for arguments without a heading, "doctest"
    for i, line in enumerate(lines):
        if line.lstrip().startswith(">>> "):
            block = "doctest"
            if result and result[-1]:
                result.append("")
        if block == "doctest":
            block = "doctest" if line.strip() else ""
            result.append(line)
            continue
        is_argument = ARGUMENT.match(line) is not None and not line.startswith(HEADS)
        if is_argument and block != "args":
            block = "args"
            result += ["", "Args:"] if not (result and result[-1] == "") else ["Args:"]
        elif block == "args" and line and not is_argument and not line.startswith(" "):
            block = ""
            result.append("")
        if line.startswith("- ") and i and lines[i - 1] and not lines[i - 1].startswith(("- ", " ")):
            result.append("")
        result.append("    " * (block == "args" and bool(line)) + _escaped(line))
    return result


def main() -> None:
    """Write the generated parts of all pages, and name the pages that changed."""
    if sys.argv[1:] != ["--write"]:
        raise SystemExit("usage: python docs/site_pages.py --write")
    for path in pages():
        text = path.read_text(encoding="utf-8")
        new = written(text)
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
