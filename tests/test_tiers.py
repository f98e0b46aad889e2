"""The tiers: together they are all tests, what is left out has a smaller sister, and each keeps to its minutes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tiers

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Every test by its tier: what this run collected, or what one without arguments does."""
    config = request.config
    if config.args == config.getini("testpaths"):
        return config.stash[tiers.COLLECTED]
    path = tmp_path_factory.mktemp("collected") / "tiers.json"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "--collect-only", f"--write-tiers={path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads(path.read_text())


def test_what_is_not_collected_has_no_example(request: pytest.FixtureRequest) -> None:
    ignored = [path for glob in request.config.getoption("ignore_glob") for path in ROOT.glob(glob.removeprefix("*/"))]
    assert ignored
    assert not [path for path in ignored if ">>>" in path.read_text()]


def test_both_tiers_are_all_tests_and_no_test_is_in_both(tmp_path: Path) -> None:
    """As pytest collects them with each command, in a small project with this conftest."""
    for name in ("pyproject.toml", "tests/conftest.py", "tests/tiers.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    for name in ("fpsim", "ada_loss", "torch"):  # to import torch takes seconds
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("class cuda:\n    is_available = staticmethod(bool)\n")
    (tmp_path / "tests" / "test_it.py").write_text(
        "import pytest\n"
        "from tiers import parametrize\n"
        "@parametrize('x', [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, id='two'), 3], keep={0, 1})\n"
        "@parametrize('y, z', [(1, 'a'), (2, 'b')], keep=lambda y, z: z == 'b')\n"
        "def test_a(x, y, z): pass\n"
        "@pytest.mark.full\n"
        "def test_b(): pass\n"
        "@pytest.mark.gpu\n"
        "def test_c(): pass\n"
        "@pytest.mark.parametrize('a', range(6))\n"
        "@pytest.mark.parametrize('b', range(3))\n"
        "def test_d(a, b): pass\n"
    )

    def of(*options: str) -> set[str]:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            "--collect-only",
            *options,
        ]
        environment = {"PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return set(re.findall(r"^tests/test_it\.py::(.*)$", done.stdout, re.MULTILINE))

    default, full, both = of(), of("-m", "full"), of("-m", "full or not full")
    of_neither = {"test_a[2-b-1]", "test_c"}  # exhaustive, and of a card
    assert default == {"test_a[2-b-0]", *(f"test_d[{a % 3}-{a}]" for a in range(6))}
    every = {*(f"test_a[{y}-{x}]" for y in ("1-a", "2-b") for x in ("0", "1", "two", "3")), "test_b", "test_c"}
    every |= {f"test_d[{b}-{a}]" for a in range(6) for b in range(3)}
    assert full == every - default - of_neither
    assert both == every
    assert of(*(f"tests/test_it.py::test_{letter}" for letter in "abcd")) == every


def test_no_test_is_twice_and_a_run_without_arguments_runs_the_default_tier(
    collected: dict[str, list[str]], request: pytest.FixtureRequest
) -> None:
    every = [nodeid for names in collected.values() for nodeid in names]
    assert len(every) == len({*every})
    if request.config.args == request.config.getini("testpaths") and not request.config.getoption("-m"):
        ran = {item.nodeid for item in request.session.items}
        assert {*collected["default"]} <= ran
        assert not ran & {*collected["full"]}


def function_of(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def test_each_test_runs_by_default_or_a_smaller_sister_does(collected: dict[str, list[str]]) -> None:
    default = {function_of(nodeid) for nodeid in collected["default"]}
    left_out = {function_of(nodeid) for nodeid in collected["full"]} - default
    assert left_out == {*tiers.SISTERS}
    assert {*tiers.SISTERS.values()} <= default


@pytest.mark.parametrize("tier", tiers.MINUTES)
def test_a_tier_keeps_to_its_minutes_by_the_record_and_no_worker_is_alone_at_the_end(
    collected: dict[str, list[str]], tier: str
) -> None:
    """If it takes more: mark cases with `full`, or make a test smaller; then run `pytest --record`, and `-m full`."""
    cases = Counter(map(tiers.file_of, collected[tier]))
    first, second = tiers.finish(tier, cases)
    assert second / 60 <= tiers.MINUTES[tier]
    assert second - first <= 30  # seconds


def test_the_first_files_are_the_longest_and_one_with_many_quick_cases(collected: dict[str, list[str]]) -> None:
    """Progress is printed with each full line: 72 results, of which one is there within 30 seconds."""
    for tier in tiers.MINUTES:
        rows = tiers.recorded(tier)
        longest, quick, *_ = tiers.in_order(map(tiers.file_of, collected[tier]), tier)
        assert rows[longest][1] == max(row[1] for file, row in rows.items() if file != tiers.COLLECTING)
        assert rows[quick][0] >= 2 * 72
        assert rows[quick][1] < 15


def test_cases_without_a_record_count_a_second_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tiers, "RECORD", tmp_path / "durations.json")
    tiers.record("default", Counter({"a": 2, "b": 1}), Counter({tiers.COLLECTING: 10.0, "a": 50.0, "b": 5.0, "c": 0.0}))
    assert tiers.finish("default", Counter({"a": 2, "b": 1})) == [15, 60]
    # a ends at 10 + 50, b, with 60 new cases, at 10 + 5 + 60; the new file begins when a has ended
    assert tiers.finish("default", Counter({"a": 1, "b": 61, "new": 4})) == [64, 75]
    assert tiers.finish("full", Counter({"a": 3})) == [0, 3]


def test_a_list_without_a_representative_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keep=\{'fp17'\} is true of no case of 'fmt'\. Keep one, or mark the test"):
        tiers.parametrize("fmt", ["fp16"], keep={"fp17"})


def test_commands_and_caps_are_those_that_the_documents_and_ci_name() -> None:
    readme, contributing = ((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
    script = (ROOT / ".ci" / "run").read_text()
    assert f"at most {tiers.MINUTES['default']} minutes" in readme
    for tier, minutes in tiers.MINUTES.items():
        assert re.search(rf"\| `pytest( -m {tier})?` \| {minutes} \|", contributing)
        assert re.search(rf"^timed {tier} {minutes} ", script, re.MULTILINE)
