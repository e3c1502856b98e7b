"""Muon in one process: the rule, orthogonalization, groups, state, and what users do to it."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import muon
from muon import COEFFICIENTS, Muon, param_groups, zeropower_via_newtonschulz5

SHAPES = [(24, 8), (8, 24), (16, 16), (12, 12), (3, 6, 10)]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def polar(G: torch.Tensor) -> torch.Tensor:
    """U V^T in fp64 by SVD: the exact answer."""
    U, _, Vh = torch.linalg.svd(G.double(), full_matrices=False)
    return U @ Vh


def cosine(A: torch.Tensor, B: torch.Tensor) -> float:
    A, B = A.double().flatten(), B.double().flatten()
    return float(A @ B / (A.norm() * B.norm()))


def spectrum(r: int, c: int, low: float = 1e-3) -> torch.Tensor:
    """A matrix with singular values log-spaced from 1 to low."""
    U, _, Vh = torch.linalg.svd(torch.randn(r, c), full_matrices=False)
    return U * torch.logspace(0, math.log10(low), min(r, c)) @ Vh


def params(*shapes, dtype=torch.float32, seed=0) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in shapes or SHAPES]


def feed(ps, step: int, scale: float = 1.0) -> None:
    """Gradients that depend on the step and on the parameter's place alone."""
    for k, p in enumerate(ps):
        g = torch.Generator().manual_seed(1000 * step + k)
        p.grad = (scale * torch.randn(p.shape, generator=g)).to(p.dtype)


def train(optimizer, ps, steps=3, start=0, scale: float = 1.0):
    for t in range(start, start + steps):
        feed(ps, t, scale)
        optimizer.step()
    return [p.detach().clone() for p in ps]


def run(*shapes, steps=3, dtype=torch.float32, **kwargs) -> list[torch.Tensor]:
    ps = params(*shapes, dtype=dtype)
    return train(Muon(ps, **kwargs), ps, steps)


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# ------------------------------------------------------------------------------ orthogonalization


@pytest.mark.parametrize("name", COEFFICIENTS)
@pytest.mark.parametrize("shape", [(192, 768), (768, 192), (300, 300), (40, 50), (512, 512)])
def test_near_the_exact_polar_factor(name, shape):
    G = torch.randn(shape)
    X = zeropower_via_newtonschulz5(G, 5, name)
    assert cosine(X, polar(G)) > {"polar_express": 0.98, "quintic5": 0.97}.get(name, 0.95)
    S = torch.linalg.svdvals(X)
    assert S.max() < 1.3 and S.median() > 0.6


def test_polar_express_quality_on_gaussian_and_log_spaced_spectra():
    G = torch.randn(192, 768)
    X = zeropower_via_newtonschulz5(G)
    S = torch.linalg.svdvals(X)
    assert cosine(X, polar(G)) > 0.995 and S.min() > 0.85 and S.max() < 1.15
    G = spectrum(192, 768)
    X = zeropower_via_newtonschulz5(G)
    S = torch.linalg.svdvals(X)
    assert cosine(X, polar(G)) > 0.96 and S.min() > 0.25 and S.max() < 1.15


def test_twelve_steps_converge_to_the_exact_polar_factor():
    coefficients = [(15 / 8, -10 / 8, 3 / 8)]  # the classical quintic, which converges to 1
    for shape in [(64, 200), (64, 64)]:
        G = spectrum(*shape, low=0.1)
        X = zeropower_via_newtonschulz5(G, 12, coefficients)
        assert (X.double() - polar(G)).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(40, 100), (300, 900), (300, 300)])
def test_gram_form_and_symmetric_strips_equal_the_plain_iteration(shape):
    G, triples = torch.randn(2, *shape, dtype=torch.float64), COEFFICIENTS["polar_express"]
    X = G / G.norm(dim=(1, 2), keepdim=True)
    plain = X
    for a, b, c in triples:
        A = plain @ plain.mT
        plain = a * plain + (b * A + c * A @ A) @ plain
    for form in (muon._newton_schulz, muon._gram_newton_schulz):
        assert (form(X, triples) - plain).abs().max() < 1e-8


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (20, 20)])
def test_the_scale_of_the_gradient_does_not_matter_from_1e37_to_1e_minus_38(shape):
    G = torch.randn(shape)
    G = G / G.abs().max()
    want = zeropower_via_newtonschulz5(G)
    for scale in (1e37, 1e30, 1e10, 1e-10, 1e-30, 1e-37):
        assert (zeropower_via_newtonschulz5(G * scale) - want).abs().max() < 2e-5
    assert cosine(zeropower_via_newtonschulz5(G * 1e-38), want) > 0.999  # partly denormal


