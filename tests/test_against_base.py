"""The comparison of two checkouts finds a difference that was planted, and none where there is none."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
from scipy import stats

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SMALL, LARGE = "round_to of 16", "round_to of 2^20"


@pytest.fixture(scope="module")
def against_base() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import against_base
    finally:
        sys.path.remove(str(BENCHMARKS))
    return against_base


def checkout(folder: Path, steps_for_small: int, steps_for_large: int) -> Path:
    """A checkout whose `fpsim.round_to` takes so many milliseconds on a clock of its own, give or take some 10 %.

    The process of a checkout asks `time.process_time`; a real one answers differently on each run of this test.
    """
    folder.mkdir()
    (folder / "fpsim.py").write_text(
        "import random, time\n"
        "with open('starts', 'a+') as file:\n"  # of each round a process of its own
        "    start = file.write('.') and file.tell()\n"
        f"noise, now = random.Random({folder.name!r} + str(start)), 0.0\n"
        "time.process_time = lambda: now\n"
        "def round_to(x, fmt):\n"
        "    global now\n"
        f"    now += ({steps_for_small} if x.numel() == 16 else {steps_for_large}) / 1000 * noise.gauss(1, 0.1)\n"
    )
    return folder.resolve()


@pytest.mark.full
def test_work_that_takes_a_quarter_longer_is_worse_and_equal_work_is_not(
    against_base: ModuleType, tmp_path: Path
) -> None:
    base, current = checkout(tmp_path / "base", 4, 4), checkout(tmp_path / "current", 4, 5)
    found = dict(against_base.compare(base, current, [SMALL, LARGE], rounds=4, pairs=100))
    assert found[LARGE].verdict == "WORSE by 3 %"
    assert found[LARGE].low < 1.25 < found[LARGE].high
    assert found[SMALL].verdict == "not worse by 3 %"
    assert found[SMALL].low < 1 < found[SMALL].high


@pytest.mark.full
def test_work_that_a_checkout_cannot_do_is_named_and_the_rest_is_measured(
    against_base: ModuleType, tmp_path: Path
) -> None:
    base, current = checkout(tmp_path / "base", 10, 10), checkout(tmp_path / "current", 10, 10)
    (base / "fpsim.py").write_text("def round_to(x, fmt): x.numel() == 16 or x.unknown\n")
    found = dict(against_base.compare(base, current, [SMALL, LARGE], rounds=2, pairs=2))
    assert isinstance(found[SMALL], against_base.Ratio)
    assert "no attribute 'unknown'" in str(found[LARGE])
    assert str(base) in str(found[LARGE])


@pytest.mark.full
def test_a_process_with_another_fpsim_than_its_checkouts_ends_with_an_error(
    against_base: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    base = checkout(tmp_path / "base", 10, 10)
    with pytest.raises(RuntimeError, match="ended with code 1"):
        dict(against_base.compare(base, tmp_path / "empty", [SMALL], rounds=2, pairs=2))
    assert f"Expected that of {tmp_path / 'empty'}" in capfd.readouterr().err


def test_the_interval_is_students(against_base: ModuleType) -> None:
    logs = [0.05, 0.07, 0.02, 0.06]
    expected = stats.ttest_1samp(logs, 0.0).confidence_interval(0.95)
    ratio = against_base.ratio_of(logs)
    assert ratio.value == pytest.approx(math.exp(0.05), rel=1e-12)
    assert (ratio.low, ratio.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)), rel=1e-12)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.031, 1.2, "WORSE by 3 %"),
        (1.029, 1.2, "not worse by 3 %"),
        (0.8, 0.9, "not worse by 3 %"),
        (1.03, 1.2, "not worse by 3 %"),
    ],
)
def test_worse_is_an_interval_wholly_above_three_percent(
    against_base: ModuleType, low: float, high: float, verdict: str
) -> None:
    assert against_base.Ratio((low + high) / 2, low, high).verdict == verdict


def test_a_revision_is_unpacked_and_removed_again(against_base: ModuleType) -> None:
    with against_base.archived("HEAD", BENCHMARKS.parent) as folder:
        assert (folder / "fpsim" / "__init__.py").exists()
    assert not folder.exists()


def test_an_unknown_revision_is_named(against_base: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no-such-revision"), against_base.archived("no-such-revision", BENCHMARKS):
        pass
