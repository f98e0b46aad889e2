"""The rows of a watch, and which format would break first according to them."""

from __future__ import annotations

from typing import Any

from fpsim.insight.ranges import binades_in
from fpsim.insight.rows import Rows
from fpsim.tensors.spec import Spec
from fpsim.tensors.tally import Tally

__all__ = ["breaks", "watched_row"]


def watched_row(step: int, site: str, role: str, spec: Spec, t: Tally, lost: tuple[int, int] | None) -> dict[str, Any]:
    """A row: what a format would do to the tensors of a role at a site, in a watched step."""
    return {
        "step": step,
        "site": site,
        "role": role,
        "format": str(spec.fmt),
        "underflow": t.underflow_fraction,
        "overflow": t.overflow_fraction,
        "sqnr_db": t.sqnr_db if t.signal else None,
        "amax": t.amax,
        "spread": binades_in(t.exponents),
        "nonfinite": t.nonfinite / t.count,
        "lost": lost[0] / lost[1] if lost is not None and lost[1] else None,
        "row_bias": t.row_bias,
        "kurtosis": t.kurtosis,
    }


def breaks(rows: Rows) -> list[str]:
    """For each format the first operation that it would break, and what was not finite without any format."""
    lines = []
    for fmt in dict.fromkeys(row["format"] for row in rows):
        first = next((r for r in rows if r["format"] == fmt and r["role"] == "activation" and r["overflow"]), None)
        if first is not None:
            lines.append(f"{fmt} would overflow from step {first['step']} on, first at {first['site']}.")
    bad = next((row for row in rows if row["nonfinite"] and row["role"] not in ("error", "weight_grad")), None)
    if bad is not None:
        lines.append(
            f"Step {bad['step']} is not finite without any format, at {bad['site']} ({bad['role']}): "
            f"fpsim.why(model, step) says why."
        )
    return [*lines, ""] if lines else []