def test_zero_stays_zero_and_input_is_not_modified():
    G = torch.randn(3, 8, 20)
    G[1] = 0
    before = G.clone()
    X = zeropower_via_newtonschulz5(G)
    assert torch.equal(G, before) and X[1].count_nonzero() == 0 and X.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("compute", [None, torch.bfloat16, torch.float16])
def test_any_float_dtype_comes_back_in_its_own(dtype, compute):
    G = torch.randn(2, 3, 16, 40).to(dtype)
    X = zeropower_via_newtonschulz5(G, 5, dtype=compute)
    assert X.dtype == dtype and X.shape == G.shape
    assert all(cosine(X[i, j], polar(G[i, j])) > 0.95 for i in range(2) for j in range(3))


@pytest.mark.parametrize("shape", [(16, 40), (30, 30), (300, 400)])
def test_transpose_equivariance(shape):
    G = torch.randn(shape)
    X, Y = zeropower_via_newtonschulz5(G), zeropower_via_newtonschulz5(G.mT).mT
    assert (X - Y).abs().max() < 1e-4


def test_a_stack_equals_its_matrices_one_by_one():
    G = torch.randn(5, 16, 40)
    each = torch.stack([zeropower_via_newtonschulz5(g) for g in G])
    assert (zeropower_via_newtonschulz5(G) - each).abs().max() < 1e-5


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 7), (7, 1), (1, 1), (2, 0, 3)])
def test_empty_and_one_row_matrices(shape):
    G = torch.randn(shape)
    X = zeropower_via_newtonschulz5(G)
    assert X.shape == G.shape
    if G.numel():
        assert abs(float(X.norm()) - 1) < 0.3


@pytest.mark.parametrize(
    "G", [torch.ones(3), torch.ones(2, 2, dtype=torch.long), torch.ones(2, 2, dtype=torch.cfloat)]
)
def test_no_matrix_is_a_value_error(G):
    with pytest.raises(ValueError, match="floating-point matrices"):
        zeropower_via_newtonschulz5(G)


@pytest.mark.parametrize("bad", ["polar", [], [(1, 2)], [(1, 2, math.nan)]])
def test_bad_coefficients_are_refused(bad):
    with pytest.raises(ValueError, match="coefficients"):
        zeropower_via_newtonschulz5(torch.randn(3, 3), 5, bad)
    with pytest.raises(ValueError, match="coefficients"):
        Muon(params(), coefficients=bad)


# --------------------------------------------------------------------------------------- the rule


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_trajectory_of_torch_optim_muon(nesterov, scale):
    """Matching settings, bf16 and all: fp32 products of ours differ by bf16 rounding of theirs."""
    shapes = [(32, 16), (16, 32), (24, 24)]
    common = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    ours, theirs = params(*shapes), params(*shapes)
    a = Muon(ours, scale=scale, coefficients="newton_schulz", **common)
    b = torch.optim.Muon(theirs, adjust_lr_fn=scale, **common)
    start = [p.detach().clone() for p in ours]
    for t in range(10):
        for opt, ps in ((a, ours), (b, theirs)):
            feed(ps, t)
            opt.step()
        for p, q in zip(ours, theirs, strict=True):
            m, n = a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"]
            assert (m - n).abs().max() < 1e-6
    for p, q, s in zip(ours, theirs, start, strict=True):
        moved = (q - s).norm()
        assert moved > 0.1 and (p - q).norm() < 0.03 * moved


