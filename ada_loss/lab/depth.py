"""The first name of `ada_loss.lab.studies.depth`, which notebooks import."""

from ada_loss.lab.studies.depth import depth_trial

__all__ = ["depth_trial"]
