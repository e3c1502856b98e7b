"""Muon on several gloo ranks: every layout equals one process on the whole matrices."""

from __future__ import annotations

import io
import math
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import muon
from muon import Muon
from ranks import run_ranks

# five matrices, a stack, a kernel; then a table that is sharded, small ones that are not
HIDDEN = [(8, 24), (24, 8), (16, 16), (16, 16), (10, 30), (3, 6, 8), (6, 3, 2, 2)]
REST = [(3000, 8), (7,), (), (33, 2)]
OPTIONS = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
ADAM = {"use_muon": False, "lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.05}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def tensor(shape, *seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(sum(s * 1000**k for k, s in enumerate(seed)))
    return torch.randn(shape, generator=g)


def weights(shapes, dtype=torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(tensor(s, k).to(dtype)) for k, s in enumerate(shapes)]


def local_grad(shape, step: int, k: int, rank: int, seen=lambda step, k, rank: True):
    """The gradient that a rank computes for parameter k; None where it has not seen it."""
    return tensor(shape, step, k, rank, 7) if seen(step, k, rank) else None


def mean_grad(shape, step: int, k: int, ranks: int, seen=lambda step, k, rank: True):
    gs = [local_grad(shape, step, k, r, seen) for r in range(ranks)]
    if all(g is None for g in gs):
        return None
    total = torch.zeros(shape)
    for g in gs:
        total = total + (0 if g is None else g)
    return total / ranks


def groups(ps, hidden: int, every: int = 2, **options):
    first = {"params": ps[:hidden], **OPTIONS, **options}
    return [first, {"params": ps[hidden:], "every": every, **ADAM}] if ps[hidden:] else [first]


def train(opt, ps, grad, steps: int = 4, start: int = 0) -> None:
    for t in range(start, start + steps):
        opt.zero_grad()
        for k, p in enumerate(ps):
            if (g := grad(p.shape, t, k)) is not None:
                p.grad = g.to(p.dtype) if p.grad is None else p.grad + g.to(p.dtype)
        opt.step()


def alone(sources: int, steps=4, dtype=torch.float32, seen=None, **options):
    """One process on the mean gradient of `sources` ranks: what all others must equal."""
    ps = weights(HIDDEN + REST, dtype)
    opt = Muon(groups(ps, len(HIDDEN), **options), **flags(options))
    more = {} if seen is None else {"seen": seen}
    train(opt, ps, lambda s, t, k: mean_grad(s, t, k, sources, **more), steps)
    return [p.detach() for p in ps], opt.grad_norm


def flags(options: dict) -> dict:
    """Constructor arguments that are not options of a group, taken out of `options`."""
    keys = ("reduce_grads", "deterministic", "nonfinite", "state_dtype")
    return {key: options.pop(key) for key in keys if key in options}


def plain(rank, world_size, reduce, seen=None, dtype=torch.float32, steps=4, **options):
    options = {"reduce_grads": reduce, **options}
    made = flags(options)
    ps = weights(HIDDEN + REST, dtype)
    opt = Muon(groups(ps, len(HIDDEN), **options), **made)
    more = {} if seen is None else {"seen": seen}
    grads = {
        True: lambda s, t, k: local_grad(s, t, k, rank, **more),
        False: lambda s, t, k: mean_grad(s, t, k, world_size),
    }
    train(opt, ps, grads[reduce], steps)
    return [p.detach() for p in ps], opt.grad_norm


def close(a, b, tolerance=2e-6) -> bool:
    return all((x - y).abs().max() <= tolerance for x, y in zip(a, b, strict=True))


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ----------------------------------------------------------------------------- plain parameters


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("options", [{}, {"beta2": 0.9, "cautious": True, "nesterov": False}])
def test_any_world_size_equals_one_process_on_the_mean_gradient(world_size, reduce, options):
    want, norm = alone(world_size, **options)
    results = run_ranks(world_size, lambda r, w: plain(r, w, reduce, **options))
    for got, got_norm in results:
        assert equal(got, results[0][0]) and got_norm == results[0][1]
        assert close(got, want) and got_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("reduce", [False, True])
def test_deterministic_is_bit_for_bit_one_process(world_size, reduce):
    every = 1 if reduce else 2  # sums over ranks and over steps do not commute bit for bit
    want, _ = alone(world_size, deterministic=True, every=every)
    run = lambda r, w: plain(r, w, reduce, deterministic=True, every=every)  # noqa: E731
    for got, _ in run_ranks(world_size, run):
        assert equal(got, want)


@pytest.mark.parametrize("reduce", [False, True])
def test_bf16_weights_have_one_master_and_agree_on_all_ranks(reduce):
    want, _ = alone(2, dtype=torch.bfloat16)
    results = run_ranks(2, lambda r, w: plain(r, w, reduce, dtype=torch.bfloat16))
    assert equal(results[0][0], results[1][0])
    assert close(results[0][0], want, 0.05)  # ours adds the gradients up in fp32


SEEN = {
    "only rank 1": lambda t, k, r: k % 3 != 0 or r == 1,
    "only rank 0": lambda t, k, r: k % 3 != 0 or r == 0,
    "no rank": lambda t, k, r: k % 3 != 0,
    "alternating": lambda t, k, r: (t + k + r) % 2 == 0,
    "nothing at all": lambda t, k, r: False,
}


@pytest.mark.parametrize("case", SEEN)
def test_a_gradient_that_only_some_ranks_have_counts_as_zero_elsewhere(case):
    want, _ = alone(2, seen=SEEN[case])
    results = run_ranks(2, lambda r, w: plain(r, w, True, seen=SEEN[case]), timeout=20)
    assert equal(results[0][0], results[1][0]) and close(results[0][0], want)


@pytest.mark.parametrize("case", SEEN)
def test_with_averaged_gradients_the_owner_decides_and_nobody_hangs(case):
    def run(rank, world_size):
        ps = weights(HIDDEN + REST)
        opt = Muon(groups(ps, len(HIDDEN)))
        train(opt, ps, lambda s, t, k: local_grad(s, t, k, rank, SEEN[case]))
        return [p.detach() for p in ps]

    a, b = run_ranks(2, run, timeout=20)
    assert equal(a, b)
    if case in ("no rank", "nothing at all"):
        assert equal(a[:1], weights(HIDDEN[:1]))


@pytest.mark.parametrize("named", [True, False])
def test_another_order_on_another_rank_is_an_error_that_names_the_parameter(named):
    def run(rank, world_size):
        ps = [(f"w{k}", p) for k, p in enumerate(weights([(4, 4), (8, 8), (8, 8)]))]
        if rank == 1:
            ps[1], ps[2] = ps[2], ps[1]
        ps = ps if named else [p for _, p in ps]
        try:
            train(Muon(ps), [p if isinstance(p, torch.Tensor) else p[1] for p in ps], tensor, 1)
        except RuntimeError as error:
            return str(error)

    for message in run_ranks(2, run, timeout=20):
        assert ("w1" if named else "1 of group 0") in message


@pytest.mark.parametrize("reduce", [False, True])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_bad_number_on_one_rank_stops_all_before_anything_changes(reduce, policy):
    def run(rank, world_size):
        ps = weights(HIDDEN + REST)
        opt = Muon(groups(ps, len(HIDDEN)), reduce_grads=reduce, nonfinite=policy)

        def grad(shape, t, k):
            g = mean_grad(shape, t, k, 2)
            return g * math.nan if k == 2 and (rank == 1 or not reduce) else g

        try:
            train(opt, ps, grad, 1)
            message = ""
        except FloatingPointError as error:
            message = str(error)
        moved = not equal(ps, weights(HIDDEN + REST))
        dirty = any(v.count_nonzero() for s in opt.state.values() for v in s.values())
        return message, moved or dirty

    for message, changed in run_ranks(2, run, timeout=20):
        assert not changed and ("2 of group 0" in message) == (policy == "raise")


def test_grad_scaler_with_local_gradients_skips_on_all_ranks_when_one_overflows():
    def run(rank, world_size):
        ps = weights([(8, 8), (5,)])
        opt = Muon(groups(ps, 1, 1), reduce_grads=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for t in range(2):
            for k, p in enumerate(ps):
                p.grad = 4 * tensor(p.shape, t, k, rank, 7)
                if t == 0 and rank == 0:
                    p.grad.fill_(math.inf)
                if t == 1 and rank == 0:
                    p.grad *= 0.5  # its scaler has backed off, the other has not
            scaler.scale(torch.ones(()))
            scaler.step(opt)
            scaler.update()
            if t == 0:
                assert equal(ps, weights([(8, 8), (5,)]))
        return [p.detach() for p in ps]

    ps = weights([(8, 8), (5,)])
    train(Muon(groups(ps, 1, 1)), ps, lambda s, t, k: mean_grad(s, t, k, 2), 1, start=1)
    for got in run_ranks(2, run, timeout=20):
        assert close(got, ps)


def test_each_rank_keeps_its_share_of_the_state_alone():
    def run(rank, world_size):
        ps = weights([(64, 64)] * 16 + [(4000, 8)])
        opt = Muon(groups(ps, 16, 1), reduce_grads=True)
        kept = [(key, v.numel()) for s in opt.state.values() for key, v in s.items()]
        names = "momentum_buffer", "exp_avg_sq"
        return [sum(n for key, n in kept if key.startswith(name)) for name in names]

    for momentum, second in run_ranks(4, run):
        assert momentum == 16 * 64 * 64 / 4 and second == 4000 * 8 / 4


def test_buffers_live_until_their_collective_is_done_and_a_torn_one_is_noticed():
    """Between launch and wait all memory that is free is overwritten; then one buffer is torn."""

    def run(rank, world_size, tear):
        wait = muon.Round.wait

        def slow_wait(self):
            for n in (self.recv.numel(), self.send.numel()):
                [torch.full((n,), math.nan) for _ in range(4)]
            came = wait(self)
            came[: int(tear)] += 1
            return came

        muon.Round.wait = slow_wait
        return plain(rank, world_size, True)[0]

    want = alone(3)[0]
    assert all(close(got, want) for got in run_ranks(3, run, False))
    assert not any(close(got, want) for got in run_ranks(3, run, True))


@pytest.mark.parametrize("reduce", [False, True])
def test_more_ranks_than_matrices(reduce):
    def run(rank, world_size):
        ps = weights([(8, 8), (5,)])
        opt = Muon(groups(ps, 1, 1), reduce_grads=reduce)
        train(opt, ps, lambda s, t, k: mean_grad(s, t, k, 1))
        return [p.detach() for p in ps]

    assert all(close(got, run(0, 1)) for got in run_ranks(4, run))


def test_rounds_split_large_shares_and_change_nothing():
    def run(rank, world_size):
        muon.ROUND = 300
        result = plain(rank, world_size, True)[0]
        return result

    want = alone(2)[0]
    assert all(close(got, want) for got in run_ranks(2, run))


# ---------------------------------------------------------------------------------------- shards


def sharded(rank, world_size, shapes, mesh_shape, places, dtype=torch.float32, **options):
    """Trains DTensors laid out by `places`; gives back the whole parameters."""
    names = tuple(f"d{k}" for k in range(len(mesh_shape)))
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    ps = [nn.Parameter(distribute_tensor(w.detach(), mesh, places)) for w in weights(shapes, dtype)]
    opt = Muon(groups(ps, len(shapes), 1, **options))

    def grad(shape, t, k):
        return distribute_tensor(mean_grad(shape, t, k, 1).to(dtype), mesh, places)

    train(opt, ps, grad)
    return [p.detach().full_tensor() for p in ps], opt.grad_norm


def whole(shapes, dtype=torch.float32, **options):
    ps = weights(shapes, dtype)
    opt = Muon(groups(ps, len(shapes), 1, **options))
    train(opt, ps, lambda s, t, k: mean_grad(s, t, k, 1))
    return [p.detach() for p in ps], opt.grad_norm


MATRICES = [(8, 24), (24, 8), (9, 7), (3, 16), (1, 5), (2, 2)]  # uneven, and empty shards
STACKS = [(5, 6, 10), (2, 4, 3)]
LAYOUTS = [
    ((2,), [Shard(0)], MATRICES + STACKS + [(6, 3, 2, 2)]),
    ((3,), [Shard(0)], MATRICES + STACKS + [(6, 3, 2, 2)]),
    ((4,), [Shard(0)], MATRICES + STACKS),
    ((3,), [Shard(1)], MATRICES + STACKS + [(6, 4, 2, 2)]),
    ((2,), [Shard(2)], STACKS),
    ((3,), [Replicate()], MATRICES),
    ((2, 2), [Replicate(), Shard(0)], MATRICES + STACKS),  # HSDP
    ((2, 2), [Shard(0), Replicate()], MATRICES),
    ((2, 2), [Shard(0), Shard(1)], MATRICES),  # FSDP and tensor parallel
    ((2, 2), [Shard(1), Shard(0)], STACKS),
    ((2, 2), [Shard(0), Shard(0)], MATRICES),
]


@pytest.mark.parametrize("mesh, places, shapes", LAYOUTS, ids=lambda x: str(x)[:30])
def test_dtensors_of_every_layout_equal_whole_matrices(mesh, places, shapes):
    options = {"beta2": 0.9, "cautious": True}
    want, norm = whole(shapes, **options)
    for got, got_norm in run_ranks(
        math.prod(mesh), lambda r, w: sharded(r, w, shapes, mesh, places, **options)
    ):
        assert close(got, want) and got_norm == pytest.approx(norm, rel=1e-5)


def test_bf16_shards_have_their_masters_where_they_lie():
    shapes = [(9, 24), (24, 8)]
    want, _ = whole(shapes, dtype=torch.bfloat16, lr=1e-3)
    run = lambda r, w: sharded(r, w, shapes, (3,), [Shard(0)], dtype=torch.bfloat16, lr=1e-3)  # noqa: E731
    for got, _ in run_ranks(3, run):
        assert close(got, want, 0.01)
        assert all((a == b).float().mean() > 0.99 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("options", [{"heads": 3}, {"split": [3, 5, 4]}])
def test_fused_weights_are_split_by_their_global_rows(options):
    shapes = [(12, 10), (12, 6)]
    want, _ = whole(shapes, **options)
    for places in ([Shard(0)], [Shard(1)]):
        run = lambda r, w, p=places: sharded(r, w, shapes, (2,), p, **options)  # noqa: E731
        assert all(close(got, want) for got, _ in run_ranks(2, run))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 10)
        self.up, self.norm, self.down = nn.Linear(10, 27), nn.LayerNorm(27), nn.Linear(27, 13)

    def forward(self, x):
        return self.down(self.norm(self.up(self.embed(x))).relu())


def learn(model, opt, batches, rank=0, world_size=1):
    for x in batches:
        x = x.chunk(world_size)[rank]
        nn.functional.cross_entropy(model(x), (x * 5) % 13).backward()
        opt.step()
        opt.zero_grad(set_to_none=True)


BATCHES = [tensor((12,), t, 3).mul(100).long().abs() % 13 for t in range(8)]


def net_alone(steps=slice(0, 6)):
    model = Net()
    opt = Muon(muon.param_groups(model, **OPTIONS))
    learn(model, opt, BATCHES[steps])
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("world_size, hsdp", [(2, False), (3, False), (4, True)])
def test_fsdp2_training_equals_one_process(world_size, hsdp):
    def run(rank, world_size):
        model = Net()
        shape, names = ((2, 2), ("replicate", "shard")) if hsdp else ((world_size,), ("shard",))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh)
        opt = Muon(muon.param_groups(model, **OPTIONS))
        learn(model, opt, BATCHES[:6], rank, world_size)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        return {name: p.detach().full_tensor() for name, p in model.named_parameters()}

    want = net_alone()
    for got in run_ranks(world_size, run):
        assert close(got.values(), want.values(), 1e-5)


def test_fsdp2_over_tensor_parallel_equals_one_process():
    """Both cut `up` along its rows, so that its placement is a strided shard."""

    def run(rank, world_size):
        model = Net()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        up, down = dict(output_layouts=Replicate()), dict(input_layouts=Replicate())  # the norm's
        styles = {"up": ColwiseParallel(**up), "down": RowwiseParallel(**down)}
        parallelize_module(model, mesh["tp"], styles)
        for part in (model.up, model.down, model):
            fully_shard(part, mesh=mesh["dp"])
        opt = Muon(muon.param_groups(model, **OPTIONS))
        learn(model, opt, BATCHES[:6], rank // 2, 2)
        kinds = {type(x).__name__ for x in model.up.weight.placements}
        assert "_StridedShard" in kinds, model.up.weight.placements
        return {name: p.detach().full_tensor() for name, p in model.named_parameters()}

    want = net_alone()
    for got in run_ranks(4, run):
        assert close(got.values(), want.values(), 1e-5)


@pytest.mark.parametrize("wrapped", [True, False])
def test_ddp_and_reduce_grads_train_like_one_process(wrapped):
    def run(rank, world_size):
        model = Net()
        opt = Muon(muon.param_groups(model, **OPTIONS), reduce_grads=not wrapped)
        run_model = nn.parallel.DistributedDataParallel(model) if wrapped else model
        learn(run_model, opt, BATCHES[:6], rank, world_size)
        return {name: p.detach() for name, p in model.named_parameters()}

    want = net_alone()
    for got in run_ranks(2, run):
        assert close(got.values(), want.values(), 1e-5)


@pytest.mark.parametrize("how", ["attribute", "argument"])
def test_megatron_style_shards_equal_the_unsharded_matrices(how):
    """Both dimensions and two groups: nobody's metadata may be lost or swapped."""
    shapes, dims = [(12, 10), (10, 12), (8, 8), (6, 6)], [0, 1, 1, None]
    want, norm = whole(shapes, heads=2)

    def run(rank, world_size):
        ps = []
        for w, d in zip(weights(shapes), dims, strict=True):
            part = w.detach() if d is None else w.detach().chunk(2, d)[rank].clone()
            ps.append(nn.Parameter(part))
            if d is not None:
                ps[-1].partition_dim = d
                if how == "attribute":
                    ps[-1].tp_group = dist.group.WORLD
        made = [{"params": part, **OPTIONS, "heads": 2} for part in (ps[:2], ps[2:])]
        opt = Muon(made, tp_group=None if how == "attribute" else dist.group.WORLD)
        for t in range(4):
            for k, (p, d, s) in enumerate(zip(ps, dims, shapes, strict=True)):
                g = mean_grad(s, t, k, 1)
                p.grad = g if d is None else g.chunk(2, d)[rank].clone()
            opt.step()
        return [p.detach() for p in ps], opt.grad_norm

    results = run_ranks(2, run)
    for k, d in enumerate(dims):
        parts = [got[k] for got, _ in results]
        assert close([parts[0] if d is None else torch.cat(parts, d)], [want[k]])
    assert results[0][1] == pytest.approx(norm, rel=1e-6)


def test_tensor_parallel_in_two_replicas_with_averaged_gradients():
    """The shards' mesh is half of the ranks: each replica works alone, the norm counts once."""

    def run(rank, world_size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
        place = lambda t: distribute_tensor(t, mesh, [Shard(0)])  # noqa: E731
        ps = [nn.Parameter(place(w.detach())) for w in weights(MATRICES)]
        opt = Muon(groups(ps, len(ps)))
        train(opt, ps, lambda s, t, k: place(mean_grad(s, t, k, 1)))
        with pytest.raises(ValueError, match="average its gradient"):
            Muon(ps, reduce_grads=True)
        return [p.detach().full_tensor() for p in ps], opt.grad_norm

    want, norm = whole(MATRICES)
    for got, got_norm in run_ranks(4, run):
        assert close(got, want) and got_norm == pytest.approx(norm, rel=1e-6)


# ----------------------------------------------------------------------------------- checkpoints


def resume(rank, world_size, saved, how="full"):
    """Goes on to step 6 with what `saved` holds: weights, and state if there is any."""
    ps = weights(HIDDEN + REST)
    for p, w in zip(ps, saved["weights"], strict=True):
        p.data.copy_(w)
    opt = Muon(groups(ps, len(HIDDEN), beta2=0.9), reduce_grads=True)
    if how == "dcp":
        state = {"optimizer": opt.full_state_dict()}
        dcp.load(state, checkpoint_id=saved["folder"])
        opt.load_state_dict(state["optimizer"])
    elif saved.get("state") is not None:
        opt.load_state_dict(torch.load(io.BytesIO(saved["state"]), weights_only=True))
    start = saved["steps"]
    train(opt, ps, lambda s, t, k: mean_grad(s, t, k, 2), 6 - start, start)
    return [p.detach() for p in ps]


def save(rank, world_size, how="full", folder=None):
    ps = weights(HIDDEN + REST)
    opt = Muon(groups(ps, len(HIDDEN), beta2=0.9), reduce_grads=True)
    steps = 4 if how == "local" else 3  # in the middle of an interval only the full one is whole
    train(opt, ps, lambda s, t, k: mean_grad(s, t, k, 2), steps)
    state = opt.state_dict() if how == "local" else opt.full_state_dict()
    file = io.BytesIO()
    torch.save(state, file)
    if how == "dcp":
        dcp.save({"optimizer": state}, checkpoint_id=folder)
    saved = {"weights": [p.detach() for p in ps], "steps": steps, "folder": folder}
    return {**saved, "state": file.getvalue()}


@pytest.mark.parametrize("before, after", [(2, 2), (2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize("how", ["full", "dcp"])
def test_resume_at_the_same_and_another_world_size_goes_straight_on(before, after, how, tmp_path):
    """Six steps equal three, the file of rank 0, three more; an interval is cut in its middle."""
    straight = alone(2, steps=6, beta2=0.9)[0]
    saved = run_ranks(before, save, how, str(tmp_path))
    for got in run_ranks(after, resume, saved[0], how):
        assert close(got, straight, 1e-5)
    without = {**saved[0], "state": None}
    assert not close(run_ranks(1, resume, without)[0], straight, 1e-5)


def test_a_ranks_own_part_loads_there_and_nowhere_else():
    saved = run_ranks(2, save, "local")
    straight = alone(2, steps=6, beta2=0.9)[0]
    own = lambda r, w: resume(r, w, saved[r])  # noqa: E731
    assert all(close(got, straight, 1e-5) for got in run_ranks(2, own))
    for world_size in (1, 2, 3):
        with pytest.raises(RuntimeError, match=r"lacks .* of parameter \d+ of group \d"):
            run_ranks(world_size, resume, saved[0], timeout=20)


def test_full_state_of_shards_is_that_of_whole_matrices_and_loads_back():
    shapes, hidden = [(9, 24), (24, 8), (5, 4, 6), (50, 3), (7,), (2, 2)], 3

    def run(rank, world_size, places):
        mesh = init_device_mesh("cpu", (2, 2) if len(places) == 2 else (world_size,))
        make = lambda: [  # noqa: E731
            nn.Parameter(distribute_tensor(w.detach(), mesh, places))
            for w in weights(shapes, torch.bfloat16)
        ]
        ps, qs = make(), make()
        opt, new = (Muon(groups(x, hidden, beta2=0.9)) for x in (ps, qs))
        train(opt, ps, lambda s, t, k: distribute_tensor(mean_grad(s, t, k, 1), mesh, places), 3)
        state = opt.full_state_dict()["state"]
        new.load_state_dict(opt.full_state_dict())
        again = new.full_state_dict()["state"]
        assert all(torch.equal(v, again[i][key]) for i, e in state.items() for key, v in e.items())
        return state

    ps = weights(shapes, torch.bfloat16)
    opt = Muon(groups(ps, hidden, beta2=0.9))
    train(opt, ps, lambda s, t, k: mean_grad(s, t, k, 1), 3)
    want = opt.full_state_dict()["state"]
    for size, places in ((3, [Shard(0)]), (4, [Replicate(), Shard(0)])):
        for got in run_ranks(size, run, places):
            for i, entry in want.items():
                assert entry.keys() == got[i].keys()
                assert all(v.shape == got[i][key].shape for key, v in entry.items())
                assert close(entry.values(), [got[i][key] for key in entry], 1e-5)


def test_add_param_group_after_steps_keeps_the_state_though_owners_change():
    def run(rank, world_size):
        ps = weights(HIDDEN)
        opt = Muon(ps[:4], **OPTIONS)
        train(opt, ps[:4], lambda s, t, k: mean_grad(s, t, k, 1), 3)
        opt.add_param_group({"params": ps[4:], **OPTIONS})
        train(opt, ps, lambda s, t, k: mean_grad(s, t, k, 1), 3, start=3)
        return [p.detach() for p in ps]

    want = run(0, 1)
    assert all(close(got, want) for got in run_ranks(3, run))


# -------------------------------------------------------------------------------------- run_ranks


def test_run_ranks_raises_what_a_child_raised_and_leaves_no_child():
    def fail(rank, world_size):
        if rank == 1:
            raise KeyError("the reason")
        dist.barrier()

    with pytest.raises(RuntimeError, match="the reason"):
        run_ranks(2, fail, timeout=20)
    with pytest.raises(TimeoutError, match=r"\[0, 1\]"):
        run_ranks(2, lambda r, w: time.sleep(30), timeout=1)