def reference_step(p, g, m, lr, wd, mu, nesterov, scale):
    """The rule in fp64 with the exact polar factor."""
    m = m + (1 - mu) * (g - m)
    u = g + mu * (m - g) if nesterov else m
    return p * (1 - lr * wd) - lr * scale(*p.shape) * polar(u), m


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(
    "scale, rule",
    [
        ("original", lambda r, c: max(1, r / c) ** 0.5),
        ("match_rms_adamw", lambda r, c: 0.2 * max(r, c) ** 0.5),
        ("spectral", lambda r, c: (r / c) ** 0.5),
        (lambda r, c: r + 2 * c, lambda r, c: r + 2 * c),
    ],
)
def test_the_rule_against_fp64_with_the_exact_polar_factor(nesterov, scale, rule):
    exact = {"coefficients": [(15 / 8, -10 / 8, 3 / 8)], "ns_steps": 30}
    ps = params((20, 8), (8, 20), (8, 8))
    opt = Muon(ps, lr=0.01, weight_decay=0.5, momentum=0.8, nesterov=nesterov, scale=scale, **exact)
    want = [p.detach().double() for p in ps]
    ms = [torch.zeros_like(w) for w in want]
    for t in range(4):
        feed(ps, t)
        for k, p in enumerate(ps):
            args = (p.grad.double(), ms[k], 0.01, 0.5, 0.8, nesterov, rule)
            want[k], ms[k] = reference_step(want[k], *args)
        opt.step()
    for p, w in zip(ps, want, strict=True):
        assert (p - w).abs().max() < 2e-4 * rule(*p.shape)


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.03}, {"weight_decay": 0.1}, {"momentum": 0.8}, {"nesterov": False},
        {"ns_steps": 3},
        {"coefficients": "quintic5"}, {"scale": "spectral"}, {"scale": "match_rms_adamw"},
        {"beta2": 0.9}, {"heads": 2}, {"state_dtype": torch.bfloat16},
        {"compute_dtype": torch.bfloat16}, {"weight_decay": 0.1, "cautious": True},
    ],
)  # fmt: skip
def test_each_setting_changes_the_result(change):
    base = {k: v for k, v in change.items() if k == "weight_decay" and len(change) > 1}
    assert not equal(run((8, 24), (16, 16), **base), run((8, 24), (16, 16), **change))


def test_rms_is_the_factor_of_match_rms_adamw():
    a = run((8, 24), scale="match_rms_adamw", rms=0.4, lr=0.01)
    b = run((8, 24), scale="match_rms_adamw", rms=0.2, lr=0.02)
    assert (a[0] - b[0]).abs().max() < 1e-6


def test_cautious_decays_only_where_update_and_weight_agree():
    ps = params((8, 24))
    before = ps[0].detach().clone()
    plain = run((8, 24), steps=1)[0]
    train(Muon(ps, weight_decay=0.5, cautious=True), ps, 1)
    update = (before - plain) / 0.02
    want = plain - 0.02 * 0.5 * before * (update.sign() == before.sign())
    assert (ps[0] - want).abs().max() < 1e-6


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
def test_normuon_keeps_the_norm_and_evens_the_short_sides(shape):
    ps, plain = params(shape), params(shape)
    opt = Muon(ps, lr=1, beta2=0.9)
    V = torch.zeros(())
    for t in range(3):
        p0, q0 = ps[0].detach().clone(), plain[0].detach().clone()
        if t == 0:
            ref = Muon(plain, lr=1)
        feed(ps, t)
        feed(plain, t)
        opt.step()
        ref.step()
        update, ortho = (p0 - ps[0]).detach(), (q0 - plain[0]).detach()
        dim = 1 if shape[0] >= shape[1] else 0
        scale = max(1, shape[0] / shape[1]) ** 0.5
        ortho = ortho / scale
        V = 0.9 * V + 0.1 * ortho.square().mean(dim, keepdim=True)
        want = ortho / V.sqrt()
        want = want * ortho.norm() / want.norm() * scale
        assert (update - want).abs().max() < 1e-4
    assert opt.state[ps[0]]["second_moment"].shape == V.shape


# ----------------------------------------------------------------------------------- views, shapes


def alone(p: torch.Tensor, blocks, steps=3, scale=None, **kwargs) -> list[torch.Tensor]:
    """The blocks of p trained as parameters of their own, on the same blocks of the gradient."""
    ps = [nn.Parameter(b.clone()) for b in blocks(p.detach())]
    opt = Muon(ps, **kwargs)
    for t in range(steps):
        whole = [nn.Parameter(p.detach().clone())]
        feed(whole, t)
        for q, g in zip(ps, blocks(whole[0].grad), strict=True):
            q.grad = g.clone()
        opt.step()
    return [q.detach() for q in ps]


@pytest.mark.parametrize(
    "shape, options, blocks",
    [
        ((4, 6, 10), {}, lambda t: t.unbind()),
        ((12, 10), {"heads": 3}, lambda t: t.split(4)),
        ((12, 10), {"split": [6, 4, 2]}, lambda t: t.split([6, 4, 2])),
        ((2, 12, 10), {"split": [8, 4]}, lambda t: [b for m in t for b in m.split([8, 4])]),
        ((8, 3, 2, 2), {}, lambda t: [t.reshape(8, 12)]),
        ((4, 3, 2, 2, 2), {}, lambda t: [t.reshape(4, 24)]),
    ],
)
def test_stacks_fused_weights_and_kernels_equal_their_matrices(shape, options, blocks):
    ps = params(shape)
    want = alone(ps[0], blocks, beta2=0.9, weight_decay=0.1)
    got = blocks(train(Muon(ps, beta2=0.9, weight_decay=0.1, **options), ps)[0])
    assert all((a.reshape(b.shape) - b).abs().max() < 1e-5 for a, b in zip(got, want, strict=True))


