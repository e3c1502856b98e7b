"""The baseline of the CPU track: GPT-2 as it is usually trained, on the same data and metric.

Learned positions, LayerNorm, GELU, one table for embedding and head, AdamW with warm-up, cosine
decay and clipping. The plumbing (data, ranks, clock, log, validation, probe) is train_gpt.py's.
"""

from time import perf_counter as now

PROCESS_START = now()  # a run's wall clock starts before torch is imported

import argparse
import contextlib
import copy
import ctypes
import dataclasses
import datetime
import hashlib
import inspect
import json
import math
import os
import platform
import re
import resource
import secrets
import shutil
import signal
import sys
import traceback
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

HERE = Path(__file__).resolve().parent
# a record's frozen copy lies deeper than the repository's root, and brings its own shards.py
ROOT = next((p for p in (HERE, *HERE.parents) if (p / "data/shards.py").exists()), HERE)
sys.path.append(str(ROOT / "data"))

import shards
from shards import UserError, Vocabulary

# ------------------------------------------------------------------------------------------------
# settings


@dataclass(frozen=True)
class Settings:
    """All that a run depends on; every field is a flag."""
    preset: str = "cpu"  # there is no other
    seed: int = 0  # of the initial weights and of the order of rows
    # data
    train_files: str = "data/sotu_train_*.bin"  # a glob, from the repository's root
    val_file: str = "data/sotu_val_000000.bin"  # one file
    val_tokens: int = 0  # predicted tokens of the validation file; 0: all of it
    vocab_size: int = 2048  # GPT-2's first vocab_size - 1 ids, and the document start
    epochs: int = 10  # passes over the training files, at most
    # model
    num_layers: int = 4  # blocks
    num_heads: int = 4  # per block
    head_dim: int = 32  # model_dim is num_heads * head_dim
    mlp_ratio: int = 4  # hidden units of the MLP over model_dim
    init_std: float = 0.02  # of all weights; of what writes to the stream, less by its depth
    # schedule and optimizer
    train_steps: int = 5000  # optimizer steps
    batch_tokens: int = 2048  # per step, over all ranks
    seq_len: int = 128  # tokens of a row
    lr: float = 0.004  # AdamW's, of all parameters
    warmup: int = 100  # steps of linear warm-up, then a cosine to 0
    betas: tuple[float, float] = (0.9, 0.95)  # AdamW's
    weight_decay: float = 0.1  # of matrices and tables
    clip: float = 1.0  # largest gradient norm
    # evaluation and running
    val_every: int = 2500  # steps between validations; 0: only before and after training
    micro_batch_tokens: int = 4096  # per forward and rank, at most; less memory, the same maths
    log_every: int = 10  # steps between lines of the log
    timeout: int = 60  # seconds that a rank waits for the others before it gives up

    @property
    def model_dim(self) -> int:
        return self.num_heads * self.head_dim



def parse_flag(field: dataclasses.Field, text: str):
    """A flag's text -> the field's value; ValueError where it is not of the field's type."""
    if typing.get_origin(field.type) is tuple:
        kind = typing.get_args(field.type)[0]
        return tuple(kind(part) for part in text.split(",") if part)
    return field.type(text)


def parse_arguments(argv: list[str]) -> tuple[Settings, argparse.Namespace]:
    """Flags -> settings, and what is not a setting: run_id and log_dir."""

    def refuse(message: str):
        raise UserError(f"{message}; --help lists the flags")

    parser = argparse.ArgumentParser(prog="train_gpt.py", allow_abbrev=False, description=__doc__)
    parser.error, flag = refuse, parser.add_argument
    flag("--run_id", help="name of the log, [A-Za-z0-9._-]{1,64} (the time)")
    flag("--log_dir", type=Path, default=ROOT / "logs", help="folder of the log (logs)")
    # a field's trailing comment is its help: the source and --help say the same
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Settings), re.M))
    for field in dataclasses.fields(Settings):
        text = f"{comments[field.name]} ({field.default})"
        how = dict(action=argparse.BooleanOptionalAction) if field.type is bool else {}
        flag(f"--{field.name}", help=text.replace("%", "%%"), default=None, **how)
    args = parser.parse_args(argv)
    if args.preset not in (None, "cpu"):
        raise UserError(f"--preset {args.preset}: there is only cpu")
    changes = {}
    for field in dataclasses.fields(Settings)[1:]:
        value = getattr(args, field.name)
        try:
            if value is not None:
                changes[field.name] = value if field.type is bool else parse_flag(field, value)
        except ValueError:
            kind = getattr(field.type, "__name__", field.type)
            raise UserError(f"--{field.name} {value}: not of type {kind}") from None
    if args.run_id and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", args.run_id):
        raise UserError(f"--run_id {args.run_id!r}: letters, digits, '.', '_', '-', at most 64")
    return Settings(**changes), args


