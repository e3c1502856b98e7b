"""Muon: momentum, orthogonalized. Batched, distributed, one file that depends on torch alone.

    from muon import Muon, param_groups

    optimizer = Muon(param_groups(model), lr=0.02, momentum=0.95)
    for inputs, targets in batches:
        loss_fn(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

A hidden matrix p (r x c) with gradient g and momentum m is updated by

    m <- m + (1 - momentum) (g - m);    u <- g + momentum (m - g) if nesterov else m
    p <- p (1 - lr weight_decay) - lr scale(r, c) O,    O = U V^T of u = U S V^T, nearly

Groups with use_muon=False are updated by AdamW. The ranks share the work by where a parameter is:

- on every rank (DDP, or no wrapper): each matrix has one owner, which alone keeps its momentum and
  updates it; the new weights are gathered. Gradients are averages already, or with
  `reduce_grads=True`, local: they are reduced to the owners, half of the traffic of DDP.
- a DTensor (FSDP2, HSDP, tensor parallel), or a Megatron-style shard (`partition_dim` on the
  parameter, `tp_group` on it or given): gradients travel to the owners, updates back.

Save `full_state_dict()`, with torch.save or torch.distributed.checkpoint: it is complete, equal on
every rank, and loads at any world size. `state_dict()` is this rank's part and loads where the
ranks are as many; elsewhere loading raises and names what is missing.

Coming from torch.optim.Muon: `ns_coefficients` is `coefficients` (its own are "newton_schulz"),
`adjust_lr_fn` is `scale`, weight_decay defaults to 0 (there 0.1); its state_dict loads. From the
original Muon and MuonWithAuxAdam: the same names, groups and scale, so the same lr. From Megatron's
`matched_adamw_rms=0.2`: `scale="match_rms_adamw", rms=0.2` and AdamW's lr.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import math
import types
from collections import defaultdict, namedtuple
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

if dist.is_available():
    from torch.distributed.tensor import DTensor
else:  # a build of torch without it
    DTensor = types.NoneType

# ------------------------------------------------------------------------------ orthogonalization

# (a, b, c) of X <- aX + (bA + cA^2) X, A = X X^T, one triple a step, the last one repeated
COEFFICIENTS = {
    "polar_express": (  # Amsel et al. 2025, https://arxiv.org/abs/2505.16932
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    "newton_schulz": ((3.4445, -4.7750, 2.0315),),  # https://kellerjordan.github.io/posts/muon
    "quintic5": (
        (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046), (2.8366, -3.0525, 1.2012),
    ),
}  # fmt: skip
Coefficients = str | Sequence[Sequence[float]]
GRAM_RATIO = 1.5  # columns over rows from which the Gram form needs fewer FLOPs
STRIP = 128  # rows of a strip of a symmetric product on a CPU; below two strips it does not pay


def zeropower_via_newtonschulz5(
    G: Tensor, steps: int = 5, coefficients: Coefficients = "polar_express", dtype=None
) -> Tensor:
    """Nearly U V^T of each matrix U S V^T in G (..., rows, cols), in G's shape and dtype.

    `dtype` is computed in: bfloat16 on CUDA, else float32, if None. The result does not depend on
    G's scale; zero stays zero; G is not changed. ValueError if G is no stack of real matrices.
    """
    if G.ndim < 2 or not G.is_floating_point():
        raise ValueError(f"need floating-point matrices, not {G.dtype} of shape {tuple(G.shape)}")
    X = G.reshape(math.prod(G.shape[:-2]), *G.shape[-2:])
    X = _orthogonalize(X, _triples(coefficients, steps), dtype or _compute_dtype(G.device))
    return X.reshape(G.shape).to(G.dtype)


def _triples(coefficients: Coefficients, steps: int) -> tuple:
    table = COEFFICIENTS.get(coefficients) if isinstance(coefficients, str) else coefficients
    if not table or any(len(t) != 3 or not all(map(math.isfinite, t)) for t in table):
        raise ValueError(
            f"coefficients={coefficients!r}: give one of {sorted(COEFFICIENTS)} or finite triples"
        )
    return tuple(tuple(table[min(t, len(table) - 1)]) for t in range(steps))


def _compute_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _orthogonalize(G: Tensor, triples: tuple, dtype: torch.dtype) -> Tensor:
    """(N, r, c) of any float dtype to (N, r, c) of dtype."""
    if G.numel() == 0:
        return G.to(dtype)
    tall = G.size(-2) > G.size(-1)
    X = (G.mT if tall else G).float()
    # the largest entry first: squares of 1e30 or 1e-30 are beyond fp32
    top = torch.maximum(X.amax((-2, -1), keepdim=True), -X.amin((-2, -1), keepdim=True))
    X = X / top.masked_fill_(top == 0, 1)
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)  # at least 1, or 0
    X = X.div_(norm.clamp_(min=1).mul_(1.02)).to(dtype)
    # in bf16 the Gram form loses the small singular values and blows up others
    gram = dtype != torch.bfloat16 and X.size(-1) >= GRAM_RATIO * X.size(-2)
    X = _gram_newton_schulz(X, triples) if gram else _newton_schulz(X, triples)
    return X.mT if tall else X


def _newton_schulz(X: Tensor, triples: tuple) -> Tensor:
    for a, b, c in triples:
        A = _symmetric_product(X, X.mT)
        B = _symmetric_product(A, A, A, b, c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X


def _gram_newton_schulz(X: Tensor, triples: tuple) -> Tensor:
    """The same iteration on R = X X^T; Q gathers the product that X is multiplied by at the end.

    All factors are polynomials of one symmetric matrix, so they commute and stay symmetric.
    Rounding grows with every step away from X: every third step starts again from QX.
    """
    Q = None
    for t, (a, b, c) in enumerate(triples):
        if t == 0 or t % 3 == 2:
            X = X if Q is None else Q @ X
            Q, R = None, _symmetric_product(X, X.mT)
        Z = _symmetric_product(R, R, R, b, c)
        last = t + 1 == len(triples)
        if not last and t % 3 != 1:
            P = _symmetric_product(R, Z, R, a)
            R = _symmetric_product(P, Z, P, a)
        if Q is None:
            Q = Z
            Q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            Q = _symmetric_product(Q, Z, Q, a)
    return Q @ X


def _symmetric_product(
    A: Tensor, B: Tensor, C: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """beta C + alpha A B, known to be symmetric: (N, m, k), (N, k, m), (N, m, m) to (N, m, m).

    On a CPU a strip of rows is computed from the diagonal on and mirrored: near half the FLOPs.
    """
    m, strip = A.size(-2), STRIP if A.dtype == torch.float32 else 2 * STRIP
    if m < 2 * strip or A.device.type != "cpu":
        return A @ B if C is None else torch.baddbmm(C, A, B, beta=beta, alpha=alpha)
    out = A.new_zeros(A.size(0), m, m) if C is None else A.new_empty(A.size(0), m, m)
    for i in range(0, m, strip):
        j, to = min(i + strip, m), out[:, i : i + strip, i:]
        start = to if C is None else C[:, i:j, i:]
        torch.baddbmm(start, A[:, i:j], B[:, :, i:], beta=beta, alpha=alpha, out=to)
        out[:, j:, i:j] = to[:, :, j - i :].mT
    return out


# --------------------------------------------------------------------------------------- the plan

SHARD_ABOVE = 1 << 14  # elements: a smaller Adam parameter has one owner, not a part on every rank
JOIN_BELOW = 1 << 16  # elements: on a CPU a larger matrix is not transposed to join a batch
BATCH = {"cpu": 1 << 20}  # elements of one batch, to stay in the cache; elsewhere 1 << 26
ROUND = 1 << 23  # elements of one rank in one round of communication

# the ranks that hold a parameter, in the order of their process group
Comm = namedtuple("Comm", "group size rank", defaults=(None, 1, 0))
# a part of a piece: its index in the holder's stack of matrices, its index in the piece, its size
Link = namedtuple("Link", "q held inside numel")


class Piece(NamedTuple):
    """Rows start:stop of slice i of a parameter seen as a stack (n, R, C); one rank owns it."""

    slot: int  # index of the parameter over all groups
    i: int
    start: int
    stop: int
    cols: int
    cost: float  # FLOPs of a Muon step, elements of an Adam step

    rows = property(lambda self: self.stop - self.start)
    numel = property(lambda self: self.rows * self.cols)
    box = property(lambda self: ((self.i, self.i + 1), (self.start, self.stop), (0, self.cols)))

    def link(self, box: tuple) -> Link | None:
        """What of the piece is in a box ((n0, n1), (r0, r1), (c0, c1)) of the stack, or None."""
        (n0, n1), (r0, r1), (c0, c1) = box
        a, b = max(self.start, r0), min(self.stop, r1)
        if not n0 <= self.i < n1 or a >= b or c0 >= c1:
            return None
        inside = slice(a - self.start, b - self.start), slice(c0, c1)
        return Link(self, (self.i - n0, slice(a - r0, b - r0)), inside, (b - a) * (c1 - c0))


class Slot:
    """One parameter: how it lies on the ranks, and the pieces that it is cut into."""

    def __init__(self, index: int, name: str, p: Tensor, group: dict, world: Comm, tp_group):
        self.index, self.name, self.p, self.group = index, name, p, group
        self.muon, self.low = group["use_muon"], p.dtype in (torch.bfloat16, torch.float16)
        if not p.is_floating_point() or p.layout != torch.strided:
            raise ValueError(f"parameter {name} is {p.dtype}, {p.layout}: need real and dense")
        if self.muon and p.ndim < 2:
            raise ValueError(f"parameter {name} is {p.ndim}-D: give it use_muon=False")
        if sum(p is x for x in group["params"]) > 1:
            raise ValueError(f"parameter {name} is in its group twice")
        self.shape, self.home, self.boxes, self.copies = _layout(p, name, world, tp_group)
        self.dims, self.sharded = _stack(self.shape), self.boxes is not None
        self.dtensor, self.device = isinstance(p, DTensor), p.device
        if not self.sharded:  # every rank has all of it
            if not self.muon:
                self.dims = (1, self.dims[0] * self.dims[1], self.dims[2])
            self.boxes = [tuple((0, d) for d in self.dims)] * world.size
        self.box = self.boxes[self.home.rank]
        # of several copies of a shard the first speaks for all; in the norm a gradient counts once
        self.first = not (self.sharded and any(self.copies[self.home.rank]))
        self.share = self.home.size / world.size * (self.muon or self.first)
        # Adam works element by element, so it updates a shard where it lies
        self.comm = Comm() if self.sharded and not self.muon else self.home
        self.pieces = self._matrices() if self.muon else self._rows()
        # a piece that is all of the local tensor is that tensor, without a view
        self.whole = len(self.pieces) == 1 and (not self.muon or (p.ndim == 2 and not self.sharded))

    def _matrices(self) -> list[Piece]:
        (n, R, C), steps = self.dims, self.group["ns_steps"]
        split, heads = self.group["split"], self.group["heads"]
        rows = list(split) if split else [R // heads] * heads if heads else [R]
        if sum(rows) != R or min(rows) < 0:
            rule = f"split={split}" if split else f"heads={heads}"
            raise ValueError(f"{rule} does not divide the {R} rows of parameter {self.name}")
        ends = list(zip(itertools.accumulate(rows), rows, strict=True))
        cuts = [(i, e, r) for i in range(n) for e, r in ends if r * C]
        return [Piece(self.index, i, e - r, e, C, flops(r, C, steps)) for i, e, r in cuts]

    def _rows(self) -> list[Piece]:
        R, C = self.dims[1:]
        if self.sharded:
            R, C = math.prod(b - a for a, b in self.box), 1
            return [Piece(self.index, 0, 0, R, 1, R)]
        block = max(1, -(-R // self.comm.size) if R * C >= SHARD_ABOVE else R)
        cuts = [(a, min(a + block, R)) for a in range(0, R * C and R, block)]
        return [Piece(self.index, 0, a, b, C, (b - a) * C) for a, b in cuts]

    def local(self, t: Tensor) -> Tensor:
        """This rank's tensor of the parameter or its gradient."""
        return t.to_local() if self.dtensor else t

    def view(self, t: Tensor) -> Tensor:
        """local(t) as the stack that links index."""
        return self.local(t) if self.whole else self.local(t).reshape([b - a for a, b in self.box])