def test_channels_last_kernels_equal_contiguous_ones():
    plain, last = params((8, 3, 4, 4)), params((8, 3, 4, 4))
    last[0].data = last[0].data.to(memory_format=torch.channels_last)
    a, b = (train(Muon(ps, weight_decay=0.1), ps) for ps in (plain, last))
    assert torch.equal(a[0], b[0]) and last[0].is_contiguous(memory_format=torch.channels_last)


def test_non_contiguous_weights():
    plain, turned = params((8, 20)), params((8, 20))
    turned[0].data = turned[0].data.mT.contiguous().mT
    assert equal(*(train(Muon(ps), ps) for ps in (plain, turned)))


@pytest.mark.parametrize("options", [{"split": [4, 4]}, {"heads": 5}, {"split": [20, -8]}])
def test_a_split_that_does_not_divide_names_the_parameter(options):
    with pytest.raises(ValueError, match="parameter fused"):
        Muon([("fused", nn.Parameter(torch.randn(12, 4)))], **options)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (1, 7), (7, 1), (0, 3, 3), (0, 2, 2, 2)])
def test_empty_and_one_row_parameters(shape):
    ps = params(shape, (4, 4))
    train(Muon(ps, weight_decay=0.1, beta2=0.9), ps)
    assert all(p.isfinite().all() for p in ps)


@pytest.mark.parametrize(
    "bad",
    [
        torch.randn(3), torch.randn(()), torch.zeros(2, 2, dtype=torch.cfloat),
        torch.zeros(2, 2, dtype=torch.int32), torch.eye(3).to_sparse(),
    ],
)  # fmt: skip
def test_what_cannot_be_orthogonalized_is_refused_by_name(bad):
    with pytest.raises(ValueError, match="parameter culprit"):
        Muon([("good", nn.Parameter(torch.randn(2, 2))), ("culprit", nn.Parameter(bad, False))])


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": -1}, {"weight_decay": -0.1}, {"momentum": 1.0}, {"momentum": -0.1}, {"ns_steps": 0},
        {"beta2": 1.0}, {"scale": "adam"}, {"lr": math.nan}, {"nonfinite": "cry"},
        {"rank": 1}, {"world_size": 8},
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_with_the_value(bad):
    (key, value), *_ = bad.items()
    with pytest.raises(ValueError, match=f"{key}=.*{value}"):
        Muon(params(), **bad)


@pytest.mark.parametrize("bad", [{"betas": (0.9, 1.0)}, {"eps": -1}, {"every": 0}, {"every": 1.5}])
def test_adam_values_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Muon([{"params": params((4,)), "use_muon": False, **bad}])


def test_the_same_parameter_twice_is_refused():
    p = params((4, 4))[0]
    with pytest.raises(ValueError, match="twice"):
        Muon([p, p])
    with pytest.raises(ValueError, match="more than one"):
        Muon([{"params": [p]}, {"params": [p], "use_muon": False}])


# --------------------------------------------------------------------------- gradients, non-finite


def test_no_gradient_and_frozen_parameters_are_left_alone():
    ps = params((8, 8), (8, 8), (8, 8), (5,), (5,))
    groups = [{"params": ps[:3]}, {"params": ps[3:], "use_muon": False, "weight_decay": 1.0}]
    opt = Muon(groups, weight_decay=1.0)
    before = [p.detach().clone() for p in ps]
    feed(ps, 0)
    ps[0].grad, ps[3].grad = None, None
    ps[1].requires_grad_(False)
    opt.step()
    assert [torch.equal(p, b) for p, b in zip(ps, before, strict=True)] == [1, 1, 0, 1, 0]
    assert opt.state[ps[0]]["momentum_buffer"].count_nonzero() == 0
    for p in ps:
        p.grad = None
    opt.step()
    assert opt.grad_norm == 0


