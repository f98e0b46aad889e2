"""The first name of `ada_loss.lab.training`, which notebooks import."""

from ada_loss.lab.training import train, underflow_share

__all__ = ["train", "underflow_share"]
