"""The study of a search, as Optuna keeps one: `optuna-dashboard sqlite:///FOLDER/optuna.db` opens it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ada_loss.lab.studies.space import Point, Space
from fpsim.checks import pip_install

__all__ = ["StoredStudy", "require_optuna"]

FILE = "optuna.db"


def require_optuna() -> Any:
    """The library. Raises ImportError without it."""
    try:
        import optuna
    except ImportError:
        raise ImportError(f"A search needs Optuna, which is not installed: {pip_install('search')}.") from None
    return optuna


class StoredStudy:
    """Every policy that a search tried, with two values: its bits, which are to be few, and the metric.

    A search that goes on tries the same again, and writes the study again.

    It holds a connection to its file until `close`.

    folder: of the search.
    metric, sign: the metric, and 1 where larger is better, -1 where smaller is.
    """

    def __init__(self, folder: Path, space: Space, metric: str, sign: int) -> None:
        self._optuna, self.space, self.metric = require_optuna(), space, metric
        path = folder / FILE
        path.unlink(missing_ok=True)
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._storage = self._optuna.storages.RDBStorage(f"sqlite:///{path.absolute()}")
        self.study = self._optuna.create_study(
            storage=self._storage,
            study_name=folder.absolute().name,
            directions=["minimize", "maximize" if sign > 0 else "minimize"],
        )
        self.study.set_user_attr("values", ["bits", metric])

    def close(self) -> None:
        """Close the file: Optuna does not, and since Python 3.13 a connection that is never closed is a warning."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    def add(self, point: Point, row: Mapping[str, Any]) -> None:
        """Keep a policy that was tried with all seeds; one without a number has failed.

        row: with "bits", "accuracy", "deviation", "seeds" and "kept".
        """
        trials, ranges = self._optuna.trial, self._optuna.distributions
        numbers = self.space.numbers(point)
        spans = self.space.spans(point)
        has_failed = math.isnan(row["accuracy"])
        self.study.add_trial(
            trials.create_trial(
                state=trials.TrialState.FAIL if has_failed else trials.TrialState.COMPLETE,
                values=None if has_failed else [row["bits"], row["accuracy"]],
                params=numbers,
                distributions={name: ranges.IntDistribution(*spans[name]) for name in numbers},
                user_attrs={
                    **self.space.formats(point),
                    "float32": ", ".join(point.wide),
                    "seeds": row["seeds"],
                    "kept": row["kept"],
                },
            )
        )
