"""One training: `train`, its options, its result, the scaling methods, checkpoints."""

from ada_loss.lab.training.job import Job
from ada_loss.lab.training.loop import train
from ada_loss.lab.training.options import TrainOptions
from ada_loss.lab.training.run import Run, Stopped, underflow_share

__all__ = ["Job", "Run", "Stopped", "TrainOptions", "train", "underflow_share"]
