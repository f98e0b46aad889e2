"""The report in a real browser: it opens, sorts, shows its cells, and fits on a phone and on paper."""

from __future__ import annotations

import base64
import csv
import io
import re
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.image import imread

import fpsim
from ada_loss.lab.cells.ledger import Ledger
from ada_loss.lab.results import Results
from ada_loss.lab.results.cell_pages import _heat, _shown, error_rows, gradient_rows, lost_by_site
from ada_loss.lab.results.drawings import difference_panels
from ada_loss.lab.results.figures import heat_png
from ada_loss.lab.results.report import MOST_CURVES, overview
from ada_loss.lab.sweep.driver import sweep

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,1600",
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A real sweep, with cells that failed."""
    out = tmp_path_factory.mktemp("report")
    options: Any = {
        "task_options": {"epochs": 2, "record_every": 1},
        "out": out,
        "baseline": False,
        "show_progress": False,
    }
    sweep("sweep_tasks:raises", ["fp16", "e5m2"], ["none"], seeds=[0, 1], **options)
    return sweep("sweep_tasks:raises", ["fp16", "e5m2"], ["none", "torch", 8], seeds=[0, 2, 10], **options)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("there is no Chromium with its driver on this machine")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any, results: Results) -> Any:
    browser.get(f"file://{results.report()}")
    return browser


def column(page: Any, head: str) -> list[str]:
    return page.execute_script(  # type: ignore[no-any-return]
        """const table = document.getElementById("sortable"), heads = [...table.tHead.rows[0].cells];
        const i = heads.findIndex(head => head.textContent === arguments[0]);
        return [...table.tBodies[0].rows].map(row => row.cells[i].textContent);""",
        head,
    )


def click(page: Any, head: str) -> str:
    return page.execute_script(  # type: ignore[no-any-return]
        """const head = [...document.querySelectorAll("#sortable th")].find(th => th.textContent === arguments[0]);
        head.querySelector("button").click();
        return head.getAttribute("aria-sort");""",
        head,
    )


def test_it_opens_without_an_error_and_asks_nothing_of_a_network(page: Any, results: Results) -> None:
    assert [entry for entry in page.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")] == []
    log = " ".join(entry["message"] for entry in page.get_log("performance") if "requestWillBeSent" in entry["message"])
    assert "http://" not in log.replace("http://www.w3.org", "")
    assert "https://" not in log
    assert page.title == results.out.name  # which says what it is, "operands"
    assert "sweep_tasks:raises" in page.find_element("tag name", "header").text
    assert all(
        page.execute_script("return [...document.querySelectorAll('.picture img')].map(i => i.naturalWidth > 100)")
    )


def test_heads_sort_numbers_as_numbers_both_ways(page: Any) -> None:
    before = column(page, "seed")
    assert click(page, "seed") == "ascending"
    assert column(page, "seed") == sorted(before, key=int)
    assert click(page, "seed") == "descending"
    assert column(page, "seed") == sorted(before, key=int, reverse=True)
    click(page, "format")
    assert column(page, "format") == sorted(column(page, "format"))
    click(page, "accuracy")
    shown = column(page, "accuracy")
    assert shown[-2:] == ["-", "-"]  # cells that failed have none, and are last
    assert [float(x) for x in shown[:-2]] == sorted(float(x) for x in shown[:-2])
    click(page, "accuracy")
    assert column(page, "accuracy")[-2:] == ["-", "-"]


def test_a_head_can_be_reached_and_pressed_by_the_keyboard(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    button = page.find_element("css selector", "#sortable th:nth-child(2) button")
    button.send_keys(Keys.ENTER)
    assert page.execute_script("return arguments[0].parentElement.getAttribute('aria-sort')", button) == "ascending"


def test_a_cells_number_opens_what_is_known_of_it(page: Any, results: Results) -> None:
    failed = results.failures()[0]["id"]
    page.execute_script(f"""document.querySelector('a[href="#cell-{failed}"]').click()""")
    section = page.find_element("id", f"cell-{failed}")
    assert section.get_attribute("open") == "true"
    assert "RuntimeError: seed 1 is not to be had" in section.text
    assert "sweep_tasks.py" in section.text
    assert "task\nsweep_tasks:raises" in section.text
    done = results.rows()[-1]["id"]
    page.execute_script(f"location.hash = 'cell-{done}'")
    section = page.find_element("id", f"cell-{done}")
    path = section.find_element("css selector", "path").get_attribute("d")
    assert path.startswith("M0.0 ")
    assert '"epochs": 2' in section.text


@pytest.mark.parametrize("width", [360, 1400])
def test_the_page_never_scrolls_sideways(page: Any, width: int) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    page.execute_script("document.querySelectorAll('details').forEach(cell => cell.open = true)")
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """A sweep with float32: one method keeps its accuracy, one loses it, one diverged."""
    out = tmp_path_factory.mktemp("answered")
    values = {
        ("fp32", "none"): 0.9,
        ("a", "none"): 0.899,
        ("a", "torch"): 0.87,
        ("b", "none"): 0.2,
        ("b", "torch"): 0.88,
    }
    with Ledger(out / "ledger.sqlite") as ledger:
        for (fmt, scaling), mean in values.items():
            for seed in range(3):
                config = {"task": "t", "format": fmt, "rounding": "up", "scaling": scaling, "seed": seed, "options": {}}
                cell = f"{fmt}{scaling}{seed}"
                ledger.add([(cell, config)])
                ledger.start(cell)
                diverged = (fmt, scaling, seed) == ("b", "torch", 1)
                metrics = {"accuracy": mean + seed / 1000}
                result = {"metrics": metrics, "diverged": diverged, "underflow": 0.5, "seconds": 1.0}
                ledger.finish(cell, {**result, "bits": fpsim.BITS})
                path = out / "telemetry" / f"{cell}.npz"
                path.parent.mkdir(exist_ok=True)
                steps = np.arange(1, 41)
                losses = (2 if (fmt, scaling) == ("a", "torch") else 3) / steps + seed / 10
                np.savez(path, losses=losses, scales=np.where(steps < 9, 4.0, 2.0))
    return Results(out)


def test_the_differences_from_float32_stand_where_they_are(browser: Any, answered: Results) -> None:
    browser.get(f"file://{answered.report()}")
    assert browser.find_element("class name", "verdict").text.startswith("float32 gives accuracy 90.1 ± 0.1 %.")
    lists = browser.find_elements("css selector", ".verdict > div")
    assert [part.get_attribute("class") for part in lists] == ["match", "short", "counted"]
    assert "torch: by 3.0" in lists[1].text
    rows = {row.text.splitlines()[-1]: row for row in browser.find_elements("css selector", ".row:not(.axis)")}
    assert [*rows] == ["-0.1", "-3.0", "-70.0", "1 of 3 diverged"]
    # the axis: even up to 2 tolerances, of 1 point each; then a factor of 2 is as long as one tolerance
    low, high = -(2 + np.log2(70.1 / 2)) - 0.5, 2 + np.log2(3 / 2) + 0.5
    for words, length in (("-0.1", -0.1), ("-3.0", -(2 + np.log2(3 / 2))), ("-70.0", -(2 + np.log2(70 / 2)))):
        (mean,) = rows[words].find_elements("css selector", "circle.mean")
        place = float(mean.get_attribute("cx").rstrip("%"))
        assert place == pytest.approx(100 * (length - low) / (high - low), abs=0.1)
    zero = float(rows["-0.1"].find_element("css selector", ".zero").get_attribute("x1").rstrip("%"))
    assert zero == pytest.approx(100 * -low / (high - low), abs=0.1)
    dots = browser.find_elements("css selector", "circle.seed")
    assert all(0 < float(dot.get_attribute("cx").rstrip("%")) < 100 for dot in dots)  # none at the edge
    assert [row.get_attribute("class") for row in rows.values()] == [
        "row match",
        "row short",
        "row short",
        "row diverged",
    ]
    names = [panel.text for panel in browser.find_elements("css selector", ".panel figcaption")]
    assert names[:2] == ["a", "b"]


def test_learning_curves_are_drawn_with_their_ends(browser: Any, answered: Results) -> None:
    browser.get(f"file://{answered.report()}")
    panels = browser.find_elements("css selector", ".curve:not([hidden]) .panel:has(.lines)")
    assert len(panels) == 2
    assert len(panels[0].find_elements("css selector", "path.band")) == 2
    assert panels[0].find_elements("css selector", "path.float32")
    upper, lower = (answered.curves(where={"format": "a", "scaling": scaling})[0].mean for scaling in ("none", "torch"))
    assert [panels[0].find_element("class name", end).text for end in ("high", "low")] == [
        f"{upper[0]:.3g}",
        f"{lower[-1]:.3g}",
    ]
    path = panels[0].find_elements("css selector", "path.c0")[-1].get_attribute("d")
    assert path.startswith("M0.0 0.0 L")
    assert panels[0].find_elements("css selector", "path.c1")[-1].get_attribute("d").endswith("L100.0 100.0")


def test_curves_that_cover_one_another_are_stripes_and_are_named(browser: Any, answered: Results) -> None:
    browser.get(f"file://{answered.report()}")
    first, second = browser.find_elements("css selector", ".curve:not([hidden]) .panel:has(.lines)")
    assert first.find_element("tag name", "figcaption").text == "a float32 = none"
    assert second.find_element("tag name", "figcaption").text == "b float32 = none = torch"
    assert len(second.find_elements("css selector", "path.band")) == 1  # the bands are equal too
    script = "return [...arguments[0].querySelectorAll('path:not(.band)')].map(p => [p.className.baseVal, "
    script += (
        "...[getComputedStyle(p).strokeDasharray, getComputedStyle(p).strokeDashoffset].map(w => w.split(/[^-0-9.]+/)"
    )
    drawn = {
        name: (dashes, offset)
        for name, dashes, offset in browser.execute_script(script + ".map(parseFloat))])", second)
    }

    def is_drawn(name: str, x: float) -> bool:
        (dash, gap, *_), (offset, *_) = drawn[name]
        return (x + offset) % (dash + gap) < dash  # SVG 2, 13.5.6

    for x in np.arange(0.5, 60):
        assert sum(is_drawn(name, x) for name in drawn) == 1  # each place of the line has one colour
    assert all(any(is_drawn(name, x) for x in np.arange(0.5, 60)) for name in drawn)
    alone = first.find_elements("css selector", "path.c1")[-1]
    assert alone.value_of_css_property("stroke-dasharray") == "none"


def test_no_picture_has_to_be_scrolled_on_a_phone(browser: Any, answered: Results) -> None:
    metrics = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        browser.get(f"file://{answered.report()}")
        script = "return [...document.querySelectorAll('.panel, .plot, .strip, .picture, .picture img')]"
        script += ".map(e => [e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0, e.getBoundingClientRect().right])"
        found = browser.execute_script(script)
        assert len(found) > 8
        assert not any(scrolls for scrolls, _ in found)
        assert max(right for _, right in found) <= 390
        used = browser.execute_script("return [...document.images].map(image => image.currentSrc)")
        wide = browser.execute_script("return [...document.images].map(image => image.src)")
        assert used
        assert all(a != b for a, b in zip(used, wide))
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_dark_has_its_own_colours(browser: Any, answered: Results) -> None:
    def colours(scheme: str) -> tuple[str, str]:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        script = (
            "const e = document.querySelector('path.c0'); return [getComputedStyle(document.body).backgroundColor, "
        )
        return tuple(browser.execute_script(script + "getComputedStyle(e).stroke]"))

    browser.get(f"file://{answered.report()}")
    try:
        light, dark = colours("light"), colours("dark")
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert light[0] == "rgb(255, 255, 255)"
    assert all(a != b for a, b in zip(light, dark))


def test_pictures_are_drawn_for_a_light_and_for_a_dark_page(browser: Any, answered: Results) -> None:
    """By the pixels that are shown: words and lines stand out from the page, and hues stay what they are."""
    figures_of = "return [...document.querySelectorAll('.picture')].filter(p => p.offsetParent).map(p => p.className)"
    pixels = """const done = arguments[0];
        const image = [...document.querySelectorAll('.picture')].filter(p => p.offsetParent)[0].querySelector('img');
        image.decode().then(() => {
            const canvas = document.createElement('canvas');
            canvas.width = image.width; canvas.height = image.height;
            const context = canvas.getContext('2d');
            context.fillStyle = getComputedStyle(document.body).backgroundColor;
            context.fillRect(0, 0, canvas.width, canvas.height);
            context.drawImage(image, 0, 0, canvas.width, canvas.height);
            done([...context.getImageData(0, 0, canvas.width, canvas.height).data]);
        });"""

    def luminance(rgb: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        c = rgb / 255  # WCAG 2.2, relative luminance
        return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) @ np.array([0.2126, 0.7152, 0.0722])

    browser.get(f"file://{answered.report()}")
    shown = {}
    try:
        for scheme in ("light", "dark"):
            feature = {"name": "prefers-color-scheme", "value": scheme}
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
            assert {*browser.execute_script(figures_of)} == {f"picture {scheme}"}
            rgb = np.array(browser.execute_async_script(pixels)).reshape(-1, 4)[:, :3]
            assert browser.execute_script("return getComputedStyle(document.images[0]).filter") == "none"
            shown[scheme] = rgb
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": [feature]})
        assert {*browser.execute_script(figures_of)} == {"picture light"}  # paper is white
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
    for rgb in shown.values():
        light, dark = luminance(rgb).max(), luminance(rgb).min()
        assert (light + 0.05) / (dark + 0.05) > 7  # WCAG 2.2, 1.4.6
    orange = [np.abs(rgb - [0xE6, 0x9F, 0x00]).sum(axis=1).min() for rgb in shown.values()]
    assert orange == [0, 0]  # that of the second method's line, in both
    assert np.median(luminance(shown["dark"])) < 0.05 < 0.9 < np.median(luminance(shown["light"]))


def test_formats_with_one_setting_share_a_panel(browser: Any, tmp_path: Path) -> None:
    values = {("fp32", "none"): 0.9, ("a", "none"): 0.9, ("b", "none"): 0.89, ("c", "none"): 0.9, ("c", "torch"): 0.8}
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for (fmt, scaling), mean in values.items():
            for seed in range(3):
                config = {"task": "t", "format": fmt, "rounding": "up", "scaling": scaling, "seed": seed, "options": {}}
                ledger.add([(f"{fmt}{scaling}{seed}", config)])
                ledger.start(f"{fmt}{scaling}{seed}")
                metrics = {"accuracy": mean + (seed - 1) / 1e3 - (2e-4 if fmt == "a" else 0)}
                ledger.finish(f"{fmt}{scaling}{seed}", {"metrics": metrics, "diverged": False})
    browser.get(f"file://{Results(tmp_path).report()}")
    panels = browser.find_elements("css selector", ".panel:has(.strip)")
    names = [[row.text for row in panel.find_elements("css selector", ".row:not(.axis)")] for panel in panels]
    assert names == [["a\n0.0", "b\n-1.0"], ["none\n0.0", "torch\n-10.0"]]  # -0.02 points are 0.0, not -0.0


def test_cells_can_be_filtered_by_words(browser: Any, answered: Results) -> None:
    browser.get(f"file://{answered.report()}")
    field = browser.find_element("id", "filter")
    shown = "return [...document.querySelectorAll('#sortable tbody tr')].filter(row => !row.hidden).length"
    assert browser.execute_script(shown) == 15
    field.send_keys("Torch b")
    assert browser.execute_script(shown) == 3
    assert browser.find_element("id", "matching").text == "3 of 15"
    field.send_keys(" diverged")
    assert browser.execute_script(shown) == 1
    assert not browser.find_element("id", "cell-anone0").is_displayed()
    field.clear()
    field.send_keys(" ")
    assert browser.execute_script(shown) == 15


def test_the_filter_hides_what_is_drawn_of_the_other_cells(browser: Any, answered: Results) -> None:
    browser.get(f"file://{answered.report()}")

    def shown(selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].filter(e => e.checkVisibility())"
        return browser.execute_script(script + ".map(e => e.textContent.trim().split('\\n')[0])", selector)

    strips, panels = ".row:not(.axis)", ".curve:not([hidden]) .panel figcaption"
    assert len(shown(strips)) == 4
    assert len(shown(panels)) == 2
    browser.find_element("id", "filter").send_keys("torch b")
    assert len(shown(strips)) == 1
    assert [words.split()[0] for words in shown(panels)] == ["b"]
    assert [words.split()[0] for words in shown(".overview tbody th")] == ["b"]
    drawn = "return [...document.querySelectorAll('.curve:not([hidden]) path:not(.band)[data-cells]')]"
    drawn += ".filter(p => !p.hasAttribute('hidden') && p.checkVisibility()).map(p => p.dataset.cells)"
    assert browser.execute_script(drawn) == ["", "btorch0 btorch1 btorch2"]  # float32 stays


def test_any_curve_can_be_drawn_and_those_of_chosen_cells_together(browser: Any, answered: Results) -> None:
    browser.get(f"file://{answered.report()}")
    names = [option.text for option in browser.find_elements("css selector", "#curve option")]
    assert names == ["loss", "scale"]
    heads = "return [...document.querySelectorAll('.curve:not([hidden]) h3')].map(head => head.textContent)"
    assert browser.execute_script(heads) == ["loss, lower is better: mean over the seeds, and deviation"]
    overlay = browser.find_element("id", "overlay")
    assert not overlay.is_displayed()
    for cell in ("anone0", "btorch2"):
        browser.find_element("css selector", f"tr[data-cells={cell}] input").click()
    assert overlay.is_displayed()
    assert overlay.find_element("tag name", "h2").text == "Chosen cells: loss, lower is better"
    assert len(overlay.find_elements("css selector", ".lines path")) == 2
    assert [key.text for key in overlay.find_elements("class name", "key")] == [
        "4. a, up, none, seed 0",
        "15. b, up, torch, seed 2",
    ]
    losses = [answered.telemetry(cell)["losses"] for cell in ("anone0", "btorch2")]
    ends = [f"{reduce([reduce(values) for values in losses]):.3g}" for reduce in (max, min)]
    assert [overlay.find_element("class name", end).text for end in ("high", "low")] == ends
    browser.execute_script("const e = document.getElementById('curve'); e.value = 'scale';")
    browser.execute_script("document.getElementById('curve').dispatchEvent(new Event('change'))")
    assert browser.execute_script(heads) == ["scale: mean over the seeds, and deviation"]
    assert [overlay.find_element("class name", end).text for end in ("high", "low")] == ["4", "2"]


def test_the_cells_that_are_shown_can_be_downloaded_as_csv(browser: Any, answered: Results, tmp_path: Path) -> None:
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    browser.get(f"file://{answered.report()}")
    browser.find_element("id", "filter").send_keys("torch a")
    browser.find_element("id", "csv").click()
    for _ in range(600):
        if (tmp_path / "cells.csv").exists():
            break
        time.sleep(0.1)
    with open(tmp_path / "cells.csv", newline="") as file:
        lines = [*csv.DictReader(file)]
    rows = {row["id"]: row for row in answered.rows()}
    assert [line["id"] for line in lines] == ["atorch0", "atorch1", "atorch2"]
    assert [float(line["accuracy"]) for line in lines] == [rows[line["id"]]["accuracy"] for line in lines]
    assert {line["format"] for line in lines} == {"a"}


def test_a_cell_shows_its_curves_with_axes_and_where_it_lost_gradients(browser: Any, tmp_path: Path) -> None:
    options: Any = {"task_options": {"epochs": 30, "record_every": 1}, "baseline": False, "show_progress": False}
    (row,) = (results := sweep("sweep_tasks:tiny", ["e4m3fn"], ["none"], out=tmp_path, **options)).rows()
    browser.get(f"file://{results.report()}#cell-{row['id']}")
    cell = browser.find_element("id", f"cell-{row['id']}")
    losses = results.telemetry(row["id"])["losses"]
    first = cell.find_element("css selector", ".curves figure")
    assert first.find_element("tag name", "figcaption").text == "loss, lower is better"
    assert [first.find_element("class name", end).text for end in ("high", "low", "last")] == [
        f"{max(losses):.3g}",
        f"{min(losses):.3g}",
        str(len(losses) - 1),
    ]
    sites = [item.text for item in cell.find_elements("css selector", ".map li")]
    assert sites == lost_by_site(results.telemetry(row["id"]))[1]  # type: ignore[index]
    image = cell.find_element("css selector", ".map img")
    assert image.get_property("naturalHeight") == len(sites)
    assert image.size["height"] == cell.find_element("css selector", ".map ol").size["height"]


def test_a_cell_tells_of_each_gradient_what_is_lost_its_bias_and_its_kurtosis(results: Results) -> None:
    row = next(row for row in results.rows() if row["format"] == "e5m2")
    arrays = dict(results.telemetry(row["id"]))
    found = gradient_rows(arrays)
    sites = [
        str(site) for site, role in zip(arrays["sites.site"], arrays["sites.role"], strict=True) if role == "error"
    ]
    assert [site for site, *_ in found] == sites[::-1]
    for site, *words in found:
        at = np.flatnonzero((arrays["sites.site"] == site) & (arrays["sites.role"] == "error"))[0]
        lost = arrays["sites.underflow"][at] / arrays["sites.nonzero"][at]
        bias, kurtosis = arrays["sites.row_bias"][at], arrays["sites.kurtosis"][at]
        assert words == [f"{100 * lost:.1f} %", f"{bias:.3f}", f"{kurtosis:.0f}"]
    page = results.report().read_text(encoding="utf-8")
    assert f"<td>{found[0][1]}</td><td>{found[0][2]}</td><td>{found[0][3]}</td>" in page
    del arrays["sites.row_bias"]  # of a version that did not know it
    assert gradient_rows(arrays) == []


def test_a_cell_tells_what_the_error_of_each_tensor_is_made_of(results: Results) -> None:
    row = next(row for row in results.rows() if row["format"] == "e5m2")
    arrays = dict(results.telemetry(row["id"]))
    found = error_rows(arrays)
    assert [float(words[2].split()[0]) for words in found] == sorted(float(words[2].split()[0]) for words in found)
    for words in found:
        site, _, role = words[0].rpartition(" ")
        at = np.flatnonzero((arrays["sites.site"] == site) & (arrays["sites.role"] == role))[0]
        parts = [arrays[f"sites.{name}_share"][at] for name in ("scale", "dead_zone", "grid")]
        assert sum(parts) == pytest.approx(1)
        assert [float(text.rstrip(" %")) for text in words[3:6]] == pytest.approx([100 * p for p in parts], abs=0.051)
        assert float(words[6].rstrip(" %")) == pytest.approx(100 * arrays["sites.scale_bias"][at], abs=0.0051)
    page = results.report().read_text(encoding="utf-8")
    assert f"<td>{found[0][2]}</td><td>{found[0][3]}</td><td>{found[0][4]}</td><td>{found[0][5]}</td>" in page
    del arrays["sites.grid_share"]  # of a version that did not know it
    assert error_rows(arrays) == []


def test_a_pixel_of_a_heat_map_is_transparent_where_nothing_arrives() -> None:
    shares = np.array([[0.0, 1.0, np.nan], [0.5, np.nan, 0.25]])
    image = imread(io.BytesIO(heat_png(shares)))  # matplotlib's reader
    assert image.shape == (2, 3, 4)
    assert (image[..., 3] == np.where(np.isnan(shares), 0, 1)).all()
    known = ~np.isnan(shares)
    expected = colormaps["cividis"](shares[known])[:, :3]
    assert np.abs(image[known][:, :3] - expected).max() <= 3 / 255  # 255 steps, of at most two levels, and rounding


def test_the_best_setting_of_each_format_stands_in_one_row(browser: Any, answered: Results) -> None:
    browser.get(f"file://{answered.report()}")
    rows = [
        [part.text for part in row.find_elements("css selector", "th, td")]
        for row in browser.find_elements("css selector", ".overview tbody tr")
    ]
    assert rows == [
        ["float32", "", "90.1 ± 0.1 %", "", ""],
        ["a", "none", "90.0 ± 0.1 %", "-0.1", "50 %"],
        ["b", "none", "20.1 ± 0.1 %", "-70.0", "50 %"],  # the other diverged with a seed
    ]


def test_it_prints(page: Any) -> None:
    assert base64.b64decode(page.print_page()).startswith(b"%PDF")


def test_nothing_is_cut_off_on_paper(page: Any) -> None:
    a4 = 718  # pixels between the margins
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    metrics = {"width": a4, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    widths = "return ['main', '#sortable', '.picture img', '.panels'].map(s => document.querySelector(s).scrollWidth)"
    try:
        assert max(page.execute_script(widths)) <= a4
        assert not page.find_element("id", "cell-by-cell").is_displayed()  # with all of them closed
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_what_came_from_outside_is_shown_and_not_run(browser: Any, tmp_path: Path) -> None:
    evil = "<script>document.title = 'taken'</script>"
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        config = {"task": evil, "format": evil, "rounding": "up", "scaling": evil, "seed": 0, "options": {}}
        ledger.add([("a", config)])
        ledger.start("a")
        ledger.fail("a", evil, evil)
    browser.get(f"file://{Results(tmp_path).report(question=evil)}")
    assert browser.title == tmp_path.name
    assert evil in browser.find_element("tag name", "header").text
    assert browser.find_element("class name", "question").text == evil


def test_the_question_is_asked_in_words(results: Results) -> None:
    text = results.report().read_text()
    assert "What do the formats fp16 and e5m2 do to the training of sweep_tasks:raises under the scaling" in text
    assert "18 of 20" in text.replace("<b>", "").replace("</b>", "")
    assert '<b class="failed">2 failed</b>' in text
    tables = text.split("Every setting</h2>")[1].split("<h2")[0]
    assert tables.count("<h3>") == 1  # accuracy; nothing underflowed
    assert "<dt>versions</dt>" in text


def test_what_went_wrong_is_gathered_with_its_cells(page: Any, results: Results) -> None:
    (item,) = page.find_elements("css selector", ".failures li")
    assert "failed: RuntimeError: seed 1 is not to be had" in item.text
    assert len(item.find_elements("tag name", "a")) == 2
    item.find_element("tag name", "a").click()
    assert page.find_element("id", f"cell-{results.failures()[0]['id']}").get_attribute("open") == "true"


def test_a_training_that_its_rule_stopped_is_reported(tmp_path: Path) -> None:
    options: Any = {
        "task_options": {"epochs": 300, "record_every": 1},
        "out": tmp_path,
        "baseline": False,
        "show_progress": False,
    }
    results = sweep("sweep_tasks:diverges", ["fp16"], ["deepspeed"], **options)
    (row,) = results.rows()
    arrays = results.telemetry(row["id"])
    assert arrays["scales"].tolist()[:3] == [65536.0, 32768.0, 16384.0]
    assert len(arrays["losses"]) == row["skipped"] == len(arrays["scales"]) < 300
    text = results.report().read_text()
    assert '<b class="diverged">' in text
    assert '<b class="failed">diverged</b>: The rule &#39;deepspeed&#39; stops' in text


def test_what_all_trainings_share_is_said_once(results: Results) -> None:
    text = results.report().read_text()
    shared = text.split("All of them with")[1].split("</p>")[0]
    assert "epochs <b>2</b>" in shared
    assert "rounding <b>nearest_even</b>" in shared
    assert "seed <b>" not in shared


def test_a_ledger_without_cells_has_nothing_to_report(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.sqlite").close()
    with pytest.raises(ValueError, match=r"has nothing to report\. Run the sweep first"):
        Results(tmp_path).report()


def test_the_head_of_a_sweep_that_goes_on_says_how_far_it_is(tmp_path: Path, results: Results) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        config = {"task": "digits", "rounding": "nearest_even", "scaling": "none", "options": {}}
        cells = [(fmt, seed) for fmt in ("fp32", "e5m2", "fp16") for seed in range(4)]
        ledger.add((f"{fmt}{seed}", {**config, "format": fmt, "seed": seed}) for fmt, seed in cells)
        for fmt, seed in cells[:5]:
            found = {"metrics": {"accuracy": 0.5 + seed / 100}, "seconds": 1.0, "underflow": 0.25}
            ledger.start(f"{fmt}{seed}")
            ledger.finish(f"{fmt}{seed}", found)
    text = Results(tmp_path).report().read_text()
    assert "digits, so far 5 of 12 trainings</span>" in text.split("</header>")[0]
    assert "gave too few results, 1 seed; 3 are needed" in text
    assert not re.search(r"\d %", text.split('<div class="first">')[1].split("<h2>")[0])  # nor does a line end before %
    assert "so far" not in results.report().read_text().split("</header>")[0]


def test_small_differences_and_wide_numbers_are_read_on_a_phone(tmp_path: Path) -> None:
    """Bits per character: a difference of 1e-5 at a tolerance of 0.036 took two lines, and numbers of the axis met."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        config = {"task": "digits", "rounding": "nearest_even", "scaling": "none", "options": {}}
        far = {"fp32": 0.0, "fp16": -1e-5, "bf16": 7e-5, "e4m3fn": 0.0123, "e5m2": 3.4}
        ledger.add((f"{fmt}{seed}", {**config, "format": fmt, "seed": seed}) for fmt in far for seed in range(3))
        for fmt, by in far.items():
            for seed in range(3):
                found = {"bits_per_character": 3.57 + seed / 100 + by * (1 + seed / 10)}
                ledger.start(f"{fmt}{seed}")
                ledger.finish(f"{fmt}{seed}", {"metrics": found, "seconds": 1.0, "underflow": 0.25})
    results = Results(tmp_path)
    (verdict,) = results.verdicts()
    drawn = difference_panels(verdict)
    assert drawn is not None
    lines = {line["name"]: line["words"] for panel in drawn["panels"] for line in panel["lines"]}
    assert lines == {"fp16": "0", "bf16": "0.0001", "e4m3fn": "0.0135", "e5m2": "3.74"}  # 1.1 times each
    assert {row.format: row.difference for row in overview(results, verdict)}["bf16"] == "0.0001"
    pixels, letter = 170, 6.2  # of the axis on a phone of 390, and of a digit at 11 pixels
    ends = [(pixels * place / 100, letter * len(words) / 2) for place, words in drawn["ticks"]]
    assert len(ends) > 2
    assert ends[0][0] >= ends[0][1]
    assert ends[-1][0] + ends[-1][1] <= pixels
    assert all(a + half <= b - other for (a, half), (b, other) in pairwise(ends))