def test_gradients_are_never_touched():
    ps = params()
    opt = Muon(ps, weight_decay=0.1, nesterov=True)
    feed(ps, 0)
    before = [(p.grad, p.grad.clone()) for p in ps]
    opt.step()
    assert all(p.grad is g and torch.equal(g, c) for p, (g, c) in zip(ps, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momentum_is_not_aliased_without_nesterov(dtype):
    ps = params((8, 24), dtype=dtype)
    opt = Muon(ps, nesterov=False, momentum=0.5, compute_dtype=torch.bfloat16)
    feed(ps, 0, scale=100)
    opt.step()
    assert (opt.state[ps[0]]["momentum_buffer"] - 0.5 * ps[0].grad.float()).abs().max() < 1e-4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("policy", ["raise", "skip"])
@pytest.mark.parametrize("where", [1, 3])
def test_a_gradient_that_is_not_finite_changes_nothing(value, policy, where):
    ps = params((8, 8), (8, 24), (3, 4, 4), (100,))
    groups = [{"params": [(f"p{k}", p) for k, p in enumerate(ps[:3])]},
              {"params": [("p3", ps[3])], "use_muon": False}]  # fmt: skip
    opt = Muon(groups, nonfinite=policy)
    before = train(opt, ps, 1)
    state = copy.deepcopy(opt.state_dict())
    feed(ps, 1)
    ps[where].grad.view(-1)[2] = value
    if policy == "raise":
        with pytest.raises(FloatingPointError, match=f"parameter p{where}"):
            opt.step()
    else:
        opt.step()
    assert equal(before, [p.detach() for p in ps]) and not math.isfinite(opt.grad_norm)
    after = opt.state_dict()
    assert str(after["param_groups"]) == str(state["param_groups"])
    for i, entry in state["state"].items():
        assert all(torch.equal(v, after["state"][i][k]) for k, v in entry.items())
    train(opt, ps, 1, start=2)
    assert all(p.isfinite().all() for p in ps)


def test_huge_and_tiny_gradients_step_alike():
    a, b, c = (run_scaled(s) for s in (1.0, 1e30, 1e-30))
    assert all((x - y).abs().max() < 1e-4 for x, y in zip(a + a, b + c, strict=True))


def run_scaled(scale):
    ps = params((8, 24), (16, 16))
    return train(Muon(ps), ps, 3, scale=scale)


def test_grad_norm_is_the_norm_of_all_gradients():
    ps = params((8, 24), (3, 4, 4), (7,))
    opt = Muon([{"params": ps[:2]}, {"params": ps[2:], "use_muon": False}])
    feed(ps, 0)
    opt.step()
    want = torch.cat([p.grad.flatten() for p in ps]).norm()
    assert opt.grad_norm == pytest.approx(float(want), rel=1e-6)


def test_sparse_gradients_are_refused_by_name():
    p = nn.Parameter(torch.randn(4, 4))
    opt = Muon([("table", p)])
    p.grad = torch.eye(4).to_sparse()
    with pytest.raises(ValueError, match="table"):
        opt.step()


# ---------------------------------------------------------------------------------- low precision


def test_bf16_weights_are_the_rounding_of_an_exact_fp32_trajectory():
    """Ten steps whose single moves are below the resolution of bf16 must not be lost."""
    low, full = params((16, 16), (50,), dtype=torch.bfloat16), params((16, 16), (50,))
    for p, q in zip(low, full, strict=True):
        q.data = p.data.float()
    opts = [
        Muon([{"params": ps[:1], "weight_decay": 2e-2},
              {"params": ps[1:], "use_muon": False, "lr": 1e-4}], lr=1e-4)
        for ps in (low, full)
    ]  # fmt: skip
    for t in range(10):
        feed(low, t)
        for p, q in zip(low, full, strict=True):
            q.grad = p.grad.float()
        for opt in opts:
            opt.step()
    for p, q in zip(low, full, strict=True):
        assert torch.equal(p, q.bfloat16())
        assert torch.equal(opts[0].state[p]["master"], q)
        assert opts[0].state[p]["master"].dtype == torch.float32


def test_a_weight_written_from_outside_renews_its_master():
    ps = params((8, 8), dtype=torch.bfloat16)
    opt = Muon(ps, lr=1e-5)
    train(opt, ps, 2)
    with torch.no_grad():
        ps[0].fill_(3.0)
    train(opt, ps, 1)
    assert (ps[0] - 3).abs().max() < 0.1


# ------------------------------------------------------------------------------------ aux AdamW


def test_adam_groups_are_torch_optim_adamw():
    shapes = [(50, 8), (7,), (), (2, 3, 4)]
    ours, theirs = params(*shapes), params(*shapes)
    common = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.1}
    a = train(Muon([{"params": ours, "use_muon": False, **common}]), ours, 5)
    b = train(torch.optim.AdamW(theirs, **common), theirs, 5)
    assert all((x - y).abs().max() < 1e-6 for x, y in zip(a, b, strict=True))


def test_a_copy_can_forget_gradients_before_its_first_step():
    ps, opt = mixed()
    train(opt, ps, 1)
    new = copy.deepcopy(opt)
    for p in (p for g in new.param_groups for p in g["params"]):
        p.grad = torch.ones_like(p)
    new.zero_grad()
    gathering = [[p.grad is not None for p in g["params"]] for g in new.param_groups]
    assert gathering == [[False] * 3, [True] * 2]


def test_every_steps_on_the_sum_of_the_gradients_since():
    ours, theirs = params((50, 8), (7,)), params((50, 8), (7,))
    common = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.1}
    opt = Muon([{"params": ours, "use_muon": False, "every": 3, **common}])
    ref = torch.optim.AdamW(theirs, **common)
    for t in range(6):
        before = [p.detach().clone() for p in ours]
        opt.zero_grad(set_to_none=t < 3)
        for p, q in zip(ours, theirs, strict=True):
            loss = ((p - 1) * (t + 1)).square().sum()
            (gradient,) = torch.autograd.grad(loss, p, retain_graph=True)
            q.grad = gradient if t % 3 == 0 else q.grad + gradient
            loss.backward()
        opt.step()
        if t % 3 == 2:
            ref.step()
        else:
            assert equal(before, [p.detach() for p in ours])
    assert all((x - y).abs().max() < 1e-6 for x, y in zip(ours, theirs, strict=True))


