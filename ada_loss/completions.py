"""Shell completion of the command line; each function imports only the module it needs."""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "complete_classics",
    "complete_formats",
    "complete_hardware",
    "complete_sweeps",
    "complete_tasks",
    "complete_updates",
]


def _files_of(folder: str, kind: str, incomplete: str) -> list[str]:
    """List the stems of files in a folder of this package, without importing anything.

    kind: a glob pattern. incomplete: the prefix of the stems.
    """
    return [
        path.stem for path in sorted((Path(__file__).parent / folder).glob(kind)) if path.stem.startswith(incomplete)
    ]


def complete_sweeps(incomplete: str) -> list[str]:
    """Complete names of sweeps."""
    here = [str(path) for kind in ("*.yaml", "*.yml") for path in Path().glob(kind)]
    return [*_files_of("lab/sweep", "*.yaml", incomplete), *(name for name in here if name.startswith(incomplete))]


def complete_tasks(incomplete: str) -> list[str]:
    """Complete names of tasks."""
    from ada_loss.lab.tasks import TASKS

    return [name for name in TASKS if name.startswith(incomplete)]


def complete_formats(incomplete: str) -> list[str]:
    """Complete names of formats."""
    import fpsim

    recipes = [f"{fpsim.RECIPE_PREFIX}{row.name}" for row in fpsim.recipes()]
    return [name for name in (*fpsim.CATALOGUE, *fpsim.BLOCKS, *recipes) if name.startswith(incomplete)]


def complete_hardware(incomplete: str) -> list[str]:
    """Complete the last name of a comma-separated list."""
    from ada_loss.lab.studies.hardware import PRESETS

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in PRESETS if name.startswith(last)]


def complete_updates(incomplete: str) -> list[str]:
    """Complete names of updates."""
    import fpsim

    return [name for name in ("float32", *fpsim.UPDATES) if name.startswith(incomplete)]


def complete_classics(incomplete: str) -> list[str]:
    """Complete names of classics."""
    from ada_loss.lab.studies.classics import CLASSICS

    return [name for name in CLASSICS if name.startswith(incomplete)]
