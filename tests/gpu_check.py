"""What only a GPU can tell, in one command on one GPU: `python tests/gpu_check.py`.

Prints Muon's own benchmark, then a table: the head in 16 and in 8 bits (ms, and its error with
attention's), each stage of the gpu preset at the shape that one of 8 GPUs has (ms, tokens per
second, share of the GEMM ceiling, memory), and a small model's loss beside the same run on the CPU.
`--preset cpu` runs the same on a CPU, which proves the script and no figure.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("", "data", "tests")]

import numpy as np
import torch

import bench_muon
import harness
import shards
import train_gpt as t
from plan_gpu import flops


def seconds(job, device: torch.device, repeats: int) -> float:
    """Median of a job's time, after three warm-ups; CUDA events where there are any."""
    took = []
    for turn in range(repeats + 3):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            job()
            end.record()
            torch.cuda.synchronize()
            elapsed = start.elapsed_time(end) / 1e3
        else:
            begin = time.perf_counter()
            job()
            elapsed = time.perf_counter() - begin
        if turn >= 3:
            took.append(elapsed)
    return statistics.median(took)


def head_rows(s: t.Settings, ranks: t.Ranks):
    """(name, ms, largest relative error) of HeadLoss for the longest row, in 16 and in 8 bits."""
    loader = t.Loader(s, ranks, shards.Vocabulary(s.vocab_size))
    model = t.build_model(s, ranks.device)
    size, more = max(s.seq_len), dict(device=ranks.device, dtype=model.lm_head.dtype)
    hidden = t.norm(torch.randn(size, s.model_dim, **more)).requires_grad_()
    weight = (0.05 * torch.randn(model.lm_head.shape, **more)).requires_grad_()
    targets = torch.randint(s.vocab_size, (size, 1), device=ranks.device)
    once = torch.ones(1, device=ranks.device)
    for name, fp8 in (("16 bits or more", False), ("8 bits", True)):
        loss = lambda *x: t.HeadLoss.apply(*x, s.softcap, s.head_rows, fp8)  # noqa: B023, E731
        loss = torch.compile(loss, dynamic=False, fullgraph=True) if s.compile else loss
        job = lambda: loss(hidden, weight, targets, once).backward()  # noqa: B023, E731
        try:
            took = seconds(job, ranks.device, 20 if ranks.device.type == "cuda" else 1)
            yield name, f"{took * 1e3:.2f}", f"{t.device_error(model, s, loader, fp8):.1%}"
        except RuntimeError as error:  # no such products on this device
            yield name, "-", str(error).partition("\n")[0]


def stage_rows(s: t.Settings, ranks: t.Ranks, ceiling: float):
    """(stage, tokens of one of 8 GPUs, ms, tokens/s of 8, share of ceiling, MiB) of each stage."""
    loader = t.Loader(s, ranks, shards.Vocabulary(s.vocab_size))
    for i in range(len(s.stage_ends)):
        model = t.build_model(s, ranks.device)
        optimizer = t.build_optimizer(model, s)
        forward = torch.compile(model, dynamic=False, fullgraph=True) if s.compile else model
        size, share = s.seq_len[i], max(1, s.batch_tokens[i] // s.seq_len[i] // 8)
        tokens = np.random.default_rng(0).integers(s.vocab_size - 1, size=size + 1)
        tokens[:: min(600, s.max_document[i])] = s.vocab_size - 1
        rows = [[(tokens.astype(np.uint16), 0, size)]] * share
        step = round(s.stage_ends[i] * s.train_steps) - 1
        batches = loader.micro_batches(rows, size)
        job = lambda: t.train_step(forward, optimizer, batches, step, s, ranks)  # noqa: B023, E731
        took = seconds(job, ranks.device, 20 if ranks.device.type == "cuda" else 3)
        rate = share * size / took
        used = sum(flops(s, i)) * rate / ceiling
        yield i + 1, share * size, took * 1e3, 8 * rate, used, harness.peak_memory(ranks.device)


def small_run(device: torch.device, steps: int) -> float:
    """Training loss, mean of the last ten steps, of the cpu preset."""
    s = dataclasses.replace(t.CPU, train_steps=steps)
    ranks = t.Ranks(0, 1, device)
    loader = t.Loader(s, ranks, shards.Vocabulary(s.vocab_size))
    model = t.build_model(s, device)
    optimizer, losses = t.build_optimizer(model, s), []
    files = [harness.ROOT / "data/sotu_train_000000.bin"]
    for step, batches in enumerate(loader.steps(files)):
        total, count = t.train_step(model, optimizer, batches, step, s, ranks)
        losses.append(float(total / count))
    return statistics.mean(losses[-10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpu", choices=t.PRESETS)
    parser.add_argument("--steps", type=int, default=200, help="of the small run (200)")
    args = parser.parse_args()
    s, cuda = t.PRESETS[args.preset], torch.cuda.is_available()
    if args.preset == "gpu" and not cuda:
        sys.exit("gpu_check.py: torch sees no GPU here; --preset cpu runs the script on a CPU")
    ranks = t.Ranks(0, 1, torch.device("cuda" if cuda else "cpu"))
    ceiling = harness.gemm_rate(ranks.device)
    name = torch.cuda.get_device_name() if cuda else "CPU"
    lines = [f"{name}, torch {torch.__version__}, GEMM ceiling {ceiling / 1e12:.2f} TFLOP/s"]
    lines.append("head and loss     ms   error, with attention's, against the CPU in fp32")
    lines += ["{:15} {:>6} {:>7}".format(*row) for row in head_rows(s, ranks)]
    lines.append("stage  tokens  ms a step  tokens/s of 8  of ceiling  peak MiB")
    for row in stage_rows(s, ranks, ceiling):
        lines.append("{:5} {:7} {:10.1f} {:14,.0f} {:11.0%} {:9,.0f}".format(*row))
    here, there = (small_run(torch.device(d), args.steps) for d in (ranks.device, "cpu"))
    lines.append(f"small model after {args.steps} steps: loss {here:.4f}, on the CPU {there:.4f}")
    bench_muon.speed(ranks.device, 20 if cuda else 1)
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