def _layout(p: Tensor, name: str, world: Comm, tp_group: Any) -> tuple:
    """(whole shape, comm, the box that each of its ranks holds, of which copy that is).

    The last two are None for a plain parameter: every rank of `world` has all of it.
    """
    shape, dim = list(p.shape), getattr(p, "partition_dim", None)
    tp_group = getattr(p, "tp_group", tp_group)
    if isinstance(p, DTensor):
        if any(x.is_partial() for x in p.placements):
            raise ValueError(f"parameter {name} is {p.placements}: a Partial has no value yet")
        mesh, dims_of = p.device_mesh, [getattr(x, "dim", None) for x in p.placements]
        # FSDP over tensor parallel on one dimension: the inner mesh dimension cuts first
        order = sorted(range(mesh.ndim), key=lambda k: hasattr(p.placements[k], "split_factor"))
        grid, ranks, world_mesh = mesh.shape, mesh.mesh.flatten().tolist(), dist.get_world_size()
        if mesh.ndim > 1 and mesh.size() != world_mesh:
            mesh = mesh._flatten()
        group = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    elif tp_group is not None and dim is not None and dim >= 0:
        grid, dims_of, order, group = (dist.get_world_size(tp_group),), [dim], [0], tp_group
        ranks = dist.get_process_group_ranks(group)
        shape[dim] *= grid[0]
    else:
        return shape, world, None, None
    boxes, copies, inner = [None] * len(ranks), [None] * len(ranks), math.prod(shape[2:])
    for rank, at in zip(ranks, itertools.product(*map(range, grid)), strict=True):
        box = [(0, d) for d in shape]
        for k in order:
            if (d := dims_of[k]) is not None:
                a, b = box[d]
                step = -(-(b - a) // grid[k])  # as torch.chunk: the last shards may be empty
                box[d] = min(a + step * at[k], b), min(a + step * (at[k] + 1), b)
        if len(shape) > 3 and any(box[d] != (0, shape[d]) for d in range(2, len(shape))):
            raise ValueError(f"parameter {name} of shape {shape} is sharded inside its kernels")
        rank, (rows, (a, b)) = dist.get_group_rank(group, rank), (*box, (0, 1), (0, 1))[:2]
        boxes[rank] = tuple(box) if len(box) == 3 else ((0, 1), rows, (a * inner, b * inner))
        copies[rank] = [x for x, d in zip(at, dims_of, strict=True) if d is None]
    comm = Comm(group, len(ranks), dist.get_rank(group))
    here = p.to_local() if isinstance(p, DTensor) else p
    if math.prod(b - a for a, b in boxes[comm.rank]) != here.numel():
        raise ValueError(f"parameter {name} of shape {shape} is sharded in an unknown way")
    return shape, comm, boxes, copies


def _gathers(group: dict) -> bool:
    """Whether the gradients of a group wait for an Adam step that is still to come."""
    return not group["use_muon"] and group["calls"] % group["every"] > 0


def _slices(box: tuple) -> tuple:
    """The index of a box ((n0, n1), (r0, r1), (c0, c1)) in its stack."""
    return tuple(slice(a, b) for a, b in box)


def _stack(shape: Sequence[int]) -> tuple[int, int, int]:
    n, rows, *cols = shape if len(shape) == 3 else (1, *shape) if len(shape) else (1, 1)
    return n, rows, math.prod(cols)


def flops(rows: int, cols: int, steps: int = 5) -> float:
    """FLOPs of the standard iteration, which decide about owners (the Gram form's go alike)."""
    m, n = sorted((rows, cols))
    return steps * (4.0 * m * m * n + 2.0 * m**3)


def assign(costs: Sequence[float], world_size: int) -> list[int]:
    """The owner of each item, longest processing time first; ties by position, alike anywhere."""
    owners, heap = [0] * len(costs), [(0.0, rank) for rank in range(world_size)]
    for k in sorted(range(len(costs)), key=lambda k: -costs[k]):
        load, owners[k] = heapq.heappop(heap)
        heapq.heappush(heap, (load + costs[k], owners[k]))
    return owners


def plan(shapes: Sequence[tuple[int, int]], world_size: int, owners: list[int] | None = None):
    """What each rank does for matrices of these shapes, at any world size and without a group.

    A dict of `owners` (assign's, or those given), and by rank `flops` of the orthogonalization,
    `owned` elements (4 bytes of momentum each) and `sent` elements per step and direction.
    """
    owners = owners or assign([flops(r, c) for r, c in shapes], world_size)
    load, owned = [0.0] * world_size, [0] * world_size
    for (r, c), rank in zip(shapes, owners, strict=True):
        load[rank] += flops(r, c)
        owned[rank] += r * c
    sent = [(world_size - 1) * n for n in owned]
    return {"owners": owners, "flops": load, "owned": owned, "sent": sent}


def _share_out(slots: list[Slot]) -> dict[tuple, dict[int, list[Piece]]]:
    """Who owns what, in rounds: {(comm, muon, sharded, ...): {rank: pieces}}, alike anywhere.

    The key is all that a round's collectives need to have in common; a round is bounded in size,
    so that one travels while the next is computed.
    """
    pieces, rounds = defaultdict(list), {}
    for s in slots:
        pieces[s.comm, s.muon].extend(s.pieces)
    for (comm, muon), qs in pieces.items():
        owners, filled = assign([q.cost for q in qs], comm.size), defaultdict(int)
        for q, owner in sorted(zip(qs, owners, strict=True), key=lambda x: (-x[0].cost, x[0])):
            s = slots[q.slot]
            if not muon and len(s.pieces) > 1:
                owner = s.pieces.index(q)  # block k of a table is rank k's
            every = () if muon else (s.group["every"], s.group["calls"] % s.group["every"])
            key = comm, muon, s.sharded, s.share, s.p.dtype, s.device, every
            part = filled[key, owner] // ROUND
            filled[key, owner] += q.numel
            rounds.setdefault((*key, part), {}).setdefault(owner, []).append(q)
    return rounds


class Round:
    """Pieces whose gradients travel to their owners together, and the results back.

    Both ways by all-to-all: a rank's gradients, or its boxes of them, to the owners, which add
    them up in the order of the ranks; then to each rank the new weights, or if it holds but a
    shard, the updates. Never does it matter to a collective which gradients there are.
    """

    def __init__(self, opt: Muon, comm: Comm, owned: list[list[Piece]]) -> None:
        self.opt, self.comm, self.mine, self.slots = opt, comm, owned[comm.rank], opt._slots
        s = self.slots[next(q.slot for qs in owned for q in qs)]
        self.muon, self.share, self.group, self.dtype = s.muon, s.share, s.group, s.p.dtype
        self.device, self.sharded = s.device, s.sharded and comm.size > 1
        self.reduces = comm.size > 1 and (self.sharded or opt.reduce_grads)
        # what this rank holds of each owner's pieces, and what each rank holds of its own
        ranks = range(comm.size if comm.size > 1 else 0)
        self.held = [self.links(owned[r], comm.rank) for r in ranks]
        self.asked = [self.links(self.mine, r) for r in ranks]
        # an owner of shards takes the gradient from its own copy of the parameter
        self.up = [[x for x in self.held[r] if self.same(x, r)] for r in ranks]
        self.down = [[x for x in self.asked[r] if self.same(x, r)] for r in ranks]
        if ranks and not self.sharded:  # an owner has its own new weights
            self.held[comm.rank] = self.asked[comm.rank] = []
        self.updates: dict[Piece, Tensor] = {}
        self.batches = defaultdict(list)  # of matrices of one shape and group: indices into mine
        for k, q in enumerate(self.mine if self.muon else ()):
            join = self.device.type != "cpu" or q.numel <= JOIN_BELOW
            shape = sorted((q.rows, q.cols)) if join else (q.rows, q.cols)
            self.batches[id(self.slots[q.slot].group), *shape].append(k)

    def links(self, qs: list[Piece], rank: int) -> list[Link]:
        return [x for q in qs if (x := q.link(self.slots[q.slot].boxes[rank]))]

    def same(self, x: Link, rank: int) -> bool:
        copies = self.slots[x.q.slot].copies
        return not self.sharded or copies[rank] == copies[self.comm.rank]

    def due(self) -> bool:
        return self.muon or (self.group["calls"] + 1) % self.group["every"] == 0

    def cut(self, tensors: list[Tensor], q: Piece, held: tuple | None = None) -> Tensor:
        """A part of a parameter or gradient among the local ones; by default all of a piece."""
        t, held = tensors[q.slot], held or (q.i, slice(q.start, q.stop))
        return t if t is None or self.slots[q.slot].whole else t[held]

    def start(self, grads: list[Tensor | None]) -> None:
        """Begin to bring the gradients to the owners."""
        self.grads = grads
        if self.reduces:
            parts = [[self.cut(grads, x.q, x.held) for x in xs] for xs in self.up]
            self.exchange(parts, self.up, self.down, self.dtype)

    def gradients(self) -> list[Tensor | None]:
        """The gradient of each piece of `mine`, None where the owner has none."""
        grads, self.grads = self.grads, None
        if not self.reduces:
            return [self.cut(grads, q) for q in self.mine]
        if not self.sharded:
            sizes = [q.numel for q in self.mine]
            wide = torch.promote_types(self.dtype, torch.float32)
            total = self.wait().view(self.comm.size, sum(sizes)).sum(0, dtype=wide)
            parts = total.div_(self.comm.size).split(sizes) if sizes else ()
            return [t.view(q.rows, q.cols) for q, t in zip(self.mine, parts, strict=True)]
        new = functools.partial(torch.empty, dtype=self.dtype, device=self.device)
        whole = {q: new(q.rows, q.cols) for q in self.mine}
        for x, part in self.arrived(self.down):
            whole[x.q][x.inside] = part.view_as(whole[x.q][x.inside])
        return list(whole.values())

    def give(self, qs: Sequence[Piece], updates: list[Tensor]) -> None:
        """Take the Muon updates of some pieces of `mine`."""
        if self.sharded:
            self.updates.update(zip(qs, updates, strict=True))
        else:
            self.opt._apply(qs, [self.cut(self.opt._weights, q) for q in qs], updates)

    def publish(self) -> None:
        """Begin to bring the owners' results to the other ranks."""
        if self.comm.size > 1:
            dtype = self.opt.compute_dtype or _compute_dtype(self.device)
            parts = [[self.result(x) for x in xs] for xs in self.asked]
            self.exchange(parts, self.asked, self.held, dtype if self.sharded else self.dtype)

    def result(self, x: Link) -> Tensor | None:
        if not self.sharded:
            return self.cut(self.opt._weights, x.q)
        return self.updates[x.q][x.inside] if x.q in self.updates else None

    def finish(self, present: list[float]) -> None:
        """Write what came: weights, or where some rank had a gradient, updates."""
        self.updates = {}
        pairs = list(self.arrived(self.held)) if self.comm.size > 1 else []
        views = [self.cut(self.opt._weights, x.q, x.held) for x, _ in pairs]
        new = [t.view_as(view) for (_, t), view in zip(pairs, views, strict=True)]
        if not self.sharded:
            return torch._foreach_copy_(views, new) if new else None
        groups = defaultdict(list)
        for (x, _), view, t in zip(pairs, views, new, strict=True):
            if present[x.q.slot]:
                groups[id(self.slots[x.q.slot].group)].append((x.q, view, t))
        for items in groups.values():
            self.opt._apply(*map(list, zip(*items, strict=True)))

    def exchange(self, parts: list, links: list, back: list, dtype: torch.dtype) -> None:
        """parts[r], or zeros of links' sizes for None, to rank r; back[r] is what comes from it."""
        zero = torch.zeros((), dtype=dtype, device=self.device)
        flat = [
            zero.expand(x.numel) if t is None else t.reshape(-1).to(dtype)
            for ts, xs in zip(parts, links, strict=True)
            for t, x in zip(ts, xs, strict=True)
        ]
        gives, gets = ([sum(x.numel for x in xs) for xs in ends] for ends in (links, back))
        self.send = torch.cat([zero.expand(0), *flat])  # both buffers live until wait()
        self.recv = self.send.new_empty(sum(gets))
        self.work = dist.all_to_all_single(
            self.recv, self.send, gets, gives, group=self.comm.group, async_op=True
        )

    def wait(self) -> Tensor:
        self.work.wait()
        recv, self.send, self.recv, self.work = self.recv, None, None, None
        return recv

    def arrived(self, back: list[list[Link]]) -> Iterator[tuple[Link, Tensor]]:
        links, flat = list(itertools.chain(*back)), self.wait()
        return zip(links, flat.split([x.numel for x in links]) if links else (), strict=True)


# ---------------------------------------------------------------------------------- the optimizer

SCALES = {
    "original": lambda r, c, rms: math.sqrt(max(1, r / c)),
    "match_rms_adamw": lambda r, c, rms: rms * math.sqrt(max(r, c)),
    "spectral": lambda r, c, rms: math.sqrt(r / c),
}
ADAM = {"betas": (0.9, 0.95), "eps": 1e-8, "every": 1, "calls": 0}
NONNEGATIVE, WHOLE = ("at least 0", lambda x: x >= 0), ("whole, from 1", lambda x: int(x) == x >= 1)
VALID = {  # key of a group: (what its value must be, the test)
    **dict.fromkeys(("lr", "weight_decay", "rms", "eps"), NONNEGATIVE),
    **dict.fromkeys(("ns_steps", "every"), WHOLE),
    "momentum": ("in [0, 1)", lambda x: 0 <= x < 1),
    "coefficients": ("a name or finite triples", lambda x: _triples(x, 1)),
    "scale": (f"a function or one of {sorted(SCALES)}", lambda x: callable(x) or x in SCALES),
    "beta2": ("None or in [0, 1)", lambda x: x is None or 0 <= x < 1),
    "betas": ("two numbers in [0, 1)", lambda x: len(x) == 2 and all(0 <= b < 1 for b in x)),
}


class Muon(torch.optim.Optimizer):
    """Muon on matrices, AdamW on groups with use_muon=False: one object for a whole model.

    A group is a dict of "params" (tensors or (name, tensor)) and any argument from lr to heads; an
    Adam group takes lr, weight_decay, betas, eps and `every`. A value out of range or a wrong
    parameter is a ValueError.

    every: an Adam group steps on every k-th call, on what has gathered in .grad since, and sends
      nothing in between. zero_grad() of this object leaves it alone; full_state_dict() has it.

    scale: "original" sqrt(max(1, r/c)), "match_rms_adamw" rms sqrt(max(r, c)), "spectral"
      sqrt(r/c), or a function of (r, c). cautious: decay only where update and weight have one
      sign. beta2: NorMuon's second moment. split=[rows, ...] or heads=h: a fused weight is cut
      into blocks of rows, each its own matrix. 3-D is a stack of matrices, 4-D and above flatten.
    reduce_grads: gradients are local, average them here. process_group: all ranks that hold these
      parameters, by default the world. deterministic: bit for bit alike at every world size.
    nonfinite: "raise" FloatingPointError, "skip" the step, or "ignore"; all ranks agree before
      anything changes. A GradScaler's infs skip.
    state_dtype: of the momentum. compute_dtype: of Newton-Schulz; None: bf16 on CUDA, else fp32
      (a CPU with AVX512-BF16 or AMX is faster in bf16). compile: torch.compile Newton-Schulz.

    `grad_norm` is the L2 norm of the averaged gradient at the last step, the same on every rank.
    A bf16 or fp16 parameter has an fp32 master with its owner. A step waits for the device once.
    """

    _step_supports_amp_scaling = True  # a GradScaler then leaves the verdict to step()

    def __init__(
        self, params: Any, lr: float | Tensor = 0.02, weight_decay: float = 0.0,
        momentum: float = 0.95, nesterov: bool = True, ns_steps: int = 5, *,
        coefficients: Coefficients = "polar_express",
        scale: str | Callable[[int, int], float] = "original", rms: float = 0.2,
        cautious: bool = False, beta2: float | None = None,
        split: Sequence[int] | None = None, heads: int | None = None,
        reduce_grads: bool = False, nonfinite: str = "raise",
        state_dtype: torch.dtype = torch.float32, compute_dtype: torch.dtype | None = None,
        deterministic: bool = False, compile: bool = False, process_group: Any = None,
        tp_group: Any = None, rank: int | None = None, world_size: int | None = None,
    ) -> None:  # fmt: skip
        defaults = dict(
            lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
            ns_steps=ns_steps, coefficients=coefficients, scale=scale, rms=rms,
            cautious=cautious, beta2=beta2, split=split, heads=heads, use_muon=True,
        )  # fmt: skip
        if nonfinite not in ("raise", "skip", "ignore"):
            raise ValueError(f"nonfinite={nonfinite!r}: give raise, skip or ignore")
        self.reduce_grads, self.nonfinite, self.state_dtype = reduce_grads, nonfinite, state_dtype
        self.compute_dtype, self.deterministic, self.compile = compute_dtype, deterministic, compile
        self._process_group, self._tp_group = process_group, tp_group
        self._rounds, self._compiled, self.grad_norm = None, {}, 0.0
        super().__init__(params, defaults)
        self._build()
        here = self._world.rank, self._world.size
        if rank not in (None, here[0]) or world_size not in (None, here[1]):
            raise ValueError(f"rank={rank}, world_size={world_size}, but the process group: {here}")

    def add_param_group(self, param_group: dict) -> None:
        """torch's; also after steps, then a collective, because owners may change."""
        adam = not param_group.get("use_muon", True)
        group = {**self.defaults, **(ADAM if adam else {}), **param_group}
        for key, (what, test) in VALID.items():
            if key in group and not test(group[key]):
                raise ValueError(f"{key}={group[key]!r} in a group of parameters: must be {what}")
        saved = None if self._rounds is None else self.full_state_dict()["state"]
        super().add_param_group(group)
        if saved is None:
            return
        try:
            self._build(saved)
        except ValueError:  # a wrong parameter leaves all as it was
            self.param_groups.pop()
            self._build(saved)
            raise

    @torch.no_grad()
    def _build(self, saved: dict[int, dict] | None = None) -> None:
        """Plan from names, shapes, dtypes and layouts alone; make this rank's state, or fill it."""
        group = self._process_group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        world = self._world = Comm()
        if group is not None:
            world = self._world = Comm(group, dist.get_world_size(group), dist.get_rank(group))
        if saved is not None:
            self.state.clear()
        self._slots, self._rounds, self._parts = [], [], {}
        for k, g in enumerate(self.param_groups):
            names = g.get("param_names") or [f"{i} of group {k}" for i in range(len(g["params"]))]
            for name, p in zip(names, g["params"], strict=True):
                self._slots.append(Slot(len(self._slots), name, p, g, world, self._tp_group))
                s = self._slots[-1]
                if s.sharded and self.reduce_grads and s.home.size != world.size:
                    lies = f"parameter {name} is a shard on {s.home.size} of {world.size} ranks"
                    raise ValueError(f"reduce_grads=True, but {lies}: average its gradient before")
        self._checked = world.size == 1
        for (comm, *_), owned in _share_out(self._slots).items():
            self._rounds.append(Round(self, comm, [owned.get(r, []) for r in range(comm.size)]))
        self._own = {q: {} for r in self._rounds for q in r.mine}
        for s in self._slots:
            self._make_state(s)
        if saved is not None:
            self._fill(saved)

    def _make_state(self, s: Slot) -> None:
        """Note all of a parameter's state, alike on every rank; make this rank's tensors."""
        wide, values = torch.promote_types(s.p.dtype, torch.float32), s.view(s.p.detach())
        unit = ((0, 1),) * 3
        for k, q in enumerate(s.pieces):
            own, box = self._own.get(q), s.box if s.sharded and not s.muon else q.box
            keep = functools.partial(self._keep, own, s)
            if s.muon:
                keep("momentum_buffer", s.dims, self.state_dtype, box, (q.rows, q.cols))
                if s.group["beta2"] is not None:
                    dims = (1, q.rows, 1) if q.rows >= q.cols else (1, 1, q.cols)
                    name = "second_moment" + f".{k}" * (len(s.pieces) > 1)
                    keep(name, dims, torch.float32, tuple((0, d) for d in dims), dims[1:])
            else:
                shape = values.shape if s.whole else (q.rows, q.cols)
                for name in ("exp_avg", "exp_avg_sq"):
                    keep(name, s.dims, wide, box, shape, counts=s.first)
                alone = k == 0 and not (s.sharded and s.home.rank)
                keep("step", (1, 1, 1), torch.float32, unit, (), counts=alone)
            if s.low and not (s.muon and s.sharded):
                value = values if s.whole else values[q.i, q.start : q.stop]
                keep("master", s.dims, wide, box, value.shape, value, s.first)
        if s.low and s.muon and s.sharded:  # each holder of a shard has its master
            master = self._keep({}, s, "master", s.dims, wide, s.box, values.shape, values, s.first)
            for x in filter(None, (q.link(s.box) for q in s.pieces)):
                self._own.setdefault(x.q, {})["master"] = master[x.held]

    def _keep(self, own, s, name, dims, dtype, box, shape, value=None, counts=True):
        """This rank's part `box` of what all ranks together call `name`, as an entry of `state`."""
        parts = self._parts.setdefault((s, name), (dims, dtype, []))[-1]
        if own is None:  # another rank's
            return None
        t, state = torch.zeros(shape, dtype=dtype, device=s.device), self.state[s.p]
        if value is not None:
            t.copy_(value)
        whole = box == tuple((0, d) for d in dims)
        key = name if whole else f"{name}@{','.join(str(a) for a, _ in box)}"
        if key in state:  # unpickled: the tensors are new, the values stay
            t.copy_(state[key].reshape(shape))
        state[key] = t.view(s.shape) if whole and dims == s.dims and name != "step" else t
        own[name.partition(".")[0]] = t
        parts.append((key, box, t, counts))
        return t

    @torch.no_grad()
    def full_state_dict(self) -> dict:
        """The state of all ranks, on the CPU, in torch's format. A collective.

        Complete and equal on every rank, alike at every world size, nothing in it but tensors and
        plain values (torch.load takes it with weights_only=True); a function as scale is left out.
        """
        if self._rounds is None:
            self._build()
        state = {s.index: {} for s in self._slots}
        for (s, name), (dims, dtype, parts) in self._parts.items():
            whole = self._whole(s, dims, dtype, [(box, t) for _, box, t, counts in parts if counts])
            shape = () if name == "step" else s.shape if dims == s.dims else dims[1:]
            state[s.index][name] = whole.cpu().view(shape)
        for s in self._slots:
            if not s.muon and s.group["every"] > 1:  # the mean of what the ranks have gathered
                here = _gathers(s.group) and s.first and s.p.grad is not None
                parts = [(s.box, s.local(s.p.grad))] if here else []
                whole = self._whole(s, s.dims, s.p.dtype, parts)
                whole /= 1 if s.sharded else s.home.size
                state[s.index]["grad"] = whole.cpu().view(s.shape)
        groups = super().state_dict()["param_groups"]
        groups = [{k: v for k, v in g.items() if not callable(v)} for g in groups]
        return {"state": state, "param_groups": groups}

    def _whole(self, s: Slot, dims, dtype: torch.dtype, parts: list) -> Tensor:
        """What all ranks' (box, tensor) make together, on every rank; zero where nobody has any."""
        whole = torch.zeros(dims, dtype=dtype, device=s.device)
        for box, t in parts:
            part = whole[_slices(box)]
            part.copy_(t.reshape(part.shape))
        if s.home.size > 1:
            dist.all_reduce(whole, group=s.home.group)
        return whole

    def load_state_dict(self, state_dict: dict) -> None:
        """Load full_state_dict() at any world size, or this rank's state_dict() at its own.

        Tensors keep the dtype that they have here. ValueError names the first parameter of which
        something is missing.
        """
        saved = state_dict["param_groups"]
        if len(saved) == len(self.param_groups):  # keys that are not saved keep their value
            mine = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
            saved = [{**m, **s} for m, s in zip(mine, saved, strict=True)]
        super().load_state_dict({**state_dict, "state": {}, "param_groups": saved})
        ids = itertools.chain(*(g["params"] for g in saved))
        self._build({k: state_dict["state"].get(i, {}) for k, i in enumerate(ids)})

    def _fill(self, saved: dict[int, dict]) -> None:
        for s in self._slots:
            grad = saved.get(s.index, {}).get("grad")
            if _gathers(s.group) and grad is not None:
                s.p.grad = torch.zeros_like(s.p)
                part = grad.reshape(s.dims)[_slices(s.box)]
                s.local(s.p.grad).copy_(part.reshape(s.local(s.p).shape))
        for (s, name), (dims, _, parts) in self._parts.items():
            values = saved.get(s.index)
            for key, box, t, _ in parts if values is not None else ():
                value = values.get(key)
                if value is None and name in values and values[name].numel() == math.prod(dims):
                    value = values[name].reshape(dims)[_slices(box)]
                if value is None or value.numel() != t.numel():
                    raise ValueError(
                        f"the state to load lacks {key} of parameter {s.name}: it is a part for "
                        "another rank or world size; save and load full_state_dict() instead"
                    )
                t.copy_(value.reshape(t.shape))

    def __getstate__(self) -> dict:  # for pickle and deepcopy; process groups stay behind
        own = "reduce_grads nonfinite state_dtype compute_dtype deterministic compile grad_norm"
        return {**super().__getstate__(), **{key: getattr(self, key) for key in own.split()}}

    def __setstate__(self, state: dict) -> None:
        lost = {"_process_group": None, "_tp_group": None, "_compiled": {}}
        self.__dict__.update({**lost, **self.__dict__})
        super().__setstate__(state)
        self._rounds = None  # the next step builds them

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns the closure's loss. A parameter without gradient stays as it is.

        FloatingPointError, on all ranks and before anything changes, if a gradient is not finite;
        RuntimeError at the first step if the parameters are not the same on all ranks.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._rounds is None:
            self._build()
        if not self._checked:
            self._check_alike()
            self._checked = True
        due = [r for r in self._rounds if r.due()]
        grads = [self._grad(s) for s in self._slots]
        for r in due:
            r.start(grads)
        received = [r.gradients() for r in due]
        present, bad = self._verdict(grads, due, received)
        skip = bad and (self.nonfinite == "skip" or hasattr(self, "found_inf"))
        if bad and self.nonfinite != "ignore" and not skip:
            raise FloatingPointError(
                f"the gradient of parameter {bad[0]} (and {len(bad) - 1} others) is not finite; "
                'nothing was changed; nonfinite="skip" leaves such steps out'
            )
        for group in self.param_groups:
            if not group["use_muon"]:
                group["calls"] = (group["calls"] + 1) % group["every"]
        if skip:
            return loss
        self._weights = [s.view(s.p) for s in self._slots]
        for r, gs in zip(due, received, strict=True):
            if r.reduces:  # zeros where no rank had a gradient
                gs = [g if present[q.slot] else None for q, g in zip(r.mine, gs, strict=True)]
            (self._muon if r.muon else self._adam)(r, gs)
            r.publish()
        for r in due:
            r.finish(present)
        for s, w in zip(self._slots, self._weights, strict=True):
            if not s.whole and w.data_ptr() != (p := s.local(s.p)).data_ptr():
                p.copy_(w.view(p.shape))  # channels_last has no such view
        self._weights = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """torch's, but the gradients of an Adam group with `every` gather until its next step."""
        kept = [(p, p.grad) for g in self.param_groups if _gathers(g) for p in g["params"]]
        for p, _ in kept:
            p.grad = None
        super().zero_grad(set_to_none)
        for p, grad in kept:
            p.grad = grad

    def _grad(self, s: Slot) -> Tensor | None:
        g = s.p.grad if s.p.requires_grad else None
        if g is None:
            return None
        if g.layout != torch.strided:
            raise ValueError(f"parameter {s.name} has a {g.layout} gradient: make it dense")
        if s.dtensor and g.placements != s.p.placements:
            g = g.redistribute(placements=s.p.placements)
        g, scale = s.view(g), getattr(self, "grad_scale", None)
        return g if scale is None else g / scale  # a GradScaler's, which may differ between ranks

    def _verdict(self, grads: list, due: list, received: list) -> tuple[list[float], list[str]]:
        """(on how many ranks each parameter has a gradient, names of the bad ones); grad_norm."""
        device = self._rounds[0].device if self._rounds else torch.device("cpu")
        wide = torch.float32 if device.type == "mps" else torch.float64
        present = torch.tensor([g is not None for g in grads], dtype=wide, device=device)
        squares = torch.zeros_like(present)
        for r, gs in zip(due, received, strict=True):
            some = [(q.slot, g) for q, g in zip(r.mine, gs, strict=True) if g is not None]
            if some and r.share:
                slots, gs = zip(*some, strict=True)
                norms = _norms(gs, wide).square_().mul_(r.share)
                squares.index_add_(0, torch.tensor(slots, device=device), norms.to(device))
        stats = torch.stack([present, squares])
        if self._world.size > 1:
            dist.all_reduce(stats, group=self._world.group)
        present, squares = stats.tolist()
        bad = [s.name for s, x in zip(self._slots, squares, strict=True) if not math.isfinite(x)]
        self.grad_norm = math.nan if bad else math.sqrt(sum(squares))
        return present, bad

    def _check_alike(self) -> None:
        """Names, shapes and the values of plain parameters, once: a swap must not go unnoticed."""
        plain = [0.0 if s.sharded else s.p.sum(dtype=torch.float64).item() for s in self._slots]
        lines = [f"{s.name} {s.dims} {s.p.dtype} {s.muon} with sum {x:.6g}"
                 for s, x in zip(self._slots, plain, strict=True)]  # fmt: skip
        world, digest = self._world, hashlib.sha256("\n".join(lines).encode()).hexdigest()
        for message in (digest, lines):  # the lines of all ranks only if the digests differ
            answers = [None] * world.size
            dist.all_gather_object(answers, message, group=world.group)
            if message is digest and set(answers) == {digest}:
                return
        row = next(row for row in itertools.zip_longest(*answers) if len(set(row)) > 1)
        raise RuntimeError(
            f"parameters differ between ranks: {' / '.join(map(str, row))}; give them in the same "
            "order everywhere, and broadcast the model's weights, before the first step"
        )

    def _muon(self, r: Round, grads: list[Tensor | None]) -> None:
        limit = 1 if self.deterministic else BATCH.get(r.device.type, 1 << 26)
        for batch in r.batches.values():
            first = r.mine[batch[0]]
            group, size = self._slots[first.slot].group, max(1, limit // first.numel)
            todo = [(r.mine[k], grads[k]) for k in batch if grads[k] is not None]
            for k in range(0, len(todo), size):
                qs, gs = zip(*todo[k : k + size], strict=True)
                r.give(qs, self._updates(qs, gs, group))

    def _updates(self, qs: Sequence[Piece], gs: Sequence[Tensor], group: dict) -> list[Tensor]:
        """Scaled updates of matrices of one shape or its transpose; advances their momentum."""
        shapes = [(q.rows, q.cols) for q in qs]
        flips = [shape != shapes[0] for shape in shapes]

        def turn(ts: Sequence[Tensor]) -> Sequence[Tensor]:
            return [t.mT if f else t for t, f in zip(ts, flips, strict=True)] if any(flips) else ts

        own, mu = [self._own[q] for q in qs], float(group["momentum"])
        momenta = turn([o["momentum_buffer"] for o in own])
        G, M = torch.stack(turn(gs)).float(), torch.stack(momenta).float()
        torch._foreach_copy_(momenta, M.lerp_(G, 1 - mu).unbind())
        X = self._orthogonalized(G.lerp_(M, mu) if group["nesterov"] else M, group)
        if group["beta2"] is not None:
            second = turn([o["second_moment"] for o in own])
            short = -1 if X.size(-2) >= X.size(-1) else -2
            mean = X.float().square().mean(short, keepdim=True)
            V = torch.stack(second).lerp_(mean, 1 - group["beta2"])
            torch._foreach_copy_(second, V.unbind())
            norm = functools.partial(torch.linalg.vector_norm, dim=(-2, -1), keepdim=True)
            D = X / V.clamp(min=1e-10).sqrt()
            X = D.mul_(norm(X) / norm(D).clamp(min=1e-30))
        f, rms = group["scale"], group["rms"]
        scales = [float(f(*x) if callable(f) else SCALES[f](*x, rms)) for x in shapes]
        if any(x != 1 for x in scales):
            X = X.mul_(torch.tensor(scales, dtype=X.dtype, device=X.device).view(-1, 1, 1))
        return turn(X.unbind())

    def _orthogonalized(self, U: Tensor, group: dict) -> Tensor:
        f, triples = _orthogonalize, _triples(group["coefficients"], group["ns_steps"])
        key = U.shape, U.device, triples, self.compute_dtype or _compute_dtype(U.device)
        if self.compile:  # a code object for each shape: dynamo limits how many one may see
            if key not in self._compiled:
                own = types.FunctionType(f.__code__.replace(), globals())
                self._compiled[key] = torch.compile(own, dynamic=False)
            f = self._compiled[key]
        return f(U, *key[2:])

    def _apply(self, qs: Sequence[Piece], weights: list[Tensor], updates: list[Tensor]) -> None:
        group = self._slots[qs[0].slot].group
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        targets = self._targets(qs, weights)
        if decay and group["cautious"]:
            for t, u in zip(targets, updates, strict=True):
                t.sub_(t * (t.sign() == u.sign()), alpha=lr * decay)
        elif decay:
            torch._foreach_mul_(targets, 1 - lr * decay)
        torch._foreach_add_(targets, updates, alpha=-lr)
        if targets is not weights:
            torch._foreach_copy_(weights, targets)

    def _targets(self, qs: Sequence[Piece], weights: list[Tensor]) -> list[Tensor]:
        """The weights or their fp32 masters; what somebody else wrote into a weight counts."""
        if not self._slots[qs[0].slot].low:
            return weights
        masters = [self._own[q]["master"] for q in qs]
        for m, w in zip(masters, weights, strict=True):
            m.copy_(torch.where(m.to(w.dtype) == w, m, w.float()))
        return masters

    def _adam(self, r: Round, grads: list[Tensor | None]) -> None:
        todo = defaultdict(list)
        for q, g in zip(r.mine, grads, strict=True):
            group, w = self._slots[q.slot].group, r.cut(self._weights, q)
            if g is not None:
                todo[id(group)].append((q, w, g.view_as(w)))
        for items in todo.values():
            qs, weights, gs = map(list, zip(*items, strict=True))
            group, targets = self._slots[qs[0].slot].group, self._targets(qs, weights)
            gs = [g.to(t.dtype) for g, t in zip(gs, targets, strict=True)]
            first, second, steps = (
                [self._own[q][key] for q in qs] for key in ("exp_avg", "exp_avg_sq", "step")
            )
            adamw(
                targets, gs, first, second, [], steps, fused=True, amsgrad=False, maximize=False,
                lr=float(group["lr"]), beta1=group["betas"][0], beta2=group["betas"][1],
                eps=group["eps"], weight_decay=group["weight_decay"],
            )  # fmt: skip
            if targets is not weights:
                torch._foreach_copy_(weights, targets)


def _norms(ts: Sequence[Tensor], wide: torch.dtype) -> Tensor:
    """The L2 norm of each tensor, in `wide`; on a CPU, where fp64 is slow, only if fp32 fails."""
    if ts[0].device.type == "cpu":
        dtype = torch.promote_types(ts[0].dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(ts, dtype=dtype)).to(wide)
        if norms.max() < 1e15 and norms.min() > 1e-15:  # no square is lost, and none is NaN
            return norms
    return torch.stack(torch._foreach_norm(ts, dtype=wide))


def param_groups(model: nn.Module, verbose: bool = False, adam: dict | None = None, **muon) -> list:
    """Two groups: hidden matrices for Muon, the rest for AdamW; `adam` and **muon are options.

    For AdamW: embeddings and what is tied to them, a Linear onto as many outputs as an embedding
    has entries or named as an output head, and parameters of fewer than two dimensions. `verbose`
    prints the table.
    """
    modules = dict(model.named_modules())
    tables = [m for m in modules.values() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    sizes, aside = {m.num_embeddings for m in tables}, {id(m.weight) for m in tables}
    for name, m in modules.items():
        head = name.rpartition(".")[2] in ("lm_head", "head", "output", "unembed", "classifier")
        if isinstance(m, nn.Linear) and (head or m.out_features in sizes):
            aside.add(id(m.weight))
    groups = [{"params": [], **muon}, {"params": [], "use_muon": False, "lr": 3e-3, **(adam or {})}]
    for name, p in model.named_parameters():
        rest = p.ndim < 2 or id(p) in aside
        groups[rest]["params"].append((name, p))
        if verbose:
            print(f"{'adamw' if rest else 'muon':6}{name:48}{tuple(p.shape)}")
    return [g for g in groups if g["params"]]
