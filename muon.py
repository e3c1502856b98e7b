"""Muon: momentum, orthogonalized; batched, distributed, in one file that depends on torch alone.

    from muon import Muon, param_groups
    optimizer = Muon(param_groups(model), lr=0.02, momentum=0.95)
    for inputs, targets in batches:
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
"""

from __future__ import annotations

import functools
import hashlib
import heapq
import itertools
import math
import types
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.adamw import adamw

if dist.is_available():
    from torch.distributed.tensor import DTensor
else:  # a build without torch.distributed
    DTensor = type(None)

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    "newton_schulz": ((3.4445, -4.7750, 2.0315),),
    "quintic5": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


def _triples(coefficients, steps: int) -> list[tuple[float, float, float]]:
    table = COEFFICIENTS[coefficients] if isinstance(coefficients, str) else coefficients
    return [tuple(table[min(t, len(table) - 1)]) for t in range(steps)]


def _newton_schulz(X: Tensor, triples) -> Tensor:
    for a, b, c in triples:
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)
        X = torch.baddbmm(X, B, X, beta=a)
    return X


def _gram_newton_schulz(X: Tensor, triples) -> Tensor:
    Q = R = None
    for t, (a, b, c) in enumerate(triples):
        if t % 3 == 2 or R is None:
            X = X if Q is None else Q @ X
            Q, R = None, X @ X.mT
        Z = torch.baddbmm(R, R, R, beta=b, alpha=c)
        if Q is None:
            Q = Z.clone()
            Q.diagonal(dim1=-2, dim2=-1).add_(a)
        else:
            Q = torch.baddbmm(Q, Q, Z, beta=a)
        if t + 1 < len(triples) and (t + 1) % 3 != 2:
            P = torch.baddbmm(R, R, Z, beta=a)
            R = torch.baddbmm(P, Z, P, beta=a)
    return Q @ X


def _orthogonalize(G: Tensor, triples, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or (torch.bfloat16 if G.is_cuda else torch.float32)
    X = G.mT if G.size(-2) > G.size(-1) else G
    if X.numel() == 0:
        return G.to(dtype)
    X = X.float()
    top = torch.maximum(X.amax((-2, -1), keepdim=True), -X.amin((-2, -1), keepdim=True))
    X = X / top.masked_fill(top == 0, 1)
    norm = torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)
    X.div_(norm.masked_fill(norm == 0, 1).mul_(1.02))
    X = X.to(dtype)
    gram = dtype != torch.bfloat16 and X.size(-1) >= 1.5 * X.size(-2)
    X = (_gram_newton_schulz if gram else _newton_schulz)(X, triples)
    return X.mT if G.size(-2) > G.size(-1) else X


def zeropower_via_newtonschulz5(
    G: Tensor, steps: int = 5, coefficients="polar_express", dtype: torch.dtype | None = None
) -> Tensor:
    O = _orthogonalize(G.reshape(-1, *G.shape[-2:]), _triples(coefficients, steps), dtype)
    return O.reshape(G.shape).to(G.dtype)


# ------------------------------------------------------------------------------------ the plan

SHARD_ABOVE = 16384  # elements: a smaller Adam parameter has one owner instead of a shard a rank
JOIN_BELOW = 65536  # elements: on a CPU a larger matrix is not transposed to join a batch


class Comm(NamedTuple):
    """A process group as the plan sees it; (None, 1, 0) is a rank on its own."""

    group: Any
    size: int
    rank: int


ALONE = Comm(None, 1, 0)