# ---------------------------------------------------------------------------- torch.optim customs


def mixed(**kwargs):
    ps = params((8, 24), (24, 8), (3, 4, 4), (300, 8), (9,))
    groups = [
        {"params": ps[:3], "lr": 0.02, "note": "an extra key"},
        {"params": ps[3:], "use_muon": False, "lr": 0.01, "every": 2},
    ]
    return ps, Muon(groups, beta2=0.9, **kwargs)


def test_two_groups_have_each_its_own_lr():
    ps = params((8, 8), (8, 8))
    before = [p.detach().clone() for p in ps]
    opt = Muon([{"params": ps[:1], "lr": 0.1}, {"params": ps[1:], "lr": 0.001}])
    train(opt, ps, 1)
    moved = [float((p.detach() - b).norm()) for p, b in zip(ps, before, strict=True)]
    assert moved[0] / moved[1] == pytest.approx(100, rel=0.1)


@pytest.mark.parametrize("momentum", [True, False])
def test_one_cycle_lr_drives_lr_and_momentum(momentum):
    ps, opt = mixed()
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        opt, max_lr=[0.1, 0.05], total_steps=20, cycle_momentum=momentum
    )
    seen = set()
    for t in range(10):
        train(opt, ps, 1, start=t)
        schedule.step()
        seen.add((opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]))
    assert len(seen) == 10
    assert (len({m for _, m in seen}) > 1) == momentum


def test_lr_may_be_a_tensor_and_a_scheduler_may_fill_it():
    a = run((8, 24), lr=0.05)
    b = run((8, 24), lr=torch.tensor(0.05))
    assert all((x - y).abs().max() < 1e-7 for x, y in zip(a, b, strict=True))
    ps = params((8, 24))
    opt = Muon(ps, lr=torch.tensor(0.05))
    torch.optim.lr_scheduler.LambdaLR(opt, lambda t: 0.0)
    assert equal(train(opt, ps), [params((8, 24))[0].detach()])


def test_closure_hooks_and_extra_keys():
    ps, opt = mixed()
    seen = []
    opt.register_step_pre_hook(lambda *_: seen.append("pre"))
    opt.register_step_post_hook(lambda *_: seen.append("post"))

    def closure():
        assert torch.is_grad_enabled()
        opt.zero_grad()
        loss = sum(p.square().sum() for p in ps)
        loss.backward()
        return loss

    first = float(opt.step(closure))
    assert float(opt.step(closure)) < first and seen == ["pre", "post"] * 2
    assert opt.param_groups[0]["note"] == "an extra key"


def same_future(a_ps, a, b_ps, b, start=3) -> bool:
    return equal(train(a, a_ps, 3, start), train(b, b_ps, 3, start))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "state_dict", "full_state_dict", "file"])
def test_a_copy_goes_on_bit_for_bit(how):
    ps, opt = mixed()
    train(opt, ps)
    if how == "deepcopy":
        qs, new = copy.deepcopy((ps, opt))
    elif how == "pickle":
        qs, new = pickle.loads(pickle.dumps((ps, opt)))
    else:
        qs, new = mixed()
        for p, q in zip(ps, qs, strict=True):
            q.data.copy_(p.data)
        saved = opt.state_dict() if how == "state_dict" else opt.full_state_dict()
        if how == "file":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
        new.load_state_dict(saved)
    assert same_future(ps, opt, qs, new)


