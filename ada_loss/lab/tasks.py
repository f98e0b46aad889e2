"""Tasks: functions from a seed to a model, data, a loss and metrics. All offline and real."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor, nn

__all__ = ["TASKS", "Task", "deep_digits", "digits", "find_task"]


@dataclass(frozen=True)
class Task:
    """What is trained. `loss` takes outputs and targets; so does each metric, and gives a float."""

    name: str
    model: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    metrics: dict[str, Callable[[Tensor, Tensor], float]]


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalisation beside a shortcut, He et al. 2016. (batch, c, h, w) -> the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(y)))


class DigitsNet(nn.Module):
    """A small convolutional network for 8x8 images: (batch, 1, 8, 8) -> (batch, 10) logits."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels)
        self.block = ResidualBlock(channels)
        self.down = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.bn_down = nn.BatchNorm2d(2 * channels)
        self.head = nn.Linear(2 * channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(torch.relu(self.bn(self.stem(x))))
        x = torch.relu(self.bn_down(self.down(x)))
        return self.head(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Share of the samples whose largest output is the target's; NaN outputs are wrong."""
    right = (outputs.argmax(dim=1) == targets) & ~outputs.isnan().any(dim=1)
    return float(right.float().mean())


class DeepNet(nn.Sequential):
    """A plain stack of linear layers and ReLUs with torch's own initial weights: (batch, 1, 8, 8) -> (batch, 10).

    Those have the variance 1 / (3 * fan-in), which makes a gradient 2.4 times smaller with every layer: with ten
    layers, some 2,000 times from the last to the first.
    """

    def __init__(self, depth: int = 10, width: int = 128) -> None:
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, width), nn.ReLU()]
        for _ in range(depth - 2):
            layers += [nn.Linear(width, width), nn.ReLU()]
        super().__init__(*layers, nn.Linear(width, 10))


def digits(seed: int = 0) -> Task:
    """The 1,797 8x8 images of scikit-learn's digits, a quarter of them for the test; the seed makes the weights.

    >>> task = digits()
    >>> task.train[0].shape, task.test[0].shape
    (torch.Size([1347, 1, 8, 8]), torch.Size([450, 1, 8, 8]))
    """
    return _digits("digits", DigitsNet, seed)


def deep_digits(seed: int = 0) -> Task:
    """The same images for a deep network without normalisation or shortcuts, whose gradients shrink on their way.

    Train it with Adam, which does not mind how small a gradient is, as long as it is not zero.

    >>> len([layer for layer in deep_digits().model if isinstance(layer, nn.Linear)])
    10
    """
    return _digits("deep_digits", DeepNet, seed)


def _digits(name: str, make_model: Callable[[], nn.Module], seed: int) -> Task:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=450, random_state=0, stratify=labels)  # one split for all seeds
    x_train, x_test = (torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16 for x in split[:2])
    y_train, y_test = (torch.tensor(y, dtype=torch.int64) for y in split[2:])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = make_model()
    return Task(name, model, (x_train, y_train), (x_test, y_test), nn.functional.cross_entropy, {"accuracy": accuracy})


TASKS: dict[str, Callable[[int], Task]] = {"digits": digits, "deep_digits": deep_digits}


def find_task(name: str) -> Callable[[int], Task]:
    """The task of a name, or of an import path "package.module:function".

    Raises ValueError for an unknown name, and for a path where nothing callable is.

    >>> find_task("digits") is digits
    True
    >>> find_task("digit")
    Traceback (most recent call last):
    ValueError: Unknown task 'digit'. Did you mean digits? Known: digits, deep_digits, or your own as 'module:function'.
    """
    module, colon, function = name.partition(":")
    if not colon:
        if name in TASKS:
            return TASKS[name]
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"Unknown task {name!r}.{hint} Known: {', '.join(TASKS)}, or your own as 'module:function'.")
    try:
        found = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"The task {name!r} cannot be imported: {error}. Possible: 'module:function', of a module on Python's path."
        ) from None
    if not callable(found):
        raise ValueError(f"The task {name!r} is a {type(found).__name__}. It must be a function from a seed to a Task.")
    return found  # type: ignore[no-any-return]
