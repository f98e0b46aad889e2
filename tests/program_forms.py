"""Further statements of random programs: the many ways in which models index, copy, mix dtypes, rearrange and branch.

Each has one list of forms. As in `program_statements`, only what torch's kernels round once is here. Left out besides
are numbers that kernels compare with (`F.hardshrink(x, 0.3)`), and what asks how many bytes a number has.
"""

from __future__ import annotations

from collections.abc import Callable

from program_statements import NothingFits, Variable, Writer

ORDER = "torch.tensor([2, 0, 3, 1])"
SQUARE, ROW = (4, 4), (4,)


def two(w: Writer, *shapes: tuple[int, ...]) -> tuple[Variable, Variable]:
    """Two operands of one shape. Whoever uses them may sum gradients in another order than native code."""
    w.is_tree = False
    a = w.operand(lambda v: v.shape in shapes)
    return a, w.operand(lambda v: v.shape == a.shape)


def write_by_index(w: Writer) -> list[str]:
    def fits(v: Variable) -> bool:
        is_saved = w.has_gradients and v.memory.first.runs_again
        return not v.memory.owner and v.shape in (SQUARE, ROW) and not is_saved

    a = w.operand(fits, is_used=False)
    w.is_tree = False
    others = [w.source(shape, a.memory) for shape in (a.shape, a.shape[-1:])]
    if any(v.shape != shape for v, shape in zip(others, (a.shape, a.shape[-1:]), strict=True)):
        raise NothingFits
    x, (s, r) = a.name, (v.name for v in others)
    forms = [
        f"{x}[{ORDER}] = {s}",
        f"{x}.index_put_(({ORDER},), {s})",
        f"{x}.index_fill_(0, torch.tensor([1, 2]), 0.3)",
        f"{x}.index_copy_(0, {ORDER}, {s})",
        f"{x}.masked_fill_({x} > 0.25, torch.tensor(0.3))",
        f"{x}[{x} > 0.25] = 0.3",
        f"{x}[{x} > 0.25] *= 1.1",
        f"{x}[{s} > 0] = {s}[{s} > 0]",
        f"{x}.masked_scatter_({s} > 0, {s})",
        f"{x}.clamp_max_(0.3)",
        f"{x}[torch.tensor([0, 2])] = {s}[:2]",
        f"{x}[..., -1] = 0.3",
        f"{x}.put_(torch.tensor([0, 3]), {s}.reshape(-1)[:2])",
        f"{x}.fill_(torch.tensor(0.3))",
        f"{x}.fill_({s}.max())",
        f"{x}.mul_(torch.tensor(0.3))",
        f"{x}.mul_({s}.float())",
        f"{x}.sub_({s}.double())",
        f"{x}[...] = {s}.float()",
        f"{x}.copy_({s}.float() * 1.003)",
        f"torch.ops.aten.mul_({x}, 1.1)",
        f"torch.ops.aten.copy_({x}, {s})",
        f"{x} *= 0.7",
        f"{x} += {s}",
        f"torch.relu_({x})",
        f"F.threshold_({x}, 0.25, 0.3)",
        f"F.hardtanh_({x}, -0.3, 0.3)",
        f"F.leaky_relu_({x}, 0.3)",
        f"{x}.swapaxes(0, -1).mul_(1.1)",
        f"{x}.reshape(-1)[1:3] *= 0.7",
        f"{x}.as_strided((2,), (1,)).mul_(1.1)",
        f"torch._foreach_copy_([{x}], [{s}])",
        f"torch._foreach_clamp_max_([{x}], 0.3)",
        f"torch._foreach_add_([{x}], [{s}.float()])",
    ]
    if a.shape == SQUARE:
        forms += [
            f"{x}[{ORDER}, 1] = {r}",
            f"{x}[:, 1] *= {r}",
            f"{x}.scatter_(0, {ORDER}[None], {s})",
            f"{x}.scatter_(1, {ORDER}[:, None], 0.3)",
            f"{x}.fill_diagonal_(0.3)",
            f"{x}.tril_()",
            f"{x}.diagonal().copy_({r})",
            f"{x}[[0, 2], [1, 3]] = 0.3",
            f"{x}[:, [0, 2]] = {s}[:, :2]",
            f"{x}[1, 2] = {r}[0]",
            f"{x}[1, 2] = {r}[0].float() * 1.003",
            f"{x}[1][2] = 0.3",
            f"{x}.flatten().mul_(1.1)",
            f"{x}.unflatten(1, (2, 2))[:, 0].neg_()",
            f"{x}.index_add_(0, {ORDER}, {s})",
            f"{x}.scatter_add_(0, {ORDER}[:, None].expand(4, 4), {s})",
            f"{x}[None, None, 0] = {r}",
            f"{x}.unbind(1)[2].mul_(1.1)",
            f"torch.split({x}, 2)[1].zero_()",
            f"torch._foreach_mul_({x}.unbind(), 1.1)",
        ]
    text = w.choose(forms)
    if not w.has_gradients:
        text = w.choose([text, text, text, f"torch.clamp({s}, -0.3, 0.3, out={x})"])
    return [text]