def test_optimizer_state_is_made_at_construction_in_state_dtype_and_stays_there():
    ps = params((8, 24), (9,), dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        opt = Muon([{"params": ps[:1]}, {"params": ps[1:], "use_muon": False}], state_dtype=dtype)
        assert opt.state[ps[0]]["momentum_buffer"].dtype == dtype
        train(opt, ps, 1)
        for saved in (opt.state_dict(), opt.full_state_dict()):
            opt.load_state_dict(saved)
            assert opt.state[ps[0]]["momentum_buffer"].dtype == dtype
            assert opt.state[ps[0]]["master"].dtype == torch.float32
            assert opt.state[ps[1]]["exp_avg"].dtype == torch.float32


def test_a_state_dict_of_torch_optim_muon_loads():
    ps, qs = params((8, 24)), params((8, 24))
    theirs = torch.optim.Muon(ps, lr=0.07)
    train(theirs, ps)
    ours = Muon(qs)
    ours.load_state_dict(theirs.state_dict())
    buffers = theirs.state[ps[0]]["momentum_buffer"], ours.state[qs[0]]["momentum_buffer"]
    assert torch.equal(*buffers) and ours.param_groups[0]["lr"] == 0.07


def test_full_state_dict_has_whole_tensors_of_the_parameters_shapes():
    ps, opt = mixed()
    train(opt, ps)
    state = opt.full_state_dict()["state"]
    assert [state[i]["momentum_buffer"].shape for i in range(3)] == [p.shape for p in ps[:3]]
    assert [state[i]["exp_avg"].shape for i in (3, 4)] == [p.shape for p in ps[3:]]
    assert float(state[3]["step"]) == 1


@pytest.mark.parametrize("key", ["momentum_buffer", "second_moment", "exp_avg", "step"])
def test_a_missing_entry_raises_with_the_parameters_name(key):
    ps = params((8, 24), (9,))
    groups = [{"params": [("w", ps[0])]}, {"params": [("b", ps[1])], "use_muon": False}]
    opt = Muon(groups, beta2=0.9)
    saved = opt.full_state_dict()
    for entry in saved["state"].values():
        entry.pop(key, None)
    with pytest.raises(ValueError, match="parameter [wb]"):
        opt.load_state_dict(saved)


def test_a_function_as_scale_survives_a_load_and_stays_out_of_the_file():
    ps = params((8, 24))
    opt = Muon(ps, scale=lambda r, c: 2.0)
    saved = opt.full_state_dict()
    assert "scale" not in saved["param_groups"][0]
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["scale"](1, 1) == 2.0


def test_add_param_group_keeps_the_state_of_the_others():
    ps, opt = mixed()
    train(opt, ps)
    old = opt.state[ps[0]]["momentum_buffer"].clone()
    new = params((8, 24), (5,), seed=1)
    opt.add_param_group({"params": new[:1], "lr": 0.5})
    opt.add_param_group({"params": new[1:], "use_muon": False, "lr": 0.5})
    assert torch.equal(opt.state[ps[0]]["momentum_buffer"], old)
    before = [p.detach().clone() for p in ps + new]
    train(opt, ps + new, 2, start=3)
    assert not any(torch.equal(p, b) for p, b in zip(ps + new, before, strict=True))
    with pytest.raises(ValueError, match="lr=-1"):
        opt.add_param_group({"params": params((3, 3)), "lr": -1})
    with pytest.raises(ValueError, match="1-D"):
        opt.add_param_group({"params": params((3,))})
    assert len(opt.param_groups) == 4
    train(opt, ps + new, 1, start=5)


def test_grad_scaler_unscales_skips_infs_and_backs_off():
    plain, scaled = params((8, 24), (9,)), params((8, 24), (9,))
    make = lambda ps: Muon([{"params": ps[:1]}, {"params": ps[1:], "use_muon": False}])  # noqa: E731
    scaler, opt = torch.amp.GradScaler("cpu", init_scale=2.0**10), make(scaled)
    want = train(make(plain), plain, 2)
    for t in range(3):
        feed(scaled, min(t, 1), scale=2.0**10 if t != 1 else math.inf)
        scaler.scale(torch.ones(()))
        if t == 2:
            assert scaler.get_scale() == 2.0**9
            feed(scaled, 1, scale=2.0**9)
        scaler.step(opt)
        scaler.update()
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(want, scaled, strict=True))


