"""The gpu preset on paper: `python tests/plan_gpu.py`, without a GPU, in seconds.

Prints what one of 1, 8, 64 and 1,024 ranks holds, sends and multiplies, from fake tensors and a
fake process group, and a floor for the time of a step: what the matrix products take at 990 TFLOP/s
(bf16), the optimizer's memory traffic at 3.35 TB/s, and what is sent at 450 GB/s, the H100's
figures, nothing overlapped, nothing else counted. With a CUDA build of torch it also traces the
forward pass of every stage at full size on fake CUDA tensors, where a wrong shape, dtype or device
in a branch that only a GPU takes would show.
"""

import sys
from collections import defaultdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("", "data")]

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

import train_gpt as t

TFLOPS, HBM, LINK = 990e12, 3.35e12, 450e9
GIB = 2**30
FAKE = FakeTensorMode(allow_non_fake_inputs=True)


def fake_model(s: t.Settings, device: str) -> t.GPT:
    """The preset's model in its dtypes, without a byte of data."""
    model = t.GPT(s)
    for module in model.modules():  # Module.to() cannot swap fake tensors
        for name, p in module.named_parameters(recurse=False):
            dtype = torch.bfloat16 if p.ndim >= 2 else p.dtype
            setattr(module, name, torch.nn.Parameter(p.detach().to(device, dtype)))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model


def fake_batch(s: t.Settings, stage: int, rows: int, device: str) -> t.Batch:
    size = s.seq_len[stage] if stage >= 0 else s.val_seq_len
    ids = torch.zeros(rows, size, dtype=torch.int64, device=device)
    count = len(t.shards.segment_starts(np.zeros((rows, size), bool)))
    starts = torch.zeros(count, dtype=torch.int32, device=device)
    return t.Batch(ids, ids.clone(), starts if device == "cuda" else ids.clone())


def windows(s: t.Settings, stage: int) -> tuple[int, int]:
    return (s.short_window[stage], s.long_window[stage]) if stage >= 0 else s.val_windows


def flops(s: t.Settings, stage: int) -> tuple[float, float]:
    """Forward and backward per token: matrix products, and attention as far as it sees."""
    with FAKE, torch.no_grad(), FlopCounterMode(display=False) as counter:
        model, batch = fake_model(s, "cpu"), fake_batch(s, stage, 1, "cpu")
        model(*batch, windows(s, stage), t.future_weights(0, s))
    by_op = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in by_op.items() if "attention" not in str(op))
    seen = sum(
        min(windows(s, stage)[long], s.max_document[stage]) * (2 if i in s.paired_heads else 1)
        for i, long in enumerate(model.long)
        if i not in s.no_attention
    )
    return 3 * products / batch.ids.numel(), 12.0 * s.model_dim * seen


def traffic(optimizer) -> dict[str, float]:
    """Bytes that this rank sends in a step, of gradients and of results, and holds as state."""
    sent = defaultdict(float)
    for r in optimizer._rounds:
        size = torch.finfo(r.dtype).bits // 8
        for rank, (up, asked) in enumerate(zip(r.up, r.asked, strict=True)):
            if rank != r.comm.rank:
                sent["gradients"] += size * sum(x.numel for x in up)
                sent["results"] += size * sum(x.numel for x in asked)
    held = (x for state in optimizer._own.values() for x in state.values())
    sent["state"] = sum(x.numel() * x.element_size() for x in held)
    return sent


def ranks_table(s: t.Settings, per_token: float) -> None:
    heads = "ranks tokens state,GiB held,GiB gradients,MB results,MB replicated,MB"
    heads += " products,ms memory,ms links,ms"
    print("\n" + " ".join(f"{head:>13}" for head in heads.split()))
    for world_size in (1, 8, 64, 1024):
        dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
        model = fake_model(s, "cpu")
        sent = traffic(t.build_optimizer(model, s))
        dist.destroy_process_group()
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        tokens = s.batch_tokens[-1] / world_size
        row = [
            f"{world_size:,}",
            f"{tokens:,.0f}",
            f"{sent['state'] / GIB:.2f}",
            f"{(2 * weights + sent['state']) / GIB:.2f}",  # weights, gradients, state
            f"{sent['gradients'] / 1e6:,.0f}",
            f"{sent['results'] / 1e6:,.0f}",
            f"{2 * weights * (world_size - 1) / world_size / 1e6:,.0f}",  # by all-reduce
            f"{tokens * per_token / TFLOPS * 1e3:.1f}",
            f"{(2 * sent['state'] + 3 * weights) / HBM * 1e3:.1f}",
            f"{(sent['gradients'] + sent['results']) / LINK * 1e3:.1f}",
        ]
        print(" ".join(f"{cell:>13}" for cell in row))


def trace(s: t.Settings) -> None:
    """The forward pass at full size on fake CUDA tensors; raises where a shape is wrong."""
    model = fake_model(s, "cuda")
    for stage in (*range(len(s.stage_ends)), -1):
        batch, weights = fake_batch(s, stage, 1, "cuda"), t.future_weights(0, s).to("cuda")
        loss = model(*batch, windows(s, stage), weights)
        name = f"stage {stage + 1}" if stage >= 0 else "validation"
        print(f"  {name}: {tuple(batch.ids.shape)} tokens -> {loss.dtype} loss on {loss.device}")


def main() -> None:
    s = t.Settings()
    with FAKE:
        model = fake_model(s, "cpu")
        counts = defaultdict(int)
        for name, p in model.named_parameters():
            counts[name.split(".")[0]] += p.numel()
        total = sum(counts.values())
        print(f"{total:,} parameters: " + ", ".join(f"{k} {n:,}" for k, n in counts.items()))
        for stage in range(len(s.stage_ends)):
            products, seen = flops(s, stage)
            work = f"{products / 1e6:.0f} MFLOP of products, {seen / 1e6:.0f} of attention"
            print(f"stage {stage + 1}: {s.batch_tokens[stage]:,} tokens a step, per token {work}")
        ranks_table(s, sum(flops(s, len(s.stage_ends) - 1)))
        if torch.version.cuda:
            print("\nforward pass, traced on fake CUDA tensors:")
            trace(s)
        else:
            print("\nforward pass: not traced, since this is a build of torch without CUDA")


if __name__ == "__main__":
    main()
