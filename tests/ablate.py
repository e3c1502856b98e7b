"""What each ingredient is worth on the CPU track: `python tests/ablate.py --seeds 4`.

Every variant differs from the cpu preset in the flags below and runs with the same seeds, one run
for each core at a time, one thread each; other flags go to all of them. The table has the mean
difference in validation bits per byte (positive: the preset is better without the change), its 95 %
interval over the paired seeds, and the median of the seconds of training over the preset's. Logs
stay in --logs: runs that are there are not made again, so that more seeds or a new variant cost
only themselves.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median, stdev

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "records"))

from record import t_tail

PRESET = "preset"
VARIANTS = {
    PRESET: "",
    # taken out
    "no bigram hash embedding": "--bigram_lr 0",
    "no value embeddings": "--value_embed_blocks=",
    "no NorMuon": "--beta2 0",
    "half of the dimensions rotate": "--rope_fraction 0.5",
    "softmax scale 1/sqrt(D)": "--attn_scale 0.177",
    "no cool-down": "--cooldown_floor 1.0",
    "one Adam rate for all tables": "--embed_lr 0.05 --value_embed_lr 0.05",
    "no attention gate": "--no-attn_gate",
    "own value left in (no XSA)": "--no-own_value",
    "Q and K whole, not by pairs of heads": "--qk_heads 0",
    # put in
    "value embedding gate": "--value_gate",
    "V and O from uniform": "--attn_init 0.5",
    "second next token": "--future 0.5 --future_ends 0.66",
    "signs for bigrams": "--bigram_signs 8192",
    "skip from block 0 to 3": "--skip 0,3",
    "one source for the last two": "--one_source 2,3",
    "cautious decay": "--cautious --weight_decay 0.1",
    "momentum .85 to .95": "--momentum 0.95 --momentum_start 0.85 --momentum_warmup 200"
    " --momentum_cooldown 50",
    "two heads of 64": "--num_heads 2 --head_dim 64 --attn_scale 0.177",
    "Q and K by heads": "--qk_heads 1",
    "heads in pairs, blocks 0 and 2": "--paired_heads 0,2",
    "embedding tied to the head for 2/3": "--untie 0.66 --head_lr 0.02 --embed_lr 0.02",
    "twice the rate for MLP out": "--mlp_out_lr 2",
    "Adam on every second step": "--adam_every 2",
    "batch in stages": "--stage_ends 0.33,0.66,1 --batch_tokens 1024,2048,3072 --seq_len"
    " 128,128,128 --max_document 128,128,128 --short_window 128,128,128 --long_window 128,128,128"
    " --stage_lr 0.8,1,1.2",
}


def half_width(gaps: list[float]) -> float:
    """Half of the 95 % interval of the mean of paired differences, by Student's t."""
    low, high = 0.0, 1e3
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, len(gaps) - 1) > 0.025 else (low, middle)
    return high * stdev(gaps) / math.sqrt(len(gaps))


def name_of(variant: str, seed: int) -> str:
    kept = "".join(c if c.isalnum() else "_" for c in variant)
    return f"{kept}_seed{seed}"


def run(variant: str, seed: int, logs: Path, more: list[str]) -> None:
    path = logs / f"{name_of(variant, seed)}.jsonl"
    if path.exists() and ended(path):
        return
    path.unlink(missing_ok=True)
    flags = [*VARIANTS[variant].split(), "--seed", str(seed), "--log_every", "100", *more]
    command = [sys.executable, str(ROOT / "train_gpt.py"), "--preset", "cpu", "--val_every", "0"]
    subprocess.run(
        [*command, "--log_dir", str(logs), "--run_id", path.stem, *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )


def ended(path: Path) -> dict | None:
    """Bits per byte and seconds of a run that ended well, else None."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not lines or lines[-1].get("status") != "ok":
        return None
    bits = [line["bits_per_byte"] for line in lines if line["kind"] == "val"][-1]
    return {"bits": bits, "seconds": lines[-1]["train_seconds"]}


def table(names: list[str], seeds: int, logs: Path) -> str:
    found = {
        name: [ended(logs / f"{name_of(name, seed)}.jsonl") for seed in range(seeds)]
        for name in names
    }
    base = found[PRESET]
    mean = fmean(run["bits"] for run in base)
    lines = [f"| change to the preset ({mean:.4f}) | bits per byte | 95 % | time |"]
    lines.append("|---|---|---|---|")
    for name in names:
        if name == PRESET:
            continue
        pairs = list(zip(found[name], base, strict=True))
        gaps = [mine["bits"] - theirs["bits"] for mine, theirs in pairs]
        ratio = median(mine["seconds"] / theirs["seconds"] for mine, theirs in pairs)
        half = half_width(gaps) if seeds > 1 else math.nan
        lines.append(f"| {name} | {fmean(gaps):+.4f} | ± {half:.4f} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), help="names of variants")
    parser.add_argument("--logs", type=Path, default=ROOT / "logs/ablation")
    args, more = parser.parse_known_args()
    names = [PRESET, *(name for name in args.only if name != PRESET)]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1))) as pool:
        jobs = [(name, seed) for seed in range(args.seeds) for name in names]
        list(pool.map(lambda job: run(*job, args.logs, more), jobs))
    print(table(names, args.seeds, args.logs))


if __name__ == "__main__":
    main()
