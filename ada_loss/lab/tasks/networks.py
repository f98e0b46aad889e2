"""Networks for CIFAR's sizes: ResNets of any depth, and VGG, MobileNet, wide ResNets and Fixup's ResNets by name."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fpsim.checks import is_whole, shown

__all__ = ["BasicBlock", "Bottleneck", "FixupBlock", "WideBlock", "network", "resnet"]

# The channels of the convolutions; M is a pooling that halves the side. Simonyan and Zisserman 2014, table 1, columns
# A, B, D and E.
VGG = {
    11: "64 M 128 M 256 256 M 512 512 M 512 512 M",
    13: "64 64 M 128 128 M 256 256 M 512 512 M 512 512 M",
    16: "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M",
    19: "64 64 M 128 128 M 256 256 256 256 M 512 512 512 512 M 512 512 512 512 M",
}
# Output channels and stride of the depthwise separable convolutions: Howard et al. 2017, table 1, from the size 32 x 32
# on.
MOBILENET = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))
STAGES = 3  # the number of stages of a ResNet; each stage but the first halves the side
EXPANSION = 4  # the number of outputs of a bottleneck for each of its inner channels
KNOWN = "vgg11, vgg13, vgg16, vgg19; mobilenet; wrn28_10 (6 n + 4 layers, 10 times as wide); fixup20 (6 n + 2 layers)"


def network(name: str, classes: int) -> nn.Module:
    """Return a network for CIFAR's sizes: (batch, 3, 32, 32) -> (batch, classes).

    name: "vgg11" to "vgg19" of Simonyan and Zisserman 2014, with normalisation and one linear layer; "mobilenet" of
        Howard et al. 2017; "wrn28_10", a wide ResNet of Zagoruyko and Komodakis 2016, without dropout; "fixup20", a
        ResNet without normalisation of Zhang et al. 2019.
    Raises ValueError for another name.

    >>> sum(p.numel() for p in network("wrn16_4", 10).parameters())
    2748890
    """
    found = re.fullmatch(r"(vgg|wrn|fixup)(\d{1,4})(?:_(\d{1,3}))?", name)
    kind, depth, width = (found[1], int(found[2]), int(found[3] or 0)) if found else (name, 0, 0)
    if kind == "vgg" and depth in VGG and not width:
        return _vgg(VGG[depth], classes)
    if kind == "mobilenet":
        return _mobilenet(classes)
    if kind == "wrn" and depth >= 10 and (depth - 4) % 6 == 0 and width:
        return _wide((depth - 4) // 6, width, classes)
    if kind == "fixup" and depth >= 8 and (depth - 2) % 6 == 0 and not width:
        return _fixup((depth - 2) // 6, classes)
    raise ValueError(f"Unknown model={shown(name)} of 32 x 32 pictures. Expected: {KNOWN}.")


def _convolution(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Return a convolution, a normalisation and a ReLU."""
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]


def _vgg(words: str, classes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 3
    for word in words.split():
        if word == "M":
            layers.append(nn.MaxPool2d(2))
        else:
            layers += _convolution(inputs, int(word))
            inputs = int(word)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def _mobilenet(classes: int) -> nn.Sequential:
    layers, inputs = _convolution(3, 32), 32
    for outputs, stride in MOBILENET:
        layers += [*_convolution(inputs, inputs, 3, stride, groups=inputs), *_convolution(inputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class BasicBlock(nn.Module):
    """Two convolutions, and a shortcut without parameters: He et al. 2016, option A."""

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
    """Three convolutions, each preceded by normalisation and ReLU: He et al. 2016b, figure 1 (b).

    No operation follows the sum. Where the shape changes, the shortcut is a convolution of the normalised input, as in
    the authors' code.
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
    """Return a ResNet for CIFAR's sizes: (batch, 3, side, side) -> (batch, classes).

    depth: the number of layers with weights: 6 n + 2 for version 1 (20, 32, 44, 56, 110, 1202), 9 n + 2 for version 2
        (20, 56, 110, 164, 1001).
    version: 1 for He et al. 2016 (CVPR), with two convolutions in each block; 2 for He et al. 2016b (ECCV), with
        bottlenecks and normalisations before convolutions.
    width: the number of channels of the first stage.
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
    # In version 2 each block begins with normalisation and ReLU. A last normalisation and ReLU follow after all blocks.
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


class WideBlock(nn.Module):
    """Two convolutions, each preceded by normalisation and ReLU: Zagoruyko and Komodakis 2016, figure 1 (c).

    There is no dropout. Where the shape changes, the shortcut is a convolution of the normalised input, as in the
    authors' code.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(outputs), nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        activated = torch.relu(self.bn1(x))
        y = self.conv2(torch.relu(self.bn2(self.conv1(activated))))
        return y + (x if self.shortcut is None else self.shortcut(activated))  # type: ignore[no-any-return]


def _wide(blocks: int, times: int, classes: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    inputs = 16
    for stage in range(STAGES):
        outputs = 16 * times << stage
        for block in range(blocks):
            layers.append(WideBlock(inputs, outputs, 2 if stage and not block else 1))
            inputs = outputs
    head = (nn.BatchNorm2d(inputs), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    return nn.Sequential(*layers, *head)


class Shift(nn.Module):
    """A single number, initially 0, that is added to all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class FixupBlock(nn.Module):
    """Two convolutions without normalisation, and a shortcut: Zhang et al. 2019, figure 1 (right).

    The second convolution is initialised with zeros, so that the block initially equals its shortcut. The first
    convolution has He's initialisation times `shrink`. A number is added before each convolution and ReLU, and the
    result is multiplied by another number.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, shrink: float) -> None:
        super().__init__()
        self.bias1a, self.bias1b, self.bias2a, self.bias2b = (Shift() for _ in range(4))
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        self.stride, self.padding = stride, outputs - inputs
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.conv2.weight)
        with torch.no_grad():
            self.conv1.weight.mul_(shrink)

    def forward(self, x: Tensor) -> Tensor:
        shifted = self.bias1a(x)
        y = self.conv2(self.bias2a(torch.relu(self.bias1b(self.conv1(shifted)))))
        # The shortcut takes the shifted input, as in the authors' code.
        if self.padding:
            x = F.pad(shifted[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.padding))
        return torch.relu(x + self.bias2b(y * self.scale))


def _fixup(blocks: int, classes: int) -> nn.Sequential:
    """Return He's ResNet with blocks of Fixup; the last layer is initialised with zeros."""
    first, last = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.Linear(64, classes)
    nn.init.kaiming_normal_(first.weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    # The factor is L^(-1 / (2 m - 2)) for L blocks with m = 2 convolutions: section 3 of the paper.
    shrink = (STAGES * blocks) ** -0.5
    layers: list[nn.Module] = [first, Shift(), nn.ReLU()]
    inputs = 16
    for stage in range(STAGES):
        for block in range(blocks):
            layers.append(FixupBlock(inputs, 16 << stage, 2 if stage and not block else 1, shrink))
            inputs = 16 << stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), Shift(), last)
