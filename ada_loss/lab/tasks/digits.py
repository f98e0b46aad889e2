"""scikit-learn's images of digits, for a convolutional network and for a deep plain one."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ada_loss.lab.tasks.task import Task, accuracy, seeded, trained_with
from fpsim.checks import pip_install

__all__ = ["deep_digits", "digits"]


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalisation, and a shortcut: He et al. 2016. The block keeps the shape."""

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


class DeepNet(nn.Sequential):
    """A stack of linear layers and ReLUs with small initial weights: (batch, 1, 8, 8) -> (batch, 10).

    The weights are uniform with the variance 2 / (3 * fan-in). With 2 / fan-in, as in He et al. 2015, a gradient would
    keep its size; here it becomes 1.7 times smaller with every layer, and 140 times over nine layers.
    """

    def __init__(self, depth: int = 10, width: int = 128) -> None:
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, width), nn.ReLU()]
        for _ in range(depth - 2):
            layers += [nn.Linear(width, width), nn.ReLU()]
        super().__init__(*layers, nn.Linear(width, 10))
        for layer in self:
            # With torch's default initial weights, which have half this variance, even float32 stays below 90 % with
            # one seed in five.
            if isinstance(layer, nn.Linear):
                nn.init.uniform_(layer.weight, -(limit := math.sqrt(2 / layer.in_features)), limit)


def digits(seed: int = 0) -> Task:
    """Classify scikit-learn's 1,797 images of digits, 8x8; a quarter is for the test. seed: the seed of the weights.

    >>> task = digits()
    >>> task.train[0].shape, task.test[0].shape
    (torch.Size([1347, 1, 8, 8]), torch.Size([450, 1, 8, 8]))
    """
    return _digits("digits", DigitsNet, seed)


@trained_with(optimizer="adam", learning_rate=1e-3, epochs=20, warmup=100)
def deep_digits(seed: int = 0) -> Task:
    """Classify the images of `digits` with a deep network without normalisation or shortcuts.

    The gradients of such a network shrink towards the input. The network is trained with Adam, whose steps do not
    depend on the size of a gradient, as long as the gradient is not zero.

    >>> len([layer for layer in deep_digits().model if isinstance(layer, nn.Linear)])
    10
    """
    return _digits("deep_digits", DeepNet, seed)


def _digits(name: str, make_model: Callable[[], nn.Module], seed: int) -> Task:
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise ImportError(f"The task {name} needs scikit-learn's images: {pip_install('lab')}.") from None

    images, labels = load_digits(return_X_y=True)
    # All seeds have the same split: they differ in weights and order, not in data.
    split = train_test_split(images, labels, test_size=450, random_state=0, stratify=labels)
    x_train, x_test = (torch.tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16 for x in split[:2])
    y_train, y_test = (torch.tensor(y, dtype=torch.int64) for y in split[2:])
    model = seeded(seed, make_model)
    return Task(name, model, (x_train, y_train), (x_test, y_test), nn.functional.cross_entropy, {"accuracy": accuracy})