def made_again(w: Writer) -> list[str]:
    """A copy, or a tensor of what another one says; some casts among them give their operand itself."""
    a, b = w.operand(lambda v: len(v.shape) in (1, 2)), w.operand(is_used=False)
    w.is_tree = False
    x, y = a.name, b.name
    forms = [
        f"copy.deepcopy({x}.detach() * 1.0)",
        f"torch.tensor({x}.tolist(), dtype={x}.dtype)",
        f"{x}.new_tensor({x}.tolist())",
        f"torch.tensor({x}.tolist())",
        f"torch.tensor({x}.tolist()).to({y})",
        f"{x}.to(torch.float32, copy=True)",
        f"{x}.to({x}.device, copy=True)",
        f"{x}.to({y}.dtype, copy=True)",
        f"torch.empty_like({x}).copy_({x})",
        f"torch.empty({x}.shape, dtype={y}.dtype).copy_({x})",
        f"torch.empty({x}.shape).copy_({x})",
        f"{x}.new_empty({x}.shape).copy_({x})",
        f"{x}.half().float()",
        f"{x}.bfloat16().to({y}.dtype)",
        f"{x}.half().to({x}.dtype)",
        f"torch.stack([row * 1.1 for row in {x}])",
        f"torch.full({x}.shape, {x}.max().item())",
        f"torch.full({x}.shape, {x}.max().item(), dtype={x}.dtype)",
        f"torch.ones({x}.shape, dtype={y}.dtype) * {x}",
        f"{x}.new_full({x}.shape, 0.3, dtype={y}.dtype) * {x}",
        f"torch.arange({x}.numel(), dtype={y}.dtype).view({x}.shape) * 0.3",
        f"torch.linspace(0, 1, {x}.numel()).view({x}.shape) * 1.1",
        f"torch.arange({x}.numel()).view({x}.shape) * 0.3",
        f"{x}.type('torch.FloatTensor')",
        f"{x}.float().type({y}.type())",
        f"torch.empty(0, dtype={y}.dtype).new_ones({x}.shape) * {x}",
        f"torch.empty(0).to({y}).new_full({x}.shape, 0.3)",
    ]
    return [w.cast_of(a, w.choose(forms))]