def test_thousands_of_cells_are_listed_and_curves_left_out_are_said(tmp_path: Path) -> None:
    count = MOST_CURVES + 30
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        config = {"task": "digits", "format": "fp16", "rounding": "up", "scaling": "none", "options": {}}
        ledger.add((f"c{i}", {**config, "seed": i}) for i in range(count))
        for i in range(count):
            ledger.start(f"c{i}")
            ledger.finish(f"c{i}", {"metrics": {"accuracy": 0.5}, "seconds": 1.0, "underflow": 0.0})
    text = Results(tmp_path).report().read_text()
    assert text.count("<details") == count
    assert "The curves of the last 30 cells are left out" in text


def test_the_page_runs_its_own_script_and_no_other(page: Any, results: Results) -> None:
    assert click(page, "seed") == "ascending"  # its own one runs
    page.execute_script(
        """const script = document.createElement("script");
        script.textContent = "document.title = 'taken'";
        document.body.append(script);
        document.body.insertAdjacentHTML("beforeend", `<img src="x:" onerror="document.title = 'taken'">`);
        const style = document.createElement("style");
        style.textContent = "body { display: none }";
        document.head.append(style);"""
    )
    assert page.title == results.out.name
    assert page.find_element("tag name", "main").is_displayed()
    fetched = page.execute_async_script(
        "const done = arguments[0]; fetch('https://example.org').then(() => done('yes'), error => done('no'))"
    )
    assert fetched == "no"
    said = " ".join(entry["message"] for entry in page.get_log("browser"))
    assert said.count("Content Security Policy") >= 3


