"""Muon's figures: `python tests/bench_muon.py` for speed and quality, `--plan` for the tables.

Speed is CPU time of one thread (on CUDA: device time), all contestants interleaved, medians; next
to it the share of the GEMM ceiling of the same run, counting the FLOPs that each really does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import muon
from muon import GRAM_RATIO, STRIP, Muon, zeropower_via_newtonschulz5


def gpt2(width: int, layers: int = 12) -> list[tuple[int, int]]:
    """The hidden matrices of a GPT-2: qkv, proj, mlp in and out."""
    w = width
    return [(3 * w, w), (w, w), (4 * w, w), (w, 4 * w)] * layers


def llama(width: int, ffn: int, layers: int, kv: int) -> list[tuple[int, int]]:
    layer = [(width, width), (kv, width), (kv, width), (width, width)]
    return (layer + [(ffn, width), (ffn, width), (width, ffn)]) * layers


SMALL = [(128, 128)] * 16 + [(512, 128), (128, 512)] * 4  # the CPU track's 4 blocks of 128
SUITES = {"GPT-2 small, 48": gpt2(768), "tiny, 48 of 16 to 64 rows": gpt2(16), "CPU track": SMALL}
MODELS = {
    "GPT-2 small": gpt2(768),
    "1.5B (GPT-2 XL)": gpt2(1600, 48),
    "7B (Llama)": llama(4096, 11008, 32, 4096),
}


class Loop(torch.optim.Optimizer):
    """The seed's algorithm, one matrix after the other, in fp32 on a CPU and bf16 on CUDA."""

    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                X = p.grad.lerp(m, group["momentum"])
                X = X.bfloat16() if X.is_cuda else X
                X = X.mT if p.size(0) > p.size(1) else X
                X = X / (X.norm() + 1e-7)
                for _ in range(5):
                    A = X @ X.mT
                    X = 3.4445 * X + (-4.7750 * A + 2.0315 * A @ A) @ X
                X = X.mT if p.size(0) > p.size(1) else X
                p.add_(X, alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


def done_flops(shape: tuple[int, int], gram: bool, strip: int | None) -> float:
    """FLOPs really done in five steps: 8 rho + 28 or 20 rho + 10, symmetric products by strips."""
    m, n = sorted(shape)
    blocks = -(-m // (strip or m))
    half = (blocks + 1) / (2 * blocks) if strip and m >= 2 * strip else 1.0
    if gram and n >= GRAM_RATIO * m:
        return 4.0 * m * m * n * (1 + half) + 28.0 * m**3 * half
    return 10.0 * m * m * n * (1 + half) + 10.0 * m**3 * half


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def interleaved(jobs: dict, device: torch.device, repeats: int) -> dict[str, float]:
    """Median seconds of each job; one after the other in turns, so that noise hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats + 1):
        for name, job in jobs.items():
            start = clock(device)
            job()
            if turn:  # the first is a warm-up
                seconds[name].append(clock(device) - start)
    return {name: statistics.median(s) for name, s in seconds.items()}


def speed(device: torch.device, repeats: int) -> None:
    dtypes = [torch.float32, torch.bfloat16]
    for title, shapes in SUITES.items():
        big = shapes[0][1] > 256

        def optimizer(make, shapes=shapes):
            g = torch.Generator().manual_seed(0)
            ps = [nn.Parameter(torch.randn(s, generator=g).to(device)) for s in shapes]
            for p in ps:
                p.grad = torch.randn(p.shape, generator=g).to(device)
            return make(ps).step

        jobs = {
            "torch.optim.Muon": optimizer(lambda ps: torch.optim.Muon(ps, weight_decay=0.0)),
            "a loop over matrices": optimizer(Loop),
            "ours": optimizer(Muon),
            "ours, newton_schulz": optimizer(lambda ps: Muon(ps, coefficients="newton_schulz")),
            "ours, bf16": optimizer(lambda ps: Muon(ps, compute_dtype=torch.bfloat16)),
            "ours, cautious NorMuon": optimizer(
                lambda ps: Muon(ps, weight_decay=0.1, cautious=True, beta2=0.95)
            ),
        }
        if not big:
            jobs["ours, deterministic"] = optimizer(lambda ps: Muon(ps, deterministic=True))
        sides = {dtype: torch.randn(2048, 2048, device=device).to(dtype) for dtype in dtypes}
        for dtype, A in sides.items():
            jobs[f"GEMM {dtype}"] = lambda A=A: A @ A
        took = interleaved(jobs, device, repeats if big else 10 * repeats)
        ceiling = {dtype: 2 * 2048**3 / took.pop(f"GEMM {dtype}") for dtype in dtypes}
        rates = ", ".join(f"{rate / 1e9:.0f} GFLOP/s {dtype}" for dtype, rate in ceiling.items())
        print(f"\n{title} matrices on {device.type}; GEMM ceiling {rates}")
        print(f"{'':26}{'ms a step':>10}{'speed-up':>10}{'of ceiling':>12}")
        for name, seconds in took.items():
            ours = name.startswith("ours")
            low = device.type == "cuda" or "bf16" in name or name == "torch.optim.Muon"
            dtype = torch.bfloat16 if low else torch.float32
            strip = STRIP * (1 + low) if ours and device.type == "cpu" else None
            work = sum(done_flops(s, ours and not low, strip) for s in shapes)
            share = f"{work / seconds / ceiling[dtype]:.0%}" if big else ""
            gain = took["torch.optim.Muon"] / seconds
            print(f"{name:26}{seconds * 1e3:10.2f}{gain:10.2f}{share:>12}")


def quality(device: torch.device) -> None:
    """Cosine to the exact polar factor and the singular values that come out, 192 x 768."""
    torch.manual_seed(0)
    U, _, Vh = torch.linalg.svd(torch.randn(192, 768, dtype=torch.float64), full_matrices=False)
    spectra = {
        "Gaussian": torch.randn(192, 768, dtype=torch.float64),
        "log-spaced 1 to 1e-3": U * torch.logspace(0, -3, 192, dtype=torch.float64) @ Vh,
    }
    from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, _zeropower_via_newtonschulz

    theirs = lambda G: _zeropower_via_newtonschulz(G, (DEFAULT_A, DEFAULT_B, DEFAULT_C), 5, 1e-7)  # noqa: E731
    contestants = {"torch.optim.Muon": theirs}
    for name in muon.COEFFICIENTS:
        contestants[f"ours, {name}"] = lambda G, n=name: zeropower_via_newtonschulz5(G, 5, n)
    contestants["ours, bf16"] = lambda G: zeropower_via_newtonschulz5(G, dtype=torch.bfloat16)
    print(f"\n{'192 x 768':26}{'spectrum':>22}{'cosine':>9}{'singular values':>18}")
    for spectrum, G in spectra.items():
        L, _, Rh = torch.linalg.svd(G, full_matrices=False)
        for name, f in contestants.items():
            X = f(G.float().to(device)).double().cpu()
            S = torch.linalg.svdvals(X)
            cosine = float((X * (L @ Rh)).sum() / X.norm() / (L @ Rh).norm())
            print(f"{name:26}{spectrum:>22}{cosine:9.4f}{f'{S.min():.3f} to {S.max():.3f}':>18}")


def plans() -> None:
    """Owners' balance, bytes and memory per rank, ours against round-robin."""
    print(f"{'model':16}{'ranks':>6}{'busiest / mean':>15}{'round-robin':>13}", end="")
    print(f"{'MB sent, mean':>15}{'fullest':>9}{'momentum MB, mean':>19}{'fullest':>9}{'robin':>9}")
    for model, shapes in MODELS.items():
        for size in (1, 8, 64, 512, 1024):
            ours = muon.plan(shapes, size)
            robin = muon.plan(shapes, size, [k % size for k in range(len(shapes))])
            balance = [max(p["flops"]) * size / sum(p["flops"]) for p in (ours, robin)]
            # gradients out and weights back, bf16: a rank sends what it does not own, and its own
            total = sum(ours["owned"])
            sent = [2 * (total - n + s) for n, s in zip(ours["owned"], ours["sent"], strict=True)]
            sent = [0] if size == 1 else sent
            kept = [4 * n for n in ours["owned"]]
            print(
                f"{model:16}{size:6}{balance[0]:15.2f}{balance[1]:13.2f}"
                f"{sum(sent) / len(sent) / 1e6:15.1f}{max(sent) / 1e6:9.1f}"
                f"{sum(kept) / size / 1e6:19.1f}{max(kept) / 1e6:9.1f}"
                f"{4 * max(robin['owned']) / 1e6:9.1f}"
            )
        least = max(muon.flops(*s) for s in shapes) / sum(muon.flops(*s) for s in shapes)
        print(f"{'':16}one matrix is the floor from {1 / least:.0f} ranks on")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", action="store_true", help="print the plan tables only")
    parser.add_argument("--repeats", type=int, default=5, help="of the large suite")
    arguments = parser.parse_args()
    if arguments.plan:
        return plans()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    speed(device, arguments.repeats)
    quality(device)


if __name__ == "__main__":
    main()