def promotion(w: Writer) -> list[str]:
    """Operands of several dtypes, numbers of Python, and functions of one or two operands."""
    a, b = two(w, SQUARE, ROW)
    x, y = a.name, b.name
    forms = [
        f"{x} * {ORDER}",
        f"{x} * ({y} > 0)",
        f"{x} * torch.tensor(0.3)",
        f"torch.tensor(0.3) * {x}",
        f"{x} + torch.tensor(0.3)",
        f"torch.tensor(0.3) - {x}",
        f"torch.fmod({x}, torch.tensor(0.3))",
        f"torch.addcmul({x}, {x}, torch.tensor(0.3))",
        f"{x} * {y}.float().mean()",
        f"{y}.float().mean() * {x}",
        f"torch.full_like({x}, torch.tensor(0.3)) * {y}",
        f"{x}.new_full((4, 4), torch.tensor(0.3)) * {y}",
        f"F.l1_loss({x}, torch.tensor(0.3), reduction='none')",
        f"{x} * torch.tensor([0.3])",
        f"torch.arange(4) * {x}",
        f"{x} * (torch.arange(4) / 3)",
        f"{x} * ({y} > 0).sum()",
        f"{x} * (({y} > 0).sum() / 3)",
        f"{x} * {y}.max()",
        f"{x}.float() * {y}.max()",
        f"({y} > 0).to({x}) * 0.3",
        f"({y} > 0).type_as({x}) * {x}",
        f"({y} > 0).float() * {x}",
        f"torch.where({y} > 0, {x}, {y}.float())",
        f"torch.where({y} > 0, {x}, torch.tensor(0.3))",
        f"torch.where({y} > 0, torch.tensor(0.3), torch.tensor(0.7))",
        f"torch.where({y} > 0, 0.3, 0.7) * {x}",
        f"torch.cat([{x}.float()[:2], {y}[2:]])",
        f"torch.stack([{x}, {y}.float()])[0]",
        f"torch.broadcast_tensors({x}, {y}.float())[0] * 1.1",
        f"torch.broadcast_tensors({x}.float(), {y})[1] * 1.1",
        f"torch.atleast_2d({x}, {y}.float())[0].view({x}.shape) * 1.1",
        f"torch.maximum({x}, {y}.float())",
        f"{x} % 2",
        f"{x} // 1",
        f"{x}.round()",
        f"{x}.sign() * 0.3",
        f"torch.clamp({x}, {y} - 1.0, {y} + 1.0)",
        f"{x}.clip(-0.3, 0.3)",
        f"torch.fmax({x}, {y})",
        f"torch.copysign({x}, {y})",
        f"F.leaky_relu({x}, 0.3)",
        f"F.hardtanh({x}, -0.3, 0.3)",
        f"F.relu6({x})",
        f"F.softshrink({x}, 0.25) + 0.0",  # torch's kernel gives a zero a sign that depends on the number of elements
        f"F.threshold({x}, 0.25, 0.3)",
        f"F.dropout({x}, 0.5, training=False) * 1.1",
        f"F.alpha_dropout({x}, 0.5) * 1.1",
        f"{x} * (1.1 if torch.result_type({x}, {y}) == torch.float32 else 0.9)",
        f"3.0 / ({x}.abs() + 1.0)",
        f"torch.rsub({x}, {y})",
        f"torch.ops.aten.mul({x}, {y})",
        f"{x} * ({y} < torch.tensor(0.3))",
        f"{x} * ({y}.float() < {x})",
        f"{x} * {y}.reshape(-1)[0].item()",
        f"sum([{x}, {y}])",
        f"math.prod([{x}, {y}])",
        f"torch.float_power({x}, 2)",
        f"{x}.mul({y}.to(torch.float64))",
        f"torch.view_as_real(torch.complex({x}.float(), {y}.float()))[..., 0] * 1.1",
        f"{x}.masked_fill({y} > 0, {y}.max())",
    ]
    return [f"{w.new(a.shape)} = {w.choose(forms)}"]


def rearranged(w: Writer) -> list[str]:
    a, b = two(w, SQUARE)
    x, y = a.name, b.name
    forms = [
        f"{x}.flip(0)",
        f"torch.roll({x}, 1, 0)",
        f"{x}.gather(0, {ORDER}[None].expand(4, 4))",
        f"{x}.index_select(1, {ORDER})",
        f"{x}[:, {ORDER}]",
        f"{x}.sort(0).values",
        f"{x}.topk(4)[0]",
        f"torch.diag_embed({x}[0])",
        f"F.pad({x}[:2, :2], (1, 1, 1, 1), value=0.3)",
        f"torch.cat([{x}[:, :2], {y}[:, 2:]], -1)",
        f"torch.block_diag({x}[:2, :2], {y}[:2, :2])",
        f"torch.cummax({x}, 0)[0]",
        f"F.max_pool1d({x}[None], 3, stride=1, padding=1)[0]",
        f"{x}.repeat_interleave(2, 0)[::2]",
        f"{x}.view(2, 2, 2, 2).permute(0, 2, 1, 3).reshape(4, 4)",
        f"torch.vmap(lambda row: row * 1.1)({x})",
        f"torch.vmap(lambda row, column: row * column, in_dims=(0, 1))({x}, {y})",
        f"torch.vmap(lambda row: row.float() * 1.003)({x})",
        f"torch.vmap(lambda row: row.to(torch.float32) * 1.003)({x}).to({y}.dtype)",
        f"torch.func.grad(lambda q: (q * {y}.detach() * 1.1).sum())({x}.detach())",
        f"torch.vmap(torch.func.grad(lambda q: (q.float() * q).sum()))({x}.detach())",
        f"Square.apply({x})",
        f"Scale.apply({x}, {y})",
        f"F.embedding({ORDER}, {x}.float()) * 1.003",
        f"torch.triu({x}) + torch.tril({y}, -1)",
        f"torch.stack(tuple(row * 1.1 for row in {x}))",
        f"torch.ops.aten.cat([{x}[:2], {y}[2:]])",
        f"{x}.scatter(0, {ORDER}[None], 0.3)",
        f"{x}.index_copy(0, {ORDER}, {y})",
        f"{x}.masked_scatter({x} > 0, {y})",
        f"{x}.diagonal_scatter({y}[0])",
        f"{x}.select_scatter({y}[0].float() * 1.003, 0, 1)",
        f"{x}.slice_scatter({y}[:2].float() * 1.003, 0, 0, 2)",
    ]
    return [f"{w.new(SQUARE)} = {w.choose(forms)}"]


