"""What only a GPU can tell, in one command on one GPU: `python tests/gpu_check.py`.

Prints, last, a table: attention against the masked reference, each stage of the gpu preset at the
shape that one of 8 GPUs has (ms, tokens per second, share of the GEMM ceiling, memory), and a small
model's loss beside the same run on the CPU. Then Muon's own benchmark. `--preset cpu` runs the same
on a CPU, which proves the script and no figure.
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


def gemm_ceiling(device: torch.device) -> float:
    """FLOP/s of a large matrix product in the dtype that training uses there."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / seconds(lambda: a @ a, device, 10)


def attention_error(s: t.Settings, device: torch.device) -> tuple[float, float]:
    """Largest error of output and gradients against fp32 attention under the explicit mask."""
    T, window, shape = 1024, 100, (1, 1024, s.num_heads, s.head_dim)
    starts = torch.tensor([0, 100, 101, 612, T, T], dtype=torch.int32)
    segments = torch.bucketize(torch.arange(T), starts[1:4], right=True)[None]
    q, k, v, grad = (torch.randn(shape, dtype=torch.float32) for _ in range(4))
    answers = []
    for where, dtype in ((torch.device("cpu"), torch.float32), (device, None)):
        dtype = dtype or (torch.bfloat16 if where.type == "cuda" else torch.float32)
        inputs = [x.to(where, dtype).requires_grad_() for x in (q, k, v)]
        cut = starts.to(where) if where.type == "cuda" else segments
        y = t.attention(*inputs, t.sight(cut, window, T), s.attn_scale)
        gradients = torch.autograd.grad(y, inputs, grad.to(where, dtype))
        answers.append([x.float().cpu() for x in (y, *gradients)])
    errors = [float((a - b).abs().max()) for a, b in zip(*answers, strict=True)]
    return errors[0], max(errors[1:])


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
    ceiling = gemm_ceiling(ranks.device)
    name = torch.cuda.get_device_name() if cuda else "CPU"
    lines = [f"{name}, torch {torch.__version__}, GEMM ceiling {ceiling / 1e12:.2f} TFLOP/s"]
    lines.append("attention: largest error {:.1e}, of a gradient {:.1e}".format(
        *attention_error(s, ranks.device)))
    lines.append("stage  tokens  ms a step  tokens/s of 8  of ceiling  peak MiB")
    for row in stage_rows(s, ranks, ceiling):
        lines.append("{:5} {:7} {:10.1f} {:14,.0f} {:11.0%} {:9,.0f}".format(*row))
    here, there = (small_run(torch.device(d), args.steps) for d in (ranks.device, "cpu"))
    lines.append(f"small model after {args.steps} steps: loss {here:.4f}, on the CPU {there:.4f}")
    bench_muon.speed(ranks.device, 20 if cuda else 1)
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
