"""The site's generated parts are true and complete, and its checker of links finds a broken one.

`docs/build` builds the site; CI runs it after the tests.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

import ada_loss
import fpsim

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "docs"))

import reference  # noqa: E402
import site_pages  # noqa: E402
from check_links import broken_links  # noqa: E402

PAGES = sorted(ROOT.glob("docs/*.md")) + sorted(ROOT.glob("notebooks/*.ipynb"))


def rows_of(table: str) -> dict[str, list[str]]:
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    return {line[0].strip("`"): line[1:] for line in lines}


def test_every_page_and_notebook_stands_in_one_table_of_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    trees = re.findall(r"```\{toctree\}\n(?::.*\n)*\n((?:[^`].*\n)*)```", index)
    listed = [line for tree in trees for line in tree.split()]
    wanted = {p.stem if p.parent.name == "docs" else f"../notebooks/{p.stem}" for p in PAGES} - {"index"}
    assert len(listed) == len({*listed})
    assert wanted <= {*listed}
    assert [name for name in listed if not [*(ROOT / "docs").glob(f"{name}.*")]] == []


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp16", np.float16),
        ("bf16", ml_dtypes.bfloat16),
        ("e4m3fn", ml_dtypes.float8_e4m3fn),
        ("e5m2", ml_dtypes.float8_e5m2),
        ("e4m3fnuz", ml_dtypes.float8_e4m3fnuz),
        ("e3m4", ml_dtypes.float8_e3m4),
        ("e2m1fn", ml_dtypes.float4_e2m1fn),
    ],
)
def test_the_table_of_formats_has_the_numbers_of_other_libraries(name: str, dtype: type) -> None:
    row, theirs = rows_of(site_pages.float_formats())[name], ml_dtypes.finfo(dtype)
    assert [int(cell) for cell in row[:3]] == [theirs.bits, theirs.nexp, theirs.nmant]
    numbers = [theirs.max, theirs.smallest_normal, theirs.smallest_subnormal, theirs.eps]
    assert [float(cell) for cell in row[4:8]] == pytest.approx([float(x) for x in numbers], rel=1e-3)  # four digits
    codes = np.arange(2**theirs.bits, dtype=np.uint16 if theirs.bits == 16 else np.uint8)
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        values = codes.view(dtype).astype(np.float64)
    assert int(row[8].replace(",", "")) == len(np.unique(values[np.isfinite(values)]))
    special = {
        "inf": np.isinf(values).any(),
        "NaN": np.isnan(values).any(),
        "-0": (np.signbit(values) & (values == 0)).any(),
    }
    assert row[9].split(", ") == [word for word, has in special.items() if has]


def test_every_name_has_its_row() -> None:
    assert [*rows_of(site_pages.float_formats())] == [*fpsim.CATALOGUE]
    assert [*rows_of(site_pages.block_formats())] == [*fpsim.BLOCKS]
    assert [*rows_of(site_pages.code_books())] == [*fpsim.CODEBOOKS]
    assert rows_of(site_pages.loss_rules())["torch"] == [
        "`torch.amp.GradScaler`: the scale does not grow beyond float32, and may shrink to 0."
    ]
    assert {"approx_range", "exact", "current", "mse"} <= rows_of(site_pages.layer_rules()).keys()


def test_the_reference_has_every_public_name_once() -> None:
    for package in (fpsim, ada_loss):
        page = (ROOT / "docs" / f"{package.__name__}.md").read_text()
        assert sorted(re.findall(r"^### `(\w+)`$", page, re.MULTILINE)) == sorted(package.__all__)
        shown = site_pages.generated("docs/page", page)
        named = re.findall(rf"^\.\. (?:auto\w+|py:data):: {package.__name__}\.(\w+)$", shown, re.MULTILINE)
        assert sorted(named) == sorted(package.__all__)


@pytest.mark.parametrize("page", ["fpsim", "ada_loss", "formats", "scalers", "promises", "sweeps"])
def test_a_page_of_reference_is_what_the_library_says_today(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    assert site_pages.PART.search(text)
    assert site_pages.written(text) == text, "run `python docs/site_pages.py --write`"


def test_the_page_of_the_command_line_is_what_the_commands_say_today() -> None:
    text = (ROOT / "docs" / "command-line.md").read_text()
    new = site_pages.written(text)
    option = re.compile(r"^ +(?:-\w, )?(--[\w-]+)|^### (.*)$", re.MULTILINE)  # wherever a version of typer breaks lines
    assert option.findall(new) == option.findall(text), "run `python docs/site_pages.py --write`"
    pinned = re.search(r"^typer==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if pinned and pinned[1] == version("typer") and sys.version_info < (3, 13):  # of argparse's layout
        assert new == text, "run `python docs/site_pages.py --write`"


def test_every_page_with_a_part_is_compared() -> None:
    assert {path.stem for path in site_pages.pages()} == {
        "fpsim", "ada_loss", "formats", "scalers", "promises", "command-line", "sweeps", "mismatch",
    }  # fmt: skip


def test_a_stale_part_is_made_again_and_what_stands_around_it_stays() -> None:
    page = (
        "# T\n\n<!-- generated: scale_rules -->\nold\n<!-- end of scale_rules -->\nafter <!-- end of scale_rules -->\n"
    )
    new = site_pages.written(page)
    assert new.startswith("# T\n\n<!-- generated: scale_rules -->\n\n| rule | scale |")
    assert new.endswith("\n\n<!-- end of scale_rules -->\nafter <!-- end of scale_rules -->\n")
    assert "old" not in new
    assert site_pages.written(new) == new


def function_of_the_reference(x: torch.Tensor, *, scale: float = 2**-4, lost: object = object()) -> torch.Tensor:
    """Multiply `x` by 2**4, e.g. by `2**4`. A second sentence.

    Args:
        x: any tensor, of 2**16 numbers
            at most.
        scale: `a*b` stays.

    Raises:
        ValueError: never.
    """
    return x * scale


def test_the_reference_has_the_signature_the_first_sentence_and_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fpsim, "planted", function_of_the_reference, raising=False)
    assert reference.entry("fpsim", "planted") == (
        "### `planted`\n\n```python\n"
        "fpsim.planted(x: torch.Tensor, *, scale: float = 0.0625, lost: object = ...) -> torch.Tensor\n```\n\n"
        "Multiply `x` by 2\\*\\*4, e.g. by `2**4`.\n\n"
        "- `x`: any tensor, of 2\\*\\*16 numbers at most.\n- `scale`: `a*b` stays."
    )
    shown = reference.entry("fpsim", "quantize")  # as one would type it
    assert (
        "    model: Model,\n    fmt: FormatLike,\n    *,\n    rounding: str | Mapping[str, str] | None = None,\n"
        in shown
    )
    assert "- `.with_rounding(" in reference.entry("fpsim", "Policy")


def test_sections_of_readme_are_those_of_readme_with_links_of_a_page() -> None:
    found = site_pages.generated("docs/index", "<!-- README: How exact, how fast -->")
    assert "](parity.md)" in found
    assert "](../benchmarks/README.md)" in found
    assert "](docs/" not in found
    with pytest.raises(ValueError, match=r"README\.md has no section 'Nothing'"):
        site_pages.of_readme("Nothing")
    index = (ROOT / "docs" / "index.md").read_text()
    assert site_pages.MARK.search(index)
    assert not site_pages.MARK.search(site_pages.generated("docs/index", index))


def test_the_picture_of_the_rooms_is_a_table_on_the_site() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    drawn = {tuple(line.strip().split(" --> ")) for line in page.splitlines() if " --> " in line}
    shown = site_pages.generated("docs/architecture", page)
    assert "mermaid\n" not in shown
    rows = re.findall(r"^\| `((?:fpsim|ada_loss)/[\w/.]+)` \| ((?:`[\w/.]+`(?:, )?)+) \|$", shown, re.MULTILINE)
    told = {(room, name) for room, names in rows for name in re.findall(r"`([^`]+)`", names)}
    assert {tuple(re.sub(r"/$|\.py$", "", name).replace("/", "_") for name in pair) for pair in told} == drawn
    assert all((ROOT / name).exists() for pair in told for name in pair)


def test_the_site_has_the_colours_and_the_font_of_the_report() -> None:
    css = (ROOT / "ada_loss" / "lab" / "results" / "report.css").read_text()
    colours = site_pages.report_colours()
    assert colours["light"].keys() == colours["dark"].keys()
    for mode, part in zip(("light", "dark"), css.split("prefers-color-scheme: dark", 1), strict=True):
        for name, mine in (("color-background-primary", "page"), ("color-brand-primary", "accent")):
            assert f"--{mine}: {colours[mode][name]};" in part
    assert f"font: 16px/1.5 {colours['light']['font-stack']};" in css


def test_a_docstring_is_read_as_it_is_written_here() -> None:
    lines = """Do *it*.

What `x_` is.
x, y: a `Tensor`,
    of any_shape.
Raises ValueError.

>>> f(*x)
1"""
    expected = r"""Do \*it\*.

What ``x_`` is.

Args:
    x, y: a ``Tensor``,
        of any\_shape.

Raises ValueError.

>>> f(*x)
1"""
    assert site_pages.readable_docstring(lines.splitlines()) == expected.splitlines()


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text(
        '<p id="here"></p><a href="sub/b.html#there">x</a><a href="https://example.org">y</a>'
    )
    (tmp_path / "sub" / "b.html").write_text('<p id="there"></p><a href="../a.html#here">x</a><img src="../c.png">')
    (tmp_path / "c.png").write_bytes(b"")
    assert broken_links(tmp_path) == []
    (tmp_path / "c.png").unlink()
    (tmp_path / "sub" / "b.html").write_text('<p id="other"></p><a href="../a.html#gone">x</a><img src="../c.png">')
    assert broken_links(tmp_path) == ["a.html: sub/b.html#there", "sub/b.html: ../a.html#gone", "sub/b.html: ../c.png"]