def check_settings(s: Settings, world_size: int) -> None:
    """Raise UserError for whatever cannot run, with the value and what would."""
    if s.batch_tokens % (s.seq_len * world_size):
        raise UserError(f"{world_size} ranks cannot share the rows of {s.batch_tokens} tokens")


def lr_multiplier(step: int, s: Settings) -> float:
    """Linear warm-up, then a cosine to 0."""
    if step < s.warmup:
        return (step + 1) / s.warmup
    return 0.5 * (1 + math.cos(math.pi * (step - s.warmup) / (s.train_steps - s.warmup)))


# ------------------------------------------------------------------------------------------------
# model: B rows, T tokens of a row, H heads, D dimensions of a head, C = H * D model, V vocabulary


class Block(nn.Module):
    def __init__(self, s: Settings):
        super().__init__()
        C, hidden, self.num_heads = s.model_dim, s.mlp_ratio * s.model_dim, s.num_heads
        self.norm1, self.norm2 = nn.LayerNorm(C, bias=False), nn.LayerNorm(C, bias=False)
        self.qkv, self.attn_proj = nn.Linear(C, 3 * C, bias=False), nn.Linear(C, C, bias=False)
        self.fc, self.mlp_proj = nn.Linear(C, hidden, bias=False), nn.Linear(hidden, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        qkv = self.qkv(self.norm1(x)).view(B, T, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp_proj(F.gelu(self.fc(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, s: Settings):
        super().__init__()
        self.embed = nn.Embedding(s.vocab_size, s.model_dim)
        self.position = nn.Embedding(s.seq_len, s.model_dim)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.num_layers))
        self.norm = nn.LayerNorm(s.model_dim, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        """(B, T) ids -> (B, T, C) of the last block, normed."""
        x = self.embed(ids) + self.position.weight[: ids.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed.weight)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy in nats over the targets, (B, T), that are not negative."""
        logits = self.logits(self.hidden(ids)).flatten(0, 1)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum")


@torch.no_grad()
def build_model(s: Settings) -> GPT:
    """The model with its first weights, the same on every rank."""
    model, generator = GPT(s), torch.Generator().manual_seed(s.seed)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            depth = (2 * s.num_layers) ** -0.5 if "proj" in name else 1.0
            p.normal_(std=s.init_std * depth, generator=generator)
    return model


def build_optimizer(model: GPT, s: Settings) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [dict(params=matrices, weight_decay=s.weight_decay)]
    groups += [dict(params=gains, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=s.lr, betas=s.betas, fused=True)


# ------------------------------------------------------------------------------------------------
# data: GPT-2 tokens from shards, in the run's vocabulary, as rows of a batch


def count_rows(s: Settings) -> list[tuple[int, int, int]]:
    """(rows of the whole run, seq_len, the same)."""
    return [(s.train_steps * s.batch_tokens // s.seq_len, s.seq_len, s.seq_len)]


def survey_data(s: Settings, vocabulary: Vocabulary) -> tuple[list[Path], list[dict]]:
    """The training files that the schedule reads, and the log's entry of every shard; UserError."""
    train, val, shapes = ROOT / s.train_files, ROOT / s.val_file, count_rows(s)
    return shards.survey(train, val, s.val_tokens, shapes, "stream", s.epochs, vocabulary)


class Batch(NamedTuple):
    ids: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, -1 where nothing is predicted


class Loader:
    """Makes a rank's batches from rows, on its device."""

    def __init__(self, s: Settings, ranks: "Ranks", vocabulary: Vocabulary):
        self.s, self.ranks, self.vocabulary = s, ranks, vocabulary

    def batch(self, rows: list, size: int) -> Batch:
        """Rows -> tensors; a row of less than `size` tokens is padded, unpredicted."""
        ids = np.zeros((len(rows), size), np.int64)
        targets = np.full((len(rows), size), -1, np.int64)
        for i, row in enumerate(rows):
            at = 0
            for tokens, start, length in row:
                after = tokens[start + 1 : start + 1 + length]
                ids[i, at : at + length] = tokens[start : start + length]
                targets[i, at : at + len(after)] = after
                at += length
        return Batch(torch.from_numpy(ids), torch.from_numpy(targets))

    def micro_batches(self, rows: list, size: int) -> list[Batch]:
        """Rows in as few equal batches as micro_batch_tokens allows."""
        most = min(self.s.micro_batch_tokens // size, len(rows))
        n = next(n for n in range(most, 0, -1) if len(rows) % n == 0)
        return [self.batch(rows[i : i + n], size) for i in range(0, len(rows), n)]

    def steps(self, files: list[Path]):
        """Yields this rank's micro-batches of each step; a step's rows depend on no rank."""
        s, rank, world_size = self.s, self.ranks.rank, self.ranks.world_size
        expand, start = self.vocabulary.expand, self.vocabulary.document_start
        arrays = (expand(shards.read_shard(p)) for _ in range(s.epochs) for p in files)
        rows = shards.ROW_MAKERS["stream"](arrays, count_rows(s), start, s.seed)
        for step in range(s.train_steps):
            batch = [next(rows, None) for _ in range(s.batch_tokens // s.seq_len)]
            if batch[-1] is None:
                raise UserError(f"the data ended at step {step} of {s.train_steps}")
            share = len(batch) // world_size
            yield self.micro_batches(batch[rank * share : (rank + 1) * share], s.seq_len)


# ------------------------------------------------------------------------------------------------
# ranks, clock and log


class Ranks(NamedTuple):
    """This process among those that the launcher started."""

    rank: int
    world_size: int
    device: torch.device

    def sum(self, *values: Tensor | float) -> list[float]:
        """Each value summed over the ranks, in fp64."""
        total = torch.stack([torch.as_tensor(v).to(self.device, torch.float64) for v in values])
        if self.world_size > 1:
            dist.all_reduce(total)
        return total.tolist()

    def from_first(self, make):
        """What make() returns on rank 0, on every rank; a user's mistake there is raised here."""
        box = [None]
        if self.rank == 0:
            try:
                box = [make()]
            except UserError as error:
                box = [error]
        if self.world_size > 1:
            dist.broadcast_object_list(box, src=0, device=self.device)
        if isinstance(box[0], UserError):
            raise box[0]
        return box[0]


def join_ranks(s: Settings) -> Ranks:
    """Join the process group that the launcher's variables describe; without them, one process."""
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if world_size > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=s.timeout))
    return Ranks(rank, world_size, device)


class Run:
    """The training clock and the log: JSON lines on disk, a few words on the terminal."""

    def __init__(self, ranks: Ranks, path: Path):
        self.ranks, self.path, self.step = ranks, path, 0
        self.train_seconds, self.started = 0.0, None
        self.file, self.bar, self.told = None, None, now()
        if ranks.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(path, "x", encoding="utf-8")

    def write(self, kind: str, **fields) -> None:
        if self.file:
            self.file.write(json.dumps({"kind": kind, **fields}) + "\n")
            self.file.flush()

    def say(self, text: str) -> None:
        if self.ranks.rank == 0:
            tqdm.write(text)

    def clock(self, runs: bool) -> float:
        """Start or stop the training clock, when the device has done all its work; seconds."""
        time = now()
        self.train_seconds += time - self.started if self.started else 0.0
        self.started = time if runs else None
        return self.train_seconds

    @contextlib.contextmanager
    def off_clock(self, name: str, **fields):
        """A named section that is not training: the clock stands, its seconds go into the log."""
        was_running = self.started is not None
        self.clock(False)
        start = now()
        yield
        self.clock(False)
        self.write("off_clock", name=name, seconds=now() - start, **fields)
        if was_running:
            self.clock(True)

    def progress(self, step: int, steps: int, text: str) -> None:
        """A bar on a terminal, otherwise a line every five seconds."""
        if self.ranks.rank == 0 and sys.stderr.isatty():
            self.bar = self.bar or tqdm(total=steps, unit="step", dynamic_ncols=True)
            self.bar.set_postfix_str(text)
            self.bar.update(step - self.bar.n)
        elif now() - self.told > 5:
            self.told = now()
            self.say(f"step:{step}/{steps} {text}")

    def close(self, status: str, reason: str) -> None:
        seconds = self.train_seconds if self.started is None else self.clock(False)
        facts = dict(steps=self.step, train_seconds=seconds, wall_seconds=now() - PROCESS_START)
        memory = peak_memory()
        self.write("end", status=status, reason=reason, **facts, peak_memory_mib=memory)
        for closing in filter(None, (self.bar, self.file)):
            closing.close()


def peak_memory() -> float:
    """Of this rank so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def keep_code(log_dir: Path) -> dict[str, str]:
    """sha256 of all the code of a run; it is kept beside the log, once for each version."""
    files = [Path(__file__), Path(shards.__file__)]
    code = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    folder = log_dir / "code" / hashlib.sha256("".join(code.values()).encode()).hexdigest()[:16]
    if log_dir != HERE and not folder.exists():  # a record's folder has it already
        folder.mkdir(parents=True)
        for path in files:
            shutil.copyfile(path, folder / path.name)
    return code


def header(s: Settings, run: Run, entries: list[dict], num_params: int) -> dict:
    """What a reader must know to judge a run and repeat it; nothing of the user or the host."""
    device, cpu = platform.machine(), Path("/proc/cpuinfo")
    if cpu.exists():
        device = (re.findall(r"model name\s*: (.*)", cpu.read_text()) or [device])[0]
    versions = dict(torch=torch.__version__, numpy=np.__version__, cuda=torch.version.cuda)
    public = ("OMP_", "MKL_", "TORCH_COMPILE", "TORCHINDUCTOR_", "TORCHDYNAMO_")
    return dict(
        run_id=run.path.stem,
        time=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        track=s.preset if Settings(seed=s.seed) == s else "custom",
        seed=s.seed,
        settings=dataclasses.asdict(s),
        code=keep_code(run.path.parent),
        versions=dict(python=platform.python_version(), **versions),
        device=device,
        world_size=run.ranks.world_size,
        threads=torch.get_num_threads(),
        num_params=num_params,
        vocab_size=s.vocab_size,
        shards=entries,
        environment={k: v for k, v in os.environ.items() if k.startswith(public) and "/" not in v},
    )


# ------------------------------------------------------------------------------------------------
# evaluation


class Validation:
    """The whole validation set in rows of seq_len, the same tokens at any world size."""

    def __init__(self, s: Settings, loader: Loader):
        self.s, self.loader = s, loader
        tokens = loader.vocabulary.expand(shards.read_shard(ROOT / s.val_file))
        tokens = tokens[: (s.val_tokens or len(tokens) - 1) + 1]
        self.tokens = len(tokens) - 1  # that are predicted
        self.bytes = int(loader.vocabulary.bytes[tokens[1:]].sum())
        starts = range(0, self.tokens, s.seq_len)
        rows = [[(tokens, at, min(s.seq_len, self.tokens - at))] for at in starts]
        share = -(-len(rows) // loader.ranks.world_size)
        self.rows = rows[loader.ranks.rank * share :][:share]

    @torch.no_grad()
    def loss(self, model) -> tuple[float, float]:
        """Mean nats per token, and bits per byte, which alone compares across vocabularies."""
        total, length = torch.zeros((), dtype=torch.float64), self.s.seq_len
        size = max(1, self.s.micro_batch_tokens // length)
        for i in range(0, len(self.rows), size):
            rows = self.rows[i : i + size]
            rows += [[]] * (size - len(rows))  # one shape for all
            total = total + model(*self.loader.batch(rows, length))
        loss = self.loader.ranks.sum(total)[0] / self.tokens
        return loss, loss * self.tokens / self.bytes / math.log(2)


@torch.no_grad()
def probe_causality(run: Run, model: GPT, s: Settings, loader: Loader) -> None:
    """Change the second half of a row: no logit before may move, and some after must."""
    size = s.seq_len
    half, near = size // 2, min(size // 2, 512)  # what is near the change fits into memory
    rng, logits = np.random.default_rng(0), []
    tokens = rng.integers(s.vocab_size - 1, size=size + 1).astype(np.uint16)
    for row in (tokens, np.concatenate([tokens[:half], rng.permutation(tokens[half:])])):
        batch = loader.batch([[(row, 0, size)]], size)
        hidden = model.hidden(batch.ids)
        logits.append(model.logits(hidden[0, half - near : half + near]))
    moved = (logits[0] - logits[1]).abs().amax(-1)
    change, effect = moved[:near].max().item(), moved[near:].max().item()
    ok = change <= 1e-3 < effect
    run.write("probe", name="causality", step=run.step, max_change=change, effect=effect, ok=ok)
    if not ok:
        raise ArithmeticError(
            f"the causality probe failed: logits moved by {change:g} before what was changed in a"
            f" row (must be 0), by {effect:g} after it (must not be 0)"
        )


# ------------------------------------------------------------------------------------------------
# training


def train_step(model: GPT, optimizer, batches: list[Batch], step: int, s: Settings, ranks: Ranks):
    """One optimizer step; summed loss and number of predictions of this rank, gradient norm."""
    total, count = 0.0, 0
    for batch in batches:
        loss = model(*batch)
        (loss / s.batch_tokens).backward()
        total, count = total + loss.detach(), count + (batch.targets >= 0).sum()
    if ranks.world_size > 1:
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        dist.all_reduce(flat)
        sizes = [p.numel() for p in model.parameters()]
        for p, grad in zip(model.parameters(), flat.split(sizes), strict=True):
            p.grad = grad.view_as(p)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), s.clip, error_if_nonfinite=True)
    for group in optimizer.param_groups:
        group["lr"] = s.lr * lr_multiplier(step, s)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, count, grad_norm


def warm_up(run: Run, model: GPT, optimizer, s: Settings, loader: Loader) -> None:
    """Three steps on random tokens, and the causality probe; weights and state are restored."""
    weights = [p.detach().clone() for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    rng = np.random.default_rng(run.ranks.rank)
    row = [(rng.integers(s.vocab_size, size=s.seq_len + 1).astype(np.uint16), 0, s.seq_len)]
    rows = [row] * (s.batch_tokens // s.seq_len // run.ranks.world_size)
    for _ in range(3):
        batches = loader.micro_batches(rows, s.seq_len)
        train_step(model, optimizer, batches, s.warmup, s, run.ranks)
    probe_causality(run, model, s, loader)
    with torch.no_grad():
        for p, first in zip(model.parameters(), weights, strict=True):
            p.copy_(first)
    optimizer.load_state_dict(state)


def validate(run: Run, model, validation: Validation, step: int, steps: int, tokens: int):
    """Log and print the validation loss, off the clock; nats per token and bits per byte."""
    with run.off_clock("validation"):
        loss, bits = validation.loss(model)
    seconds = run.train_seconds
    size = dict(tokens=validation.tokens, bytes=validation.bytes, train_tokens=tokens)
    run.write("val", step=step, loss=loss, bits_per_byte=bits, **size, train_seconds=seconds)
    run.say(
        f"step:{step}/{steps} val_loss:{loss:.4f} train_time:{seconds * 1e3:.0f}ms"
        f" step_avg:{seconds * 1e3 / max(1, step):.1f}ms bits_per_byte:{bits:.4f}"
    )
    return loss, bits


def log_step(run: Run, step: int, total, count, grad_norm, tokens: int, s: Settings) -> None:
    total, count = run.ranks.sum(total, count)
    seconds, loss, grad_norm = run.clock(True), total / count, float(grad_norm)
    facts = dict(loss=loss, grad_norm=grad_norm, lr_multiplier=lr_multiplier(step, s))
    run.write("step", step=step, **facts, tokens=tokens, train_seconds=seconds)
    left, speed = seconds * (s.train_steps / (step + 1) - 1), tokens / seconds
    text = f"train_loss:{loss:.4f} {speed:,.0f} tokens/s, {left:.0f} s left"
    run.progress(step + 1, s.train_steps, text)


def train(run: Run, s: Settings, files: list[Path], entries: list[dict], vocabulary) -> None:
    """The whole run, from the model's first weights to the last validation."""
    ranks, since = run.ranks, now()
    loader = Loader(s, ranks, vocabulary)
    model = build_model(s)
    optimizer = build_optimizer(model, s)
    validation = Validation(s, loader)
    if ranks.rank == 0:
        head = header(s, run, entries, sum(p.numel() for p in model.parameters()))
        run.write("header", **head)
        size = f"{ranks.world_size} ranks, {head['num_params']:,} parameters"
        run.say(f"{s.preset} track: {head['device']}, {size}; log: {run.path}")
    run.write("off_clock", name="startup", seconds=since - PROCESS_START)
    run.write("off_clock", name="model", seconds=now() - since)
    with run.off_clock("warmup", state_restored=True):
        warm_up(run, model, optimizer, s, loader)
    validate(run, model, validation, 0, s.train_steps, 0)

    batches, tokens = shards.prefetch(loader.steps(files)), 0
    run.clock(True)
    for step in range(s.train_steps):
        run.step, last = step, step + 1 == s.train_steps
        total, count, norm = train_step(model, optimizer, next(batches), step, s, ranks)
        tokens += s.batch_tokens
        if step % s.log_every == 0 or last:
            log_step(run, step, total, count, norm, tokens, s)
        if last or (s.val_every and (step + 1) % s.val_every == 0):
            loss, bits = validate(run, model, validation, step + 1, s.train_steps, tokens)
    seconds, run.step = run.clock(False), s.train_steps

    with run.off_clock("probe"):
        probe_causality(run, model, s, loader)
    run.say(
        f"{loss:.4f} nats per token, {bits:.4f} bits per byte after {seconds:.1f} s of training,"
        f" {tokens / seconds:,.0f} tokens/s, {peak_memory():,.0f} MiB a rank"
    )


def log_path(s: Settings, args: argparse.Namespace) -> Path:
    """Where this run's log will be; never one that is there."""
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d_%H%M%S")
    run_id = args.run_id or f"{date}_{s.preset}_s{s.seed}_{secrets.token_hex(2)}"
    path = args.log_dir.resolve() / f"{run_id}.jsonl"
    if path.exists():
        raise UserError(f"--run_id {run_id}: {path} exists; choose another")
    return path


def stop(number: int, frame) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def train_and_close(run: Run, *what) -> int:
    """train(), and whatever happens the log gets its last line; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup has its way
            signal.signal(number, stop)
    status, reason = "ok", ""
    try:
        train(run, *what)
    except KeyboardInterrupt as signal_name:
        status, reason = "interrupted", f"{signal_name} at step {run.step}"
    except Exception as error:
        if not isinstance(error, (ArithmeticError, UserError)):
            traceback.print_exc()
        told = str(error).strip().split("\n")[0]
        status, reason = "failed", f"{type(error).__name__} at step {run.step}: {told}"
    run.close(status, reason)
    run.say(f"log: {run.path}")
    if reason:
        print(f"train_gpt.py: rank {run.ranks.rank}: {status}: {reason}", file=sys.stderr)
    return int(status != "ok")


def keep_memory() -> None:
    """Let freed memory stay with the process: fetching it anew takes a sixth of a CPU step."""
    with contextlib.suppress(OSError, AttributeError):  # glibc alone has it
        for option, size in ((-3, 2**30), (-1, 2**31 - 1)):  # M_MMAP_ and M_TRIM_THRESHOLD, bytes
            ctypes.CDLL(None).mallopt(option, size)


def main(argv: list[str]) -> int:
    keep_memory()
    try:
        s, args = parse_arguments(argv)
        check_settings(s, int(os.environ.get("WORLD_SIZE", 1)))
        vocabulary = Vocabulary(s.vocab_size)
        ranks = join_ranks(s)
        files, entries = ranks.from_first(lambda: survey_data(s, vocabulary))
        path = ranks.from_first(lambda: log_path(s, args))
        run = Run(ranks, path)
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"train_gpt.py: {error}", file=sys.stderr)
        return 2
    code = train_and_close(run, s, files, entries, vocabulary)
    if dist.is_initialized() and code == 0:
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