def branch(w: Writer) -> list[str]:
    """Blocks, conditions, dtypes handed around, and gradients taken inside of the forward."""
    a, b = w.operand(lambda v: v.shape == SQUARE), w.operand(is_used=False)
    w.is_tree = False
    x, y, z = a.name, b.name, w.new(SQUARE)
    is_float32 = [
        f"str({y}.dtype) == 'torch.float32'",
        f"{y}.type() == 'torch.FloatTensor'",
        f"{y}.dtype.itemsize == 4",
        f"torch.finfo({y}.dtype).eps < 1e-6",
        f"{y}.dtype in {{torch.float32, torch.float64}}",
        f"{{torch.float32: True}}.get({y}.dtype)",
    ]
    dtypes = [
        f"getattr({y}, 'dtype')",
        f"dict(dtype={y}.dtype)['dtype']",
        f"[{y}.dtype, 1][0]",
        "next(self.parameters()).dtype",
        f"torch.float32 if {y}.dtype == torch.float64 else {y}.dtype",
        "torch.get_default_dtype()",
        "torch.tensor(0.3).dtype",
        f"max({y}.dtype, torch.float32, key=lambda d: d.itemsize)",
    ]
    inside = ["with torch.no_grad():", "with torch.device('cpu'):", "with torch.autograd.graph.save_on_cpu():"]
    inside += [f"if bool(({x} > 0.25).any()) or True:"]
    # where autocast is switched off, what comes from outside is left as it is: a parameter is its master weight
    is_stored = (a.memory.owner or "").startswith("self.")
    around_float32 = [
        *inside,
        "with torch.device('cpu'):" if is_stored else "with torch.autocast('cpu', enabled=False):",
    ]
    forms = [
        [w.choose(inside), f"    {z} = {x} * 1.1"],
        [w.choose(around_float32), f"    {z} = {x}.float() * 1.003"],
        [f"{z} = {x} * (0.7 if {w.choose(is_float32)} else 1.1)"],
        [f"{z} = {x}.to({w.choose(dtypes)}) * 1.003"],
        [f"match {y}.dtype:", f"    case torch.float32: {z} = {x} * 0.7", f"    case _: {z} = {x} * 1.1"],
        [f"self.kept = {y}.dtype", f"{z} = {x}.to(self.kept) * 1.003"],
        [f"self.kept = {x}.detach().float() * 1.003", f"{z} = self.kept * 1.1"],
        ["def inner(q, dtype=None): return q.to(dtype or torch.float32) * 1.003", f"{z} = inner({x}, {y}.dtype)"],
        ["def inner(q, dtype=None): return q.to(dtype or torch.float32) * 1.003", f"{z} = inner({x})"],
        [f"{z} = {x} * 1.1", "for i in range(2):", f"    {z} = {z} * 0.7 if i else {z}.float()"],
        [
            "with torch.enable_grad():",
            f"    q = {x}.detach().float().requires_grad_()",
            f"    {z}, = torch.autograd.grad((q * 1.003).sum(), q)",
            f"    {z} = {z} * {x}.detach()",
        ],
        [
            "with torch.enable_grad():",
            f"    q = {x}.detach().to({y}.dtype).clone().requires_grad_()",
            "    (q * q).sum().backward()",
            f"    {z} = q.grad * 1.1",
        ],
    ]
    return w.choose(forms)


FURTHER_KINDS: tuple[Callable[[Writer], list[str]], ...] = (write_by_index, made_again, promotion, rearranged, branch)