def test_the_seeds_arguments_work_by_name():
    ps = params((8, 24))
    old = {"lr": 0.02, "weight_decay": 0.01, "momentum": 0.95, "nesterov": True, "ns_steps": 5}
    train(Muon(ps, **old, rank=0, world_size=1), ps)
    assert zeropower_via_newtonschulz5(torch.randn(4, 4), 5).shape == (4, 4)


@pytest.mark.slow
def test_more_than_eight_shapes_compile():
    shapes = [(4, 4 + k) for k in range(10)]
    eager, compiled = run(*shapes, steps=2), run(*shapes, steps=2, compile=True)
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(eager, compiled, strict=True))


COPIER = """
import torch
from torch import nn
from muon import Muon, param_groups
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 11))
optimizer = Muon(param_groups(model), lr=0.02, momentum=0.95, {extra})
x = torch.arange(11)
for step in range(60):
    loss = nn.functional.cross_entropy(model(x), (x * 3) % 11)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
print(loss.item())
"""


@pytest.mark.parametrize("extra", ["", "compile=True"])
def test_the_copier_has_muon_alone_in_an_empty_folder(tmp_path, extra):
    """Also: TORCH_COMPILE_DISABLE=1 with compile=True runs, eagerly."""
    (tmp_path / "muon.py").write_text(Path(muon.__file__).read_text())
    (tmp_path / "toy.py").write_text(COPIER.format(extra=extra))
    env = {**os.environ, "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run(
        [sys.executable, "toy.py"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 0.5


# ------------------------------------------------------------------------------------ param_groups


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.hidden = nn.Linear(8, 16)
        self.back = nn.Linear(16, 8, bias=False)
        self.conv = nn.Conv2d(3, 4, 2)
        self.norm = nn.LayerNorm(8)
        self.bank = nn.Parameter(torch.randn(3, 8, 8))
        self.lm_head = nn.Linear(8, 50, bias=False)
        self.tied = nn.Linear(8, 50, bias=False)
        self.tied.weight = self.embed.weight


def test_param_groups_partition_the_model_by_what_a_weight_is(capsys):
    model = Tied()
    hidden, rest = param_groups(model, verbose=True, adam={"lr": 0.1}, weight_decay=0.2)
    names = {name for name, _ in hidden["params"]}
    assert names == {"hidden.weight", "back.weight", "conv.weight", "bank"}
    both = [id(p) for g in (hidden, rest) for _, p in g["params"]]
    assert sorted(both) == sorted(map(id, model.parameters()))  # each once, the tied one too
    assert rest["lr"] == 0.1 and hidden["weight_decay"] == 0.2 and not rest["use_muon"]
    table = capsys.readouterr().out
    assert "muon  hidden.weight" in table and "adamw embed.weight" in table
    Muon([hidden, rest])


# ---------------------------------------------------------------------------------------- the plan

GPT2 = [s for _ in range(12) for s in ((2304, 768), (768, 768), (3072, 768), (768, 3072))]


def balance(shapes, size: int, owners=None) -> float:
    plan = muon.plan(shapes, size, owners)
    assert len(plan["owners"]) == len(shapes) and set(plan["owners"]) <= set(range(size))
    assert sum(plan["owned"]) == sum(r * c for r, c in shapes)
    return max(plan["flops"]) * size / sum(muon.flops(*s) for s in shapes)


def test_gpt2_small_is_balanced_within_three_percent_on_eight_ranks():
    assert balance(GPT2, 8) < 1.03 < 1.2 < balance(GPT2, 8, [k % 8 for k in range(48)])
    assert balance(GPT2, 32) < 1.34 < 1.7 < balance(GPT2, 32, [k % 32 for k in range(48)]) + 0.4


@pytest.mark.parametrize("size", [1, 3, 64, 1024])
def test_no_assignment_beats_ours_by_more_than_a_third_at_any_world_size(size):
    largest = max(muon.flops(*s) for s in GPT2) * size / sum(muon.flops(*s) for s in GPT2)
    assert balance(GPT2, size) <= 4 / 3 * max(1, largest)


def test_ties_go_by_position():
    assert muon.assign([1, 1, 1, 1], 2) == [0, 1, 0, 1]
    assert muon.assign([5, 3, 3, 2, 2], 2) == [0, 1, 1, 0, 1]


def test_flops_of_a_gpt2_layer_are_the_sums_on_paper():
    assert sum(muon.flops(*s) for s in GPT2[:4]) / 768**3 == 280