class Piece(NamedTuple):
    """Rows start:stop of slice i of one parameter seen as a stack (n, R, C); one rank owns it."""

    slot: int  # index of the parameter over all groups
    number: int  # index of the piece in its parameter
    i: int
    start: int
    stop: int
    cols: int
    cost: float  # FLOPs of a Muon step, elements of an Adam step

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    def overlap(self, box) -> tuple | None:
        """Where this piece meets a box: its index in the box's tensor, and inside the piece."""
        (n0, n1), (r0, r1), (c0, c1) = box
        a, b = max(self.start, r0), min(self.stop, r1)
        if not n0 <= self.i < n1 or a >= b or c0 >= c1:
            return None
        inside = (slice(a - self.start, b - self.start), slice(c0, c1))
        return (self.i - n0, slice(a - r0, b - r0)), inside


class Slot:
    """One parameter: how it lies on the ranks, and the pieces it is cut into."""

    def __init__(self, index: int, name: str, p: Tensor, group: dict, world: Comm) -> None:
        self.index, self.name, self.p, self.group = index, name, p, group
        self.muon = group["use_muon"]
        self.dims = stack_shape(p.shape)
        self.comm, self.boxes, self.copies = _layout(p, self.dims, name, world)
        self.home = self.comm
        if self.boxes is None:
            if not self.muon:
                self.dims = (1, self.dims[0] * self.dims[1], self.dims[2])
            self.box = tuple((0, d) for d in self.dims)
        else:
            self.box = self.boxes[self.comm.rank]
            if not self.muon:  # Adam works element by element: a shard is updated where it lies
                self.comm = ALONE
        self.local = tuple(b - a for a, b in self.box)
        self.pieces = self._muon_pieces() if self.muon else self._adam_pieces()
        # a piece that is the whole local tensor needs no view
        self.whole = len(self.pieces) == 1 and (not self.muon or p.ndim == 2)
        self.low = p.dtype in (torch.bfloat16, torch.float16)  # wants an fp32 master

    def _muon_pieces(self) -> list[Piece]:
        n, R, C = self.dims
        split, heads = self.group["split"], self.group["heads"]
        rows = list(split) if split else [R // heads] * heads if heads else [R]
        if sum(rows) != R or min(rows) < 0:
            what = f"split={split}" if split else f"heads={heads}"
            raise ValueError(f"{what} does not divide the {R} rows of parameter {self.name}")
        stops = list(itertools.accumulate(rows))
        cuts = [(i, e - r, e) for i in range(n) for r, e in zip(rows, stops, strict=True)]
        return [
            Piece(self.index, k, i, a, b, C, flops(b - a, C, self.group["ns_steps"]))
            for k, (i, a, b) in enumerate(cuts)
            if (b - a) * C
        ]

    def _adam_pieces(self) -> list[Piece]:
        numel, (_, R, C) = math.prod(self.local), self.dims
        if self.boxes is not None:
            R, C = numel, 1
        block = -(-R // self.comm.size) if numel >= SHARD_ABOVE else R
        cuts = [(a, min(a + block, R)) for a in range(0, R, block)] if numel else []
        return [Piece(self.index, k, 0, a, b, C, (b - a) * C) for k, (a, b) in enumerate(cuts)]

    def cut(self, t: Tensor, piece: Piece) -> Tensor:
        """The piece's (rows, cols) of t, the parameter or its gradient, whole on this rank."""
        if self.whole:
            return t
        return t.reshape(self.dims)[piece.i, piece.start : piece.stop]


def stack_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """A parameter's shape as a stack of matrices (n, R, C); kernels of 4-D and above flatten."""
    if len(shape) == 3:
        return tuple(shape)
    return 1, (shape[0] if len(shape) else 1), math.prod(shape[1:])


def flops(rows: int, cols: int, steps: int = 5, gram: bool | None = None) -> float:
    """FLOPs of one orthogonalization of a rows x cols matrix."""
    m, n = sorted((rows, cols))
    if gram is None:
        gram = n >= 1.5 * m
    return float(8 * m * m * n + 28 * m**3 if gram else steps * (4 * m * m * n + 2 * m**3))


def assign(costs: Sequence[float], world_size: int) -> list[int]:
    """Owner of each item by longest-processing-time; ties go by position, so all ranks agree."""
    owners = [0] * len(costs)
    heap = [(0.0, rank) for rank in range(world_size)]
    for k in sorted(range(len(costs)), key=lambda k: (-costs[k], k)):
        load, owners[k] = heapq.heappop(heap)
        heapq.heappush(heap, (load + costs[k], owners[k]))
    return owners


def _layout(p: Tensor, dims, name: str, world: Comm):
    return world, None, None


# ------------------------------------------------------------------------------------ transport


class Local:
    """A round of pieces that one rank updates alone: nothing travels."""

    def __init__(self, comm: Comm, slots: list[Slot], owned: list[list[Piece]], opts) -> None:
        self.comm, self.slots, self.owned, self.opts = comm, slots, owned, opts
        self.mine = owned[comm.rank]
        first = slots[next(p for ps in owned for p in ps).slot]
        local = _local(first.p)
        self.dtype, self.device, self.muon, self.group = local.dtype, local.device, first.muon, first.group
        self.every = 1 if self.muon else self.group["every"]

    def start(self, grads: list[Tensor | None]) -> None:
        """Begin to bring the gradients to their owners."""
        self.grads = grads

    def gradients(self) -> list[Tensor | None]:
        """The gradient of each piece that this rank owns, or None where the owner has none."""
        grads, self.grads = self.grads, None
        return [
            None if grads[q.slot] is None else self.slots[q.slot].cut(grads[q.slot], q)
            for q in self.mine
        ]

    def apply(self, apply: Callable, qs: list[Piece], updates: list[Tensor]) -> None:
        """Take the scaled updates of some pieces that this rank owns."""
        apply(self.group, qs, updates)

    def publish(self, weights: list[Tensor]) -> None:
        """Begin to bring the owners' new weights to all ranks."""

    def finish(self, weights: list[Tensor]) -> None:
        """Write what came."""


class Replicated(Local):
    """Every rank holds the parameters; the owner updates and the new weights are gathered."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.length = max(sum(q.numel for q in qs) for qs in self.owned)
        self.sizes = []  # of the flat buffer: each rank's pieces, then its padding
        for qs in self.owned:
            self.sizes += [q.numel for q in qs]
            self.sizes.append(self.length - sum(q.numel for q in qs))

    def _flat(self, tensors: list[Tensor | None], qs: list[Piece]) -> list[Tensor]:
        """The pieces qs of `tensors` as 1-D, with zeros for None and for the padding."""
        parts = [
            self._zeros(q.numel)
            if tensors[q.slot] is None
            else self.slots[q.slot].cut(tensors[q.slot], q).reshape(-1)
            for q in qs
        ]
        return [*parts, self._zeros(self.length - sum(q.numel for q in qs))]

    def _zeros(self, n: int) -> Tensor:
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(n)

    def start(self, grads: list[Tensor | None]) -> None:
        if not self.opts.reduce_grads:
            return super().start(grads)
        self.send = torch.cat([t for qs in self.owned for t in self._flat(grads, qs)])
        if self.opts.unscale is not None:
            self.send.mul_(self.opts.unscale)
        if self.opts.deterministic:
            self.recv = torch.empty_like(self.send)
            work = dist.all_to_all_single(self.recv, self.send, group=self.comm.group, async_op=True)
        else:
            self.recv = self.send.new_empty(self.length)
            work = dist.reduce_scatter_tensor(
                self.recv, self.send, dist.ReduceOp.AVG, group=self.comm.group, async_op=True
            )
        self.work = work

    def gradients(self) -> list[Tensor | None]:
        if not self.opts.reduce_grads:
            return super().gradients()
        self.work.wait()
        total = self.recv
        if self.opts.deterministic:  # a sum in the order of the ranks, whoever owns the piece
            total = functools.reduce(torch.add, self.recv.view(self.comm.size, -1)) / self.comm.size
        self.send = self.recv = self.work = None
        parts = total.split([*[q.numel for q in self.mine], self.length - sum(q.numel for q in self.mine)])
        return [t.view(q.rows, q.cols) for t, q in zip(parts, self.mine, strict=False)]

    def publish(self, weights: list[Tensor]) -> None:
        self.send = torch.cat(self._flat(weights, self.mine))
        self.recv = self.send.new_empty(self.length * self.comm.size)
        self.work = dist.all_gather_into_tensor(
            self.recv, self.send, group=self.comm.group, async_op=True
        )

    def finish(self, weights: list[Tensor]) -> None:
        self.work.wait()
        parts = iter(self.recv.split(self.sizes))
        to, of = [], []
        for rank, qs in enumerate(self.owned):
            for q, part in zip([*qs, None], parts, strict=False):
                if q is None or rank == self.comm.rank:
                    continue
                to.append(self.slots[q.slot].cut(weights[q.slot], q))
                of.append(part.view_as(to[-1]))
        if to:
            torch._foreach_copy_(to, of)
        self.send = self.recv = self.work = None


class Batch:
    """Matrices of one shape that this rank owns: one momentum tensor, one orthogonalization."""

    def __init__(self, pieces: list[Piece], places: list[int], group: dict, device, opts) -> None:
        self.pieces, self.places, self.group = pieces, places, group
        self.rows, self.cols = rows, cols = pieces[0].rows, pieces[0].cols
        self.flip = [q.rows != rows for q in pieces]  # transposed to join the others
        self.momentum = torch.zeros(len(pieces), rows, cols, dtype=opts.state_dtype, device=device)
        self.second = None
        if group["beta2"] is not None:
            self.short = -1 if rows >= cols else -2
            shape = (rows, 1) if rows >= cols else (1, cols)
            self.second = torch.zeros(len(pieces), *shape, device=device)
        scales = [_scale(group["scale"], group["rms"], q.rows, q.cols) for q in pieces]
        self.scale = None
        if set(scales) != {1.0}:
            self.scale = torch.tensor(scales, device=device).view(-1, 1, 1)

    def turn(self, tensors: Sequence[Tensor], start: int = 0) -> list[Tensor]:
        """Tensors of pieces start.. from the parameter's orientation to the batch's, or back."""
        return [t.mT if self.flip[start + k] else t for k, t in enumerate(tensors)]

    def runs(self, grads: list[Tensor | None], limit: int) -> Iterable[tuple[int, int]]:
        """Stretches of at most `limit` neighbouring matrices that have a gradient."""
        start = 0
        for stop in range(1, len(grads) + 1):
            if grads[stop - 1] is None:
                start = stop
            elif stop == len(grads) or grads[stop] is None or stop - start == limit:
                yield start, stop
                start = stop


# ------------------------------------------------------------------------------- the optimizer


class Muon(torch.optim.Optimizer):
    """Muon for hidden matrices, AdamW for groups with use_muon=False, on any number of ranks."""

    _step_supports_amp_scaling = True  # GradScaler: one decision for all ranks, taken in step()

    def __init__(
        self,
        params,
        lr: float | Tensor = 0.02,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        *,
        coefficients: str | Sequence = "polar_express",
        scale: str | Callable[[int, int], float] = "original",
        rms: float = 0.2,
        cautious: bool = False,
        beta2: float | None = None,
        split: Sequence[int] | None = None,
        heads: int | None = None,
        reduce_grads: bool = False,
        nonfinite: str = "raise",
        state_dtype: torch.dtype = torch.float32,
        compute_dtype: torch.dtype | None = None,
        deterministic: bool = False,
        compile: bool = False,
        process_group: Any = None,
        batch_bytes: int = 1 << 28,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._rounds = None
        self.reduce_grads, self.nonfinite, self.deterministic = reduce_grads, nonfinite, deterministic
        self.state_dtype, self.compute_dtype, self.compile = state_dtype, compute_dtype, compile
        self.process_group, self.batch_bytes = process_group, batch_bytes
        self.unscale = None
        self.grad_norm = 0.0
        self._building = True
        defaults = dict(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            coefficients=coefficients,
            scale=scale,
            rms=rms,
            cautious=cautious,
            beta2=beta2,
            split=split,
            heads=heads,
            use_muon=True,
        )
        super().__init__(params, defaults)
        self._building = False
        self._build()

    def add_param_group(self, group: dict) -> None:
        if not group.get("use_muon", True):
            for key, value in dict(betas=(0.9, 0.95), eps=1e-8, every=1, calls=0).items():
                group.setdefault(key, value)
        super().add_param_group(group)
        if not self._building:
            self._build()

    @torch.no_grad()
    def _build(self) -> None:
        group = self.process_group
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        world = Comm(group, dist.get_world_size(group), dist.get_rank(group)) if group else ALONE
        self._world = world
        self._slots = []
        for gi, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"{k} of group {gi}" for k in range(len(group["params"]))]
            for name, p in zip(names, group["params"], strict=True):
                self._slots.append(Slot(len(self._slots), name, p, group, world))
        by_comm = defaultdict(list)
        for slot in self._slots:
            by_comm[slot.comm, slot.muon].extend(slot.pieces)
        rounds = {}
        for (comm, muon), pieces in by_comm.items():
            for q, owner in zip(pieces, assign([q.cost for q in pieces], comm.size), strict=True):
                slot = self._slots[q.slot]
                local = _local(slot.p)
                key = (comm, muon, local.dtype, local.device, id(slot.group))
                rounds.setdefault(key, [[] for _ in range(comm.size)])[owner].append(q)
        self._rounds = []
        for (comm, *_), owned in rounds.items():
            kind = Local if comm.size == 1 else Replicated
            self._rounds.append(kind(comm, self._slots, owned, self))
        old, self._entries = self.state, []
        for r in self._rounds:
            if r.muon:
                self._muon_state(r)
            else:
                self._adam_state(r)

    def _muon_state(self, r) -> None:
        r.batches = []
        shapes = defaultdict(list)
        for place, q in enumerate(r.mine):
            join = r.device.type != "cpu" or q.numel <= JOIN_BELOW
            shape = tuple(sorted((q.rows, q.cols))) if join else (q.rows, q.cols)
            shapes[shape].append(place)
        for places in shapes.values():
            batch = Batch([r.mine[k] for k in places], places, r.group, r.device, self)
            r.batches.append(batch)
            for q, m in zip(batch.pieces, batch.turn(batch.momentum), strict=True):
                self.state[self._slots[q.slot].p]["momentum_buffer"] = m

    def _adam_state(self, r) -> None:
        r.states = []
        for q in r.mine:
            slot = self._slots[q.slot]
            t = slot.cut(_local(slot.p), q)
            state = dict(
                step=torch.zeros((), device=t.device),
                exp_avg=torch.zeros_like(t, dtype=torch.float32),
                exp_avg_sq=torch.zeros_like(t, dtype=torch.float32),
            )
            if r.every > 1:
                state["grad_sum"] = torch.zeros_like(t, dtype=torch.float32)
            r.states.append(state)
            self.state[slot.p].update(state)

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._rounds is None:
            self._build()
        weights = [_local(s.p) for s in self._slots]
        grads = [
            None if s.p.grad is None or not s.p.requires_grad else _local(s.p.grad)
            for s in self._slots
        ]
        for r in self._rounds:
            r.start(grads)
        received = [r.gradients() for r in self._rounds]
        present, finite = self._agree(grads, received)
        if not finite and self.nonfinite != "ignore":
            if self.nonfinite == "raise":
                raise FloatingPointError("the gradient is not finite")
            return loss
        for r, gs in zip(self._rounds, received, strict=True):
            if self.reduce_grads:
                gs = [g if present[q.slot] else None for g, q in zip(gs, r.mine, strict=True)]
            due = r.muon or (r.group["calls"] + 1) % r.every == 0
            if r.muon:
                self._muon(r, gs, weights)
            else:
                self._adam(r, gs, weights, due)
            if due:
                r.publish(weights)
        for r in self._rounds:
            if r.muon or (r.group["calls"] + 1) % r.every == 0:
                r.finish(weights)
        for group in self.param_groups:
            if "calls" in group:
                group["calls"] += 1
        return loss

    def _agree(self, grads, received):
        stats = [0.0] * 1 + [float(g is not None) for g in grads]
        stats = torch.tensor(stats, dtype=torch.float64)
        for gs in received:
            gs = [g for g in gs if g is not None]
            if gs:
                stats[0] += torch.stack(torch._foreach_norm(gs, 2, dtype=torch.float64)).square().sum().cpu()
        if self._world.size > 1:
            device = self._rounds[0].device
            stats = stats.to(device)
            dist.all_reduce(stats, group=self._world.group)
        total, *present = stats.tolist()
        self.grad_norm = math.sqrt(total) if total >= 0 else math.nan
        return present, math.isfinite(total)

    def _muon(self, r, grads, weights) -> None:
        group = r.group
        mu = float(group["momentum"])
        triples = _triples(group["coefficients"], group["ns_steps"])

        def apply(group, qs, updates):
            lr = float(group["lr"])
            targets = [self._slots[q.slot].cut(weights[q.slot], q) for q in qs]
            if group["weight_decay"]:
                torch._foreach_mul_(targets, 1 - lr * group["weight_decay"])
            torch._foreach_add_(targets, updates, alpha=-lr)

        for batch in r.batches:
            gs = batch.turn([grads[k] for k in batch.places])
            for a, b in batch.runs(gs, max(1, self.batch_bytes // (4 * batch.rows * batch.cols))):
                G = torch.stack(gs[a:b]).to(torch.float32)
                M = batch.momentum[a:b]
                M.lerp_(G, 1 - mu)
                U = G.lerp_(M, mu) if group["nesterov"] else M
                O = _orthogonalize(U, triples, self.compute_dtype)
                if batch.scale is not None:
                    O = O * batch.scale[a:b]
                r.apply(apply, batch.pieces[a:b], batch.turn(O.unbind(), a))

    def _adam(self, r, grads, weights, due) -> None:
        group = r.group
        ps, gs, states = [], [], []
        for q, g, state in zip(r.mine, grads, r.states, strict=True):
            if g is None:
                continue
            w = self._slots[q.slot].cut(weights[q.slot], q)
            g = g.view_as(w)
            if r.every > 1:
                g = state["grad_sum"].add_(g)
            ps.append(w)
            gs.append(g)
            states.append(state)
        if not due or not ps:
            return
        adamw(
            ps,
            gs,
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        if r.every > 1:
            torch._foreach_zero_(gs)


def _scale(scale, rms, rows, cols) -> float:
    if callable(scale):
        return float(scale(rows, cols))
    return {
        "original": math.sqrt(max(1, rows / cols)),
        "match_rms_adamw": rms * math.sqrt(max(rows, cols)),
        "spectral": math.sqrt(rows / cols),
    }[scale]


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t


def param_groups(model: nn.Module, **muon) -> list[dict]:
    """Hidden matrices for Muon; embeddings, head, gains and biases for AdamW."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    vocab = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear) and m.out_features in vocab}
    hidden, rest = [], []
    for name, p in model.named_parameters():
        is_hidden = p.ndim >= 2 and id(p) not in embeddings | heads
        (hidden if is_hidden else rest).append((name, p))
    return [dict(params=hidden, **muon), dict(params=rest, use_muon=False, lr=3e-3)]
