"""Blocks with a parameter or a buffer, from which `random_modules` draws.

A block with a tensor says how it is used (`USES`, `BUFFER_USES`) and, by its class, where in the tree of modules it
lies (`PLACES`). The first changes what is computed, the second changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from module_functions import FUNCTIONS, WIDTH, square
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

Use = Callable[[Tensor, Tensor], Tensor]

# How a matrix or a vector is used


def matmul(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def tied_head(x: Tensor, w: Tensor) -> Tensor:
    ids = torch.arange(x.shape[-2]) % WIDTH
    return torch.tanh(x + F.embedding(ids, w)) @ w.T


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def linear_with_bias(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w, w[0])


def einsum(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("...i,ij->...j", x, w)


def there_and_back(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w) @ w.T


def diagonal(x: Tensor, w: Tensor) -> Tensor:
    return x * w.diagonal() + w[1]


def in_double(x: Tensor, w: Tensor) -> Tensor:
    return (x.double() @ w.double()).to(x.dtype)


def normalised(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w / w.norm(dim=1, keepdim=True))


def over_its_largest(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        largest = (w * 1.0).abs().amax()
    return x @ (w / largest)


def through_halves(x: Tensor, w: Tensor) -> Tensor:
    return x @ FUNCTIONS["halves"](w)


def through_view(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, FUNCTIONS["reversal"](w))


def through_same(x: Tensor, w: Tensor) -> Tensor:
    return x @ FUNCTIONS["same"](w) + w[0]


def through_same_of_a_view(x: Tensor, w: Tensor) -> Tensor:
    return x @ FUNCTIONS["same"](w.T) + w[0]


def through_view_of_rows(x: Tensor, w: Tensor) -> Tensor:
    return x + F.linear(x, FUNCTIONS["reversal"](w[1:])).sum(-1, keepdim=True)


def through_halves_of_a_view(x: Tensor, w: Tensor) -> Tensor:
    return x @ FUNCTIONS["halves"](w.view_as(w))


def through_turned(x: Tensor, w: Tensor) -> Tensor:
    return x @ FUNCTIONS["turned"](w.unsqueeze(0))[0]


def through_square(x: Tensor, w: Tensor) -> Tensor:
    return x @ square(w)


def rounded_straight_through(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w + (w.sign() * 0.5 - w).detach())


def convolution(x: Tensor, w: Tensor) -> Tensor:
    rows = x.reshape(-1, *x.shape[-2:]).transpose(-1, -2)
    return F.conv1d(rows, w[:, :, None]).transpose(-1, -2).reshape(x.shape)


def added(x: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(w[0], x.reshape(-1, WIDTH), w).view(x.shape)


def in_a_checkpoint(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(matmul, x, w, use_reentrant=False)  # type: ignore[no-any-return]


def in_a_reentrant_checkpoint(x: Tensor, w: Tensor) -> Tensor:
    return checkpoint(matmul, x, w, use_reentrant=True)  # type: ignore[no-any-return]


USES: dict[str, Use] = {
    use.__name__: use
    for use in (matmul, tied_head, linear, linear_with_bias, einsum, there_and_back, diagonal, in_double, normalised)
    + (over_its_largest, through_halves, through_view, through_same, through_square, rounded_straight_through)
    + (through_same_of_a_view, through_view_of_rows, through_halves_of_a_view, through_turned)
    + (convolution, added, in_a_checkpoint, in_a_reentrant_checkpoint)
}


def factor(x: Tensor, b: Tensor) -> Tensor:
    return x * b[0]


def read_in_float32(x: Tensor, b: Tensor) -> Tensor:
    return (x.float() * b.float()[0]).to(x.dtype)


def frozen_matrix(x: Tensor, b: Tensor) -> Tensor:
    return x @ b


def grown(x: Tensor, b: Tensor) -> Tensor:
    b.mul_(1.003)
    return x + b.mean(0)


def running_mean(x: Tensor, b: Tensor) -> Tensor:
    with torch.no_grad():
        b[0].lerp_(x.detach().float().reshape(-1, WIDTH).mean(0).to(b.dtype), 0.1)
    return x - b[0]


def remembered(x: Tensor, b: Tensor) -> Tensor:
    before = b[1].clone()
    b[1].copy_(x.detach().reshape(-1, WIDTH)[0])
    return x + before * 0.5


BUFFER_USES: dict[str, Use] = {
    use.__name__: use for use in (factor, read_in_float32, frozen_matrix, grown, running_mean, remembered)
}


# Where it lies


def put(module: nn.Module, name: str, tensor: Tensor) -> None:
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor)


class Holder(nn.Module):
    """Holds a tensor and is never called."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        put(self, "w", tensor)

    def read(self) -> Tensor:
        return self.w  # type: ignore[no-any-return]