@pytest.mark.skipif(shutil.which("pdftotext") is None, reason="poppler-utils reads the printed page: pdftotext")
def test_heads_are_printed_on_every_page(browser: Any, tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        config = {"task": "digits", "format": "fp16", "rounding": "up", "scaling": "none", "options": {}}
        ledger.add((f"c{i}", {**config, "seed": i}) for i in range(150))
        for i in range(150):
            ledger.start(f"c{i}")
            ledger.finish(f"c{i}", {"metrics": {"accuracy": 0.5 + i / 1000}, "seconds": 1.0, "underflow": 0.0})
    browser.get(f"file://{Results(tmp_path).report()}")
    paper = tmp_path / "report.pdf"
    paper.write_bytes(base64.b64decode(browser.print_page()))
    pages = subprocess.run(["pdftotext", "-layout", paper, "-"], capture_output=True, text=True, check=True).stdout
    rows = [page for page in pages.split("\f") if page.count("fp16") > 5]
    assert len(rows) >= 3
    assert all("accuracy" in page for page in rows)


def test_a_report_is_written_whatever_metrics_are_called(tmp_path: Path) -> None:
    options: Any = {
        "task_options": {"epochs": 1, "record_every": 1},
        "out": tmp_path,
        "baseline": False,
        "show_progress": False,
    }
    results = sweep("sweep_tasks:oddly_measured", ["fp16", "e5m2"], ["none", "torch"], seeds=2, **options)
    assert results.metric == r"cost $\foo$"
    row = results.rows()[0]
    assert (row["format"], row["seed"]) == ("fp16", 0)
    assert row["metric.format"] == row["metric.seed"] == row["metric.underflow"] == row["$"]
    text = results.report().read_text()
    assert "cannot be drawn" not in text
    assert r"<h3>cost $\foo$</h3>" in text  # of an unknown word: no direction
    assert "<dt>a&lt;b&gt;&amp;&#39;&#34;</dt>" in text
    for metric in ("metric.format", "items", "_x", "$"):
        assert results.table(metric=metric).mean("fp16", "none") == row["$"] or results.plot_accuracy(metric)


def test_tasks_with_metrics_of_their_own_share_a_report(tmp_path: Path) -> None:
    options: Any = {"task_options": {"epochs": 1}, "out": tmp_path, "baseline": False, "show_progress": False}
    sweep("sweep_tasks:tiny", ["fp16"], ["none"], **options)
    results = sweep("sweep_tasks:oddly_measured", ["fp16"], ["none"], **options)
    assert [table.metric for table in results.tables()] == ["accuracy", r"cost $\foo$"]
    assert results.report().exists()


@pytest.mark.parametrize("arrays", [{"losses": ["a", "b"]}, {"losses": [[1.0]], "scales": []}, {"history.steps": [1]}])
def test_damaged_telemetry_costs_its_own_pictures_alone(tmp_path: Path, arrays: dict[str, Any]) -> None:
    options: Any = {
        "task_options": {"epochs": 1, "record_every": 1},
        "out": tmp_path,
        "baseline": False,
        "show_progress": False,
    }
    results = sweep("sweep_tasks:tiny", ["fp16"], ["torch", "adaptive"], seeds=2, **options)
    for row in results.rows():
        np.savez(tmp_path / "telemetry" / f"{row['id']}.npz", **{k: np.array(v) for k, v in arrays.items()})
    with sqlite3.connect(tmp_path / "ledger.sqlite") as sql:  # only the arrays tell then
        sql.execute("UPDATE cells SET telemetry_sha256 = NULL")
    sql.close()
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        for row in results.rows():
            ledger._seal(row["id"])
    text = Results(tmp_path).report().read_text()
    assert "4</b> of 4 trainings done" in text
    assert text.count('alt="accuracy in %') == 2  # light and dark


@pytest.mark.full
def test_a_page_of_a_cell_keeps_eight_curves_and_forty_sites() -> None:
    """Of 41 sites 40 are drawn, from the first to the last, and one is said to be left out."""
    curve = np.arange(2.0), np.array([1.0, 2.0])
    assert [*_shown({f"curve {i}": curve for i in range(9)})] == [f"curve {i}" for i in range(8)]
    sites = [f"{i}:linear" for i in range(41)]
    arrays = {
        "history.steps": np.array([0, 1]),
        "sites.role": np.array(["error"] * 41),
        "sites.site": np.array(sites),
        "history.underflow": np.zeros((2, 41)),
        "history.nonzero": np.ones((2, 41)),
    }
    heat = _heat(arrays)
    assert heat is not None
    assert (len(heat["sites"]), heat["more"]) == (40, 1)
    assert {heat["sites"][0], heat["sites"][-1]} == {sites[0], sites[-1]}
