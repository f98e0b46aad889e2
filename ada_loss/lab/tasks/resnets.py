"""ResNets for CIFAR's sizes, of any depth, with the blocks of either paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fpsim.checks import is_whole, shown

__all__ = ["BasicBlock", "Bottleneck", "resnet"]

STAGES = 3  # each halves the side of the one before
EXPANSION = 4  # of a bottleneck: its outputs for each of its inner channels


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut without parameters, He et al. 2016, option A."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.padding = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        if self.padding:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.padding))
        return torch.relu(x + y)


class Bottleneck(nn.Module):
    """Three convolutions, each behind its normalisation, and nothing after the sum: He et al. 2016b, figure 1 (b).

    The shortcut is a convolution where the shape changes, of what the first normalisation gives, as in their code.
    """

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * inner
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(inner), nn.Conv2d(inner, inner, 3, stride, padding=1, bias=False)
        self.bn3, self.conv3 = nn.BatchNorm2d(inner), nn.Conv2d(inner, outputs, 1, bias=False)
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        activated = torch.relu(self.bn1(x))
        y = self.conv2(torch.relu(self.bn2(self.conv1(activated))))
        y = self.conv3(torch.relu(self.bn3(y)))
        return y + (x if self.shortcut is None else self.shortcut(activated))  # type: ignore[no-any-return]


def resnet(depth: int, classes: int, version: int = 1, width: int = 16) -> nn.Sequential:
    """A ResNet for CIFAR's sizes: (batch, 3, side, side) -> (batch, classes).

    depth: the number of layers with weights: 6 n + 2 for version 1 (20, 32, 44, 56, 110, 1202), 9 n + 2 for version 2
        (20, 56, 110, 164, 1001).
    version: 1 for He et al. 2016 (CVPR), with two convolutions a block; 2 for He et al. 2016b (ECCV), with bottlenecks
        and normalisations in front of convolutions.
    width: channels of the first stage.
    Raises ValueError for a depth that the version does not have.

    >>> sum(p.numel() for p in resnet(20, 10).parameters())
    269722
    """
    if version not in (1, 2) or isinstance(version, bool):
        raise ValueError(f"version={shown(version)} is not a ResNet's. Expected: 1 (two convolutions a block) or 2.")
    step = 6 if version == 1 else 9
    if not (is_whole(depth, step + 2) and (depth - 2) % step == 0):
        known = "20, 32, 44, 56, 110" if version == 1 else "20, 56, 110, 164, 1001"
        raise ValueError(
            f"depth={shown(depth)} is not that of a ResNet of version {version}. Expected: {step} n + 2, such as "
            f"{known}."
        )
    blocks = (depth - 2) // step
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
    if version == 1:
        layers += [nn.BatchNorm2d(width), nn.ReLU()]
    inputs = width
    for stage in range(STAGES):
        for block in range(blocks):
            stride, inner = 2 if stage and not block else 1, width << stage
            layers.append((BasicBlock if version == 1 else Bottleneck)(inputs, inner, stride))
            inputs = inner if version == 1 else EXPANSION * inner
    if version == 2:
        layers += [nn.BatchNorm2d(inputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