class Place(nn.Module):
    """Uses a tensor that lies where `hold` puts it; `reach` says how the forward comes there.

    use: what is done with it.
    takes_buffers: whether buffers can lie there, too. flat: the place beside it that computes the same.
    """

    takes_buffers = True
    times = 1  # it is used
    flat: type[Place]

    def __init__(self, use: Use, tensor: Tensor) -> None:
        super().__init__()
        self.use = use
        self.hold(tensor)

    def hold(self, tensor: Tensor) -> None:
        put(self, "w", tensor)

    def reach(self) -> Tensor:
        return self.w  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.use(x, self.reach())
        return x


class Own(Place):
    pass


class OwnTwice(Place):
    times = 2


class OwnBesideAnother(Place):
    def hold(self, tensor: Tensor) -> None:
        put(self, "w", tensor)
        self.child = Holder(torch.zeros(WIDTH, WIDTH))


class Copied(nn.Module):
    """A parametrization that computes what it is given."""

    def forward(self, w: Tensor) -> Tensor:
        return w * 1.0


class OwnComputed(Place):
    """Each use computes the tensor, and each of these has a gradient that is rounded."""

    def hold(self, tensor: Tensor) -> None:
        put(self, "w", tensor)
        parametrize.register_parametrization(self, "w", Copied())


Place.flat = Own


class OfChild(Place):
    def hold(self, tensor: Tensor) -> None:
        self.child = Holder(tensor)

    def reach(self) -> Tensor:
        return self.child.w  # type: ignore[no-any-return]


class OfGrandchild(Place):
    def hold(self, tensor: Tensor) -> None:
        self.a = nn.Module()
        self.a.b = nn.ModuleList([Holder(tensor)])

    def reach(self) -> Tensor:
        return self.a.b[0].w  # type: ignore[no-any-return,index]


class GivenByAMethod(OfGrandchild):
    def reach(self) -> Tensor:
        return self.a.b[0].read()  # type: ignore[no-any-return,index]


class LookedUp(OfGrandchild):
    def reach(self) -> Tensor:
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}["a.b.0.w"]


class OfALinear(Place):
    takes_buffers = False

    def hold(self, tensor: Tensor) -> None:
        self.inner = nn.Sequential(nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH, bias=False)}))
        self.inner[0]["a"].weight = tensor  # type: ignore[index]

    def reach(self) -> Tensor:
        return self.inner[0]["a"].weight  # type: ignore[no-any-return,index]


class Listed(Place):
    takes_buffers = False

    def hold(self, tensor: Tensor) -> None:
        self.ps = nn.ParameterList([tensor])

    def reach(self) -> Tensor:
        return self.ps[0]


class Sliced(Listed):
    def reach(self) -> Tensor:
        (w,) = self.ps[:1]
        return w  # type: ignore[no-any-return]


class Iterated(Listed):
    def reach(self) -> Tensor:
        return next(iter(self.ps))


class Keyed(Place):
    takes_buffers = False

    def hold(self, tensor: Tensor) -> None:
        self.ps = nn.ParameterDict({"w": tensor})

    def reach(self) -> Tensor:
        return self.ps["w"]  # type: ignore[no-any-return]


class InAPlainList(Place):
    def hold(self, tensor: Tensor) -> None:
        put(self, "w", tensor)
        self.kept = {"all": [self.w]}

    def reach(self) -> Tensor:
        return self.kept["all"][0]


class OfAParent(Place):
    """A child reads what its parent holds, by a reference that is no submodule."""

    def hold(self, tensor: Tensor) -> None:
        put(self, "w", tensor)
        self.child = Reader((self,))

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)  # type: ignore[no-any-return]


class Reader(nn.Module):
    def __init__(self, parents: tuple[Any, ...]) -> None:
        super().__init__()
        self.parents = parents

    def forward(self, x: Tensor) -> Tensor:
        return self.parents[0].use(x, self.parents[0].w)  # type: ignore[no-any-return]


class Applied(nn.Module):
    """Is given the tensor with its input, in one of several ways."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor, w: Any = None, **options: Any) -> Tensor:
        w = options.get("w", w)
        if isinstance(w, dict):
            w = w["w"]
        elif isinstance(w, list):
            w = w[0]
        elif isinstance(w, SimpleNamespace):
            w = w.w
        elif not isinstance(w, Tensor):
            w = w()
        return self.use(x, w)


class Argument(Place):
    def hold(self, tensor: Tensor) -> None:
        put(self, "w", tensor)
        self.child = Applied(self.use)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x, self.w)  # type: ignore[no-any-return]


class ArgumentByName(Argument):
    def forward(self, x: Tensor) -> Tensor:
        return self.child(x, w=self.w)  # type: ignore[no-any-return]


class ArgumentInADict(Argument):
    def forward(self, x: Tensor) -> Tensor:
        return self.child(x, {"w": self.w})  # type: ignore[no-any-return]


class ArgumentInAList(Argument):
    def forward(self, x: Tensor) -> Tensor:
        return self.child(x, [self.w])  # type: ignore[no-any-return]


class ArgumentInAnObject(Argument):
    def forward(self, x: Tensor) -> Tensor:
        return self.child(x, SimpleNamespace(w=self.w))  # type: ignore[no-any-return]


class ArgumentByAFunction(Argument):
    def forward(self, x: Tensor) -> Tensor:
        return self.child(x, lambda: self.w)  # type: ignore[no-any-return]


class KeptByAChild(Place):
    def hold(self, tensor: Tensor) -> None:
        put(self, "w", tensor)
        self.child = Keeper(self.use, self.w)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x)  # type: ignore[no-any-return]


class Keeper(nn.Module):
    def __init__(self, use: Use, w: Tensor) -> None:
        super().__init__()
        self.use, self.kept = use, [w]

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.kept[0])


class Tied(Place):
    takes_buffers = False
    flat = OwnTwice

    def hold(self, tensor: Tensor) -> None:
        self.first, self.second = Own(self.use, tensor), OfGrandchild(self.use, tensor)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


class Parametrised(Place):
    flat = OwnComputed
    takes_buffers = False

    def hold(self, tensor: Tensor) -> None:
        self.a = nn.Sequential(Holder(tensor))
        parametrize.register_parametrization(self.a[0], "w", Copied())

    def reach(self) -> Tensor:
        return self.a[0].w  # type: ignore[no-any-return]


class AsAFunction(Place):
    """The child's own weight is replaced in one call, as hypernetworks do."""

    flat = OwnBesideAnother

    def hold(self, tensor: Tensor) -> None:
        put(self, "w", tensor)
        self.child = Own(self.use, torch.zeros(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.child, {"w": self.w}, (x,))  # type: ignore[no-any-return]


PLACES: dict[str, type[Place]] = {
    place.__name__: place
    for place in (Own, OfChild, OfGrandchild, GivenByAMethod, LookedUp, OfALinear, Listed, Sliced, Iterated, Keyed)
    + (InAPlainList, OfAParent, Argument, ArgumentByName, ArgumentInADict, ArgumentInAList, ArgumentInAnObject)
    + (ArgumentByAFunction, KeptByAChild, Tied, Parametrised, AsAFunction)
}
