"""Train a GPT on token shards as fast as is known.

    ./run.sh                          the track that fits this machine: 8 GPUs, or a laptop's CPU
    ./run.sh --seed 1 --lr 0.04       every setting below is a flag
    python train_gpt.py --preset cpu --train_steps 20         one process, without the launcher

One script for one process or many, on GPUs or a CPU: what differs between the tracks is a setting.
Only the process group, attention, the dtype and the clock's synchronization look at the device.
The optimizer is muon.py's, the data come from data/shards.py, and harness.py has what is around a
run: ranks, clock, log, checkpoints.
"""

from time import perf_counter as now

PROCESS_START = now()  # a run's wall clock starts before torch is imported

import copy
import dataclasses
import itertools
import math
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

import harness
import shards
from harness import ROOT, Ranks, Run, UserError
from muon import Muon
from shards import Vocabulary

# ------------------------------------------------------------------------------------------------
# settings


@dataclass(frozen=True)
class Settings:
    """All that a run depends on; every field is a flag. Tuples hold one value for each stage."""
    preset: str = "gpu"  # gpu: the 8xH100 recipe; cpu: a speedrun for two cores
    seed: int = 0  # of the initial weights and of the order of rows
    # data
    train_files: str = "data/fineweb10B/fineweb_train_*.bin"  # a glob, from the repository's root
    val_file: str = "data/fineweb10B/fineweb_val_000000.bin"  # one file
    val_tokens: int = 10_485_760  # predicted tokens of the validation file; 0: all of it
    vocab_size: int = 50257  # GPT-2's first vocab_size - 1 ids, and the document start
    rows: str = "documents"  # documents: whole ones from their starts; stream: cut without loss
    epochs: int = 1  # passes over the training files, at most
    # model
    num_layers: int = 11  # blocks
    num_heads: int = 6  # per block
    head_dim: int = 128  # model_dim is num_heads * head_dim
    mlp_ratio: int = 4  # hidden units of the MLP over model_dim
    value_embed_blocks: tuple[int, ...] = (1, 2, 8, 9, 10)  # blocks whose values get a token's own
    bigram_rows: int = 251520  # of the table that a token and the one before hash into
    bigram_signs: int = 8192  # rows of fixed signs that tell a bigram row's tokens apart; 0: none
    attn_gate: bool = True  # a head's output times 2 sigmoid(w . 12 dimensions of its input)
    value_gate: bool = True  # a head's value embedding times the same, of 6 and 6 dimensions
    own_value: bool = True  # take from a head's output a learned part of what lies along its v
    key_offset: bool = True  # in long_window_blocks, unrotated keys are those of the token before
    attn_init: float = 0.5  # standard deviation of attention's output matrix, times sqrt(C)
    skip: tuple[int, ...] = (3, 6)  # the first block's output also goes into the second
    no_attention: tuple[int, ...] = (6,)  # blocks that have only an MLP
    paired_heads: tuple[int, ...] = (0, 2, 5, 9)  # blocks where two heads see each other's keys
    one_source: tuple[int, ...] = (8, 9, 10)  # blocks whose attention reads the first one's input
    future: tuple[float, ...] = (0.5, 0.25)  # weight of the loss on the second next token, third
    future_ends: tuple[float, ...] = (0.66, 0.33)  # when it has fallen to 0, over a third of a run
    untie: float = 0.66  # fraction of train_steps until which embedding and head are one table
    long_window_blocks: tuple[int, ...] = (3, 10)  # blocks that look as far as the long window
    attn_scale: float = 0.12  # softmax scale; queries and keys have norm sqrt(head_dim)
    rope_fraction: float = 0.5  # of a head's dimensions that rotate
    rope_base: float = 1024.0  # lowest frequency is 1 / rope_base radians per token
    softcap: float = 23.0  # logits are softcap * sigmoid((l + 5) / 7.5)
    fp8_head: bool = True  # the head's products in training, on a device that passes self_check
    # schedule: a stage ends at its fraction of train_steps
    train_steps: int = 1400  # optimizer steps
    stage_ends: tuple[float, ...] = (0.33, 0.66, 0.99, 1.0)  # fraction of train_steps
    batch_tokens: tuple[int, ...] = (131072, 262144, 393216, 393216)  # per step, over all ranks
    seq_len: tuple[int, ...] = (16384, 32768, 49152, 49152)  # tokens of a row
    max_document: tuple[int, ...] = (896, 2048, 2048, 2048)  # tokens of a document; rest left out
    short_window: tuple[int, ...] = (128, 384, 640, 768)  # tokens that a token looks back
    long_window: tuple[int, ...] = (384, 896, 1408, 1664)  # tokens, in long_window_blocks
    stage_lr: tuple[float, ...] = (1.0, 1.52, 1.73, 1.73)  # times every learning rate
    cooldown_frac: float = 0.6  # the learning rate falls linearly over this last part
    cooldown_floor: float = 0.15  # to this fraction
    # optimizer: Muon for the blocks' matrices, Adam for the rest
    lr: float = 0.023  # Muon's
    mlp_out_lr: float = 4.0  # times lr, for the MLPs' output matrices
    qk_heads: int = 2  # heads of a query or key matrix to Muon; 0: all in one
    momentum: float = 0.95  # Muon's, between warm-up and cool-down
    momentum_start: float = 0.85  # at the first and the last step
    momentum_warmup: int = 300  # steps
    momentum_cooldown: int = 50  # steps
    weight_decay: float = 0.05  # Muon's, decoupled; the decay per step is lr * weight_decay
    cautious: bool = True  # decay only where update and weight have the same sign
    beta2: float = 0.9  # NorMuon's second moment per neuron; 0 switches it off
    embed_lr: float = 0.008  # token embedding, once it is a table of its own
    value_embed_lr: float = 0.3  # value embeddings
    bigram_lr: float = 0.3  # bigram table
    head_lr: float = 0.008  # output head
    adam_every: int = 2  # steps between Adam's, of tables and head, on the sum of the gradients
    scalar_lr: float = 0.04  # gains, gates and other small vectors
    adam_betas: tuple[float, float] = (0.8, 0.95)  # decay of Adam's two averages
    adam_eps: float = 1e-10  # added to the root of Adam's second average
    # evaluation and running
    val_every: int = 125  # steps between validations; 0: only before and after training
    val_seq_len: int = 65536  # tokens of a validation row
    val_windows: tuple[int, int] = (768, 2560)  # short and long window of validation, tokens
    micro_batch_tokens: int = 65536  # per forward and rank, at most; less memory, the same maths
    head_rows: int = 8192  # tokens whose logits are there at a time; less memory, the same maths
    compile: bool = True  # torch.compile, before the clock starts
    save_every: int = 0  # steps between checkpoints, and one at the end or at a signal; 0: none
    log_every: int = 10  # steps between lines of the log
    sample_tokens: int = 0  # tokens of generated text at the end
    target: float = 3.28  # the track's goal: nats per token (gpu), bits per byte (cpu)
    timeout: int = 600  # seconds that a rank waits for the others before it gives up

    @property
    def model_dim(self) -> int:
        return self.num_heads * self.head_dim


CPU = dataclasses.replace(
    Settings(),
    preset="cpu",
    train_files="data/sotu_train_*.bin",
    val_file="data/sotu_val_000000.bin",
    **dict(val_tokens=0, vocab_size=2048, rows="stream"),
    **dict(num_layers=4, num_heads=4, head_dim=32, value_embed_blocks=(1, 3), bigram_rows=16384),
    **dict(bigram_signs=0, value_gate=False, key_offset=False, adam_every=1),
    **dict(attn_init=0.0, skip=(), no_attention=(), one_source=(), future=(), future_ends=()),
    **dict(paired_heads=(), untie=0.0, long_window_blocks=(), attn_scale=0.25, rope_fraction=1.0),
    **dict(train_steps=730, cooldown_frac=0.5, cooldown_floor=0.0, stage_ends=(1.0,)),
    **dict(batch_tokens=(2048,), seq_len=(128,), max_document=(128,), stage_lr=(1.0,)),
    **dict(short_window=(128,), long_window=(128,), val_seq_len=128, val_windows=(128, 128)),
    **dict(lr=0.04, momentum=0.9, momentum_start=0.9, momentum_warmup=0, momentum_cooldown=0),
    **dict(mlp_out_lr=1.0, weight_decay=0.0, cautious=False, beta2=0.95),
    **dict(embed_lr=0.1, value_embed_lr=0.2, bigram_lr=0.05, head_lr=0.01, scalar_lr=0.025),
    **dict(fp8_head=False, head_rows=256, micro_batch_tokens=4096, compile=False, val_every=365),
    **dict(sample_tokens=80, timeout=60, target=1.365),
)
PRESETS = {"gpu": Settings(), "cpu": CPU}
# whatever these are, a run stays the same: they may change when it goes on from a checkpoint
HABITS = "val_every log_every save_every sample_tokens micro_batch_tokens head_rows compile timeout"


def check_settings(s: Settings, world_size: int) -> None:
    """Raise UserError for whatever cannot run, with the value and what would."""
    stages = len(s.stage_ends)
    for name in "batch_tokens seq_len max_document short_window long_window stage_lr".split():
        if len(getattr(s, name)) != stages:
            raise UserError(f"--{name} {getattr(s, name)}: one value for each of {stages} stages")
    if list(s.stage_ends) != sorted(s.stage_ends) or s.stage_ends[-1] != 1.0:
        raise UserError(f"--stage_ends {s.stage_ends}: fractions must rise to 1.0")
    if not 257 <= s.vocab_size <= 50257:
        raise UserError(f"--vocab_size {s.vocab_size}: from 257 (bytes) to 50257")
    if s.rows not in shards.ROW_MAKERS:
        raise UserError(f"--rows {s.rows}: there are {', '.join(shards.ROW_MAKERS)}")
    for name in "train_steps num_layers num_heads bigram_rows epochs log_every val_seq_len".split():
        if getattr(s, name) < 1:
            raise UserError(f"--{name} {getattr(s, name)}: at least 1")
    if s.qk_heads and s.num_heads % s.qk_heads:
        raise UserError(f"--qk_heads {s.qk_heads}: does not divide --num_heads {s.num_heads}")
    if s.paired_heads and s.num_heads % 2:
        raise UserError(f"--num_heads {s.num_heads}: must be even for --paired_heads")
    if s.head_dim < 4 or s.head_dim % 4 or s.model_dim < 12:
        raise UserError(f"--head_dim {s.head_dim}: a multiple of 4; with --num_heads 12 or more")
    if len(s.skip) not in (0, 2) or list(s.skip) != sorted(s.skip):
        raise UserError(f"--skip {s.skip}: two blocks, the earlier one first, or none")
    if len(s.future) != len(s.future_ends):
        raise UserError(f"--future {s.future}: one of --future_ends {s.future_ends} for each")
    has_blocks = "value_embed_blocks long_window_blocks skip no_attention one_source paired_heads"
    for name in has_blocks.split():
        if bad := [i for i in getattr(s, name) if not 0 <= i < s.num_layers]:
            raise UserError(f"--{name}: block {bad[0]} is not in 0..{s.num_layers - 1}")
    if bad := {*s.value_embed_blocks, *s.one_source, *s.paired_heads} & {*s.no_attention}:
        raise UserError(f"--no_attention: block {min(bad)} needs its attention")
    for batch, length in zip(s.batch_tokens, s.seq_len, strict=True):
        if length < 2 or batch < length or batch % length:
            raise UserError(f"--batch_tokens {batch}: must be a multiple of --seq_len {length}")
        if (rows := batch // length) % world_size:
            fits = ", ".join(str(w) for w in range(1, rows + 1) if rows % w == 0)
            why = f"{world_size} processes cannot share {rows} rows, a batch of {batch} tokens"
            raise UserError(f"{why}: start NPROC={fits}")
        if s.micro_batch_tokens < length:
            raise UserError(f"--micro_batch_tokens {s.micro_batch_tokens}: a row has {length}")
    if s.compile and not (torch.cuda.is_available() or shutil.which(os.environ.get("CXX", "g++"))):
        raise UserError("--compile needs a C++ compiler on a CPU: install g++, or --no-compile")


class Stage(NamedTuple):
    batch_tokens: int
    seq_len: int
    windows: tuple[int, int]  # short, long
    lr: float


def stage_at(step: int, s: Settings) -> Stage:
    """The stage of a step, 0-based."""
    i = next(i for i, end in enumerate(s.stage_ends) if step < round(end * s.train_steps))
    windows = (s.short_window[i], s.long_window[i])
    return Stage(s.batch_tokens[i], s.seq_len[i], windows, s.stage_lr[i])


def lr_multiplier(step: int, s: Settings) -> float:
    """Constant, then a linear cool-down to the floor; times the stage's own factor."""
    left = (s.train_steps - step) / max(s.cooldown_frac * s.train_steps, 1e-9)
    return stage_at(step, s).lr * (s.cooldown_floor + (1 - s.cooldown_floor) * min(1.0, left))


def future_weights(step: int, s: Settings) -> Tensor:
    """Of the loss on the next token, 1, and on those after it, each falling to 0 over a third."""
    left = [(end * s.train_steps - step) * 3 / s.train_steps for end in s.future_ends]
    fall = [min(1.0, max(0.0, x)) for x in left]
    return torch.tensor([1.0, *(w * x for w, x in zip(s.future, fall, strict=True))])


def momentum_at(step: int, s: Settings) -> float:
    """Muon's momentum: rises over momentum_warmup steps, falls over the last ones."""
    rise = min(1.0, step / max(1, s.momentum_warmup))
    fall = min(1.0, (s.train_steps - 1 - step) / max(1, s.momentum_cooldown))
    return s.momentum_start + (s.momentum - s.momentum_start) * min(rise, fall)


# ------------------------------------------------------------------------------------------------
# model: B rows, T tokens of a row, H heads, D dimensions of a head, C = H * D model, V vocabulary


class RMSNorm(torch.autograd.Function):
    """x / rms(x) over the last dimension: F.rms_norm without gain, three times faster on a CPU."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=exact)
        scale = (norm * x.size(-1) ** -0.5 + 1e-6).reciprocal_().to(x.dtype)
        y = x * scale
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        y, scale = ctx.saved_tensors
        along = (grad * y).mean(-1, keepdim=True)
        return torch.addcmul(grad, y, along, value=-1) * scale


class SquaredReLU(torch.autograd.Function):
    """relu(x)^2 in a quarter of the passes over memory that autograd makes of it on a CPU."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = F.relu(x)
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return (grad * y).mul_(2)


norm, squared_relu = RMSNorm.apply, SquaredReLU.apply


class Place(NamedTuple):
    """Where the tokens of a batch are: what every attention needs to know."""

    cos: Tensor  # (T, 1, D)
    sin: Tensor  # (T, 1, D), signed
    stretch: float  # of the softmax scale
    begins: Tensor  # (B, T, 1, 1), True where a document begins


def rotary_tables(length: int, window: int, s: Settings) -> tuple[Tensor, Tensor, float]:
    """Place's cos, sin and stretch where the long window is `window`; few dimensions may rotate.

    YaRN (https://arxiv.org/abs/2309.00071): when a window grows, slow frequencies go with it.
    """
    half, stretch = s.head_dim // 2, 1.0
    count = round(half * s.rope_fraction)
    frequency = torch.zeros(half)
    frequency[:count] = s.rope_base ** -torch.linspace(0, 1, count)
    grown = sorted(w for w in {*s.long_window, s.val_windows[1]} if w <= window)
    for old, new in itertools.pairwise(grown):
        blend = ((old * frequency / (2 * math.pi) - 1) / 31).clamp(0, 1)
        frequency *= old / new + blend * (1 - old / new)
        stretch *= 1 + 0.2 * math.log(new / old)
    angle = torch.arange(length).float()[:, None, None] * frequency
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin(), -angle.sin()], -1)
    return cos, sin, stretch


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, T, H, D), dimension i paired with i + D/2."""
    T, half = x.size(1), x.size(-1) // 2
    return torch.addcmul(x * cos[:T], x.roll(half, -1), sin[:T])


def fold(x: Tensor, n: int) -> Tensor:
    """(B, T, H, D) -> (B, n T, H / n, D): at each token n neighbouring heads take turns."""
    return x.unflatten(2, (-1, n)).transpose(2, 3).flatten(1, 2)


def unfold(x: Tensor, n: int) -> Tensor:
    return x.unflatten(1, (-1, n)).transpose(2, 3).flatten(2, 3)


def sight(segments: Tensor, window: int, seq_len: int, n: int = 1):
    """Who sees whom, as attention() takes it: a token sees itself and `window` tokens before.

    On a CPU (B, 1, nT, nT), 0 or -inf, from each token's segment; on CUDA segments' starts, window.
    """
    if segments.is_cuda:
        return n * segments, n * window
    position, segments = torch.arange(n * seq_len), segments.repeat_interleave(n, 1)
    back = position[:, None] - position
    seen = (back >= 0) & (back <= n * window) & (segments[:, :, None] == segments[:, None, :])
    return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None]


def attention(q: Tensor, k: Tensor, v: Tensor, seen, scale: float) -> Tensor:
    """Causal attention within segments and window: (B, T, H, D) each -> (B, T, H, D)."""
    if not q.is_cuda:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen.to(q.dtype), scale=scale)
        return y.transpose(1, 2)
    (starts, window), T = seen, q.size(1)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    y = varlen_attn(*flat, starts, starts, T, T, scale=scale, window_size=(window, 0))
    return y.view_as(q)


def gate(weight: Tensor, features: Tensor) -> Tensor:
    """Of each head, from 0 to 2: (H, 12), (B, T, 12) -> (B, T, H, 1)."""
    return 2 * torch.sigmoid(F.linear(features, weight.to(features.dtype)))[..., None]


class Attention(nn.Module):
    def __init__(self, s: Settings, block: int):
        super().__init__()
        self.num_heads, self.head_dim, self.scale = s.num_heads, s.head_dim, s.attn_scale
        self.turns = 2 if block in s.paired_heads else 1
        self.qk = nn.Parameter(torch.empty(2, s.model_dim, s.model_dim))
        self.v = nn.Parameter(torch.empty(s.model_dim, s.model_dim))
        self.proj = nn.Parameter(torch.empty(s.model_dim, s.model_dim))
        has_value_gate = s.value_gate and block in s.value_embed_blocks
        self.gate = nn.Parameter(torch.empty(s.num_heads, 12)) if s.attn_gate else None
        self.value_gate = nn.Parameter(torch.empty(s.num_heads, 12)) if has_value_gate else None
        self.own_value = nn.Parameter(torch.empty(s.num_heads)) if s.own_value else None
        half, count = s.head_dim // 2, round(s.head_dim // 2 * s.rope_fraction)
        still = torch.arange(s.head_dim) % half >= count  # dimensions that do not rotate
        moves = s.key_offset and block in s.long_window_blocks and count < half
        self.register_buffer("offset", still if moves else None, persistent=False)

    def forward(self, x: Tensor, value: Tensor | None, place: Place, seen) -> Tensor:
        B, T, C = x.shape
        weight = torch.cat([self.qk.flatten(0, 1), self.v])  # one product
        qkv = F.linear(x, weight).view(B, T, 3 * self.num_heads, self.head_dim)
        qk, v = qkv.split([2 * self.num_heads, self.num_heads], dim=2)
        q, k = rotate(fold(norm(qk), self.turns), place.cos, place.sin).chunk(2, dim=2)
        if self.offset is not None:
            before = F.pad(k[:, : -self.turns], (0, 0, 0, 0, self.turns, 0))
            begins = place.begins.repeat_interleave(self.turns, 1)
            k = torch.where(self.offset & ~begins, before, k)
        if value is not None:
            own = value.view_as(v)
            if self.value_gate is not None:
                own = gate(self.value_gate, torch.cat([x[..., :6], value[..., :6]], -1)) * own
            v = v + own
        y = attention(q, k, fold(v, self.turns), seen[self.turns], self.scale * place.stretch)
        y = unfold(y, self.turns)
        if self.own_value is not None:
            unit = norm(v)
            along = (y * unit).mean(-1, keepdim=True) * self.own_value.tanh().to(y.dtype)[:, None]
            y = y - along * unit
        if self.gate is not None:
            y = y * gate(self.gate, x[..., :12])
        return F.linear(y.reshape(B, T, C), self.proj)


class MLP(nn.Module):
    def __init__(self, s: Settings):
        super().__init__()
        self.fc = nn.Parameter(torch.empty(s.mlp_ratio * s.model_dim, s.model_dim))
        self.proj = nn.Parameter(torch.empty(s.model_dim, s.mlp_ratio * s.model_dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(squared_relu(F.linear(x, self.fc)), self.proj)


class Block(nn.Module):
    def __init__(self, s: Settings, i: int):
        super().__init__()
        self.attn, self.mlp = None if i in s.no_attention else Attention(s, i), MLP(s)
        self.mix = nn.Parameter(torch.empty(3))  # of stream, token embedding, bigram embedding

    def forward(self, x: Tensor, x0: Tensor, bigram: Tensor, source, value, place: Place, seen):
        """(B, T, C) stream -> stream, and what attention read; `source` for it to read, or None."""
        x = x * self.mix[0] + x0 * self.mix[1] + bigram * self.mix[2]
        if self.attn is not None:
            source = norm(x) if source is None else source
            x = x + self.attn(source, value, place, seen)
        return x + self.mlp(norm(x)), source


def squash(x: Tensor) -> Tensor:
    """The head's products -> sigmoid((x + 5) / 7.5) in fp32: a logit over softcap."""
    return x.float().add_(5).div_(7.5).sigmoid_()


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2  # of at most 448 and 57,344


def product(a: Tensor, b: Tensor, scales=(), kind: torch.dtype = E4M3) -> Tensor:
    """(M, K), (N, K) -> (M, N), a @ b.mT; given scales for both, a in `kind` by b in e4m3."""
    if not scales:
        return a @ b.mT
    a8, b8 = (a / scales[0]).to(kind).contiguous(), (b / scales[1]).to(E4M3).contiguous()
    scale_a, scale_b = ((scale, F.ScalingType.TensorWise) for scale in scales)
    fast = kind == E4M3  # sums of a gradient's products need their low bits
    return F.scaled_mm(a8, b8.mT, *scale_a, *scale_b, output_dtype=a.dtype, use_fast_accum=fast)


class HeadLoss(torch.autograd.Function):
    """Summed cross-entropy in nats of softcap * squash(hidden @ weight.T), gradients along with it.

    hidden (N, C), normed, weight (V, C); targets (N, K), negative where nothing is predicted, and
    their weights (K,): several may be asked of one row. No more than `rows` rows of logits are
    there at a time, and no gradient of them ever: on a CPU they stay in the cache, on a GPU they
    are most of the memory. In training, with fp8, products are in 8 bits. Nothing can overflow:
    scales are from the norm of a hidden row, the largest weight, the steepest slope of a logit.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, weights, softcap: float, rows: int, fp8: bool):
        total = torch.zeros((), device=hidden.device)
        grads = torch.empty_like(hidden), torch.zeros_like(weight, dtype=torch.float32)
        for_logits = for_hidden = for_weight = ()
        if fp8 and ctx.needs_input_grad[0]:
            by_x = torch.full_like(total, hidden.size(1) ** 0.5 / 448)
            by_w = weight.abs().amax().float().clamp(min=1e-12) / 448
            by_g = weights.sum() * softcap / 30 / 57344
            for_logits, for_hidden, for_weight = (by_x, by_w), (by_g, by_w), (by_g, by_x)
        for i in range(0, len(hidden), rows):
            x, y = hidden[i : i + rows], targets[i : i + rows]
            share, y = (y >= 0) * weights, y.clamp(min=0)
            s = squash(product(x, weight, for_logits))
            p = torch.exp(softcap * s)  # no more than exp(softcap): needs no maximum
            sums, all_shares = p.sum(-1, keepdim=True), share.sum(-1, keepdim=True)
            total += (sums.log() * all_shares).sum() - softcap * (s.gather(1, y) * share).sum()
            if ctx.needs_input_grad[0]:
                # (p - onehots) ds, where s's slope is softcap / 7.5 s (1 - s)
                p.mul_(all_shares / sums).scatter_add_(1, y, -share)
                g = p.mul_(s).addcmul_(p, s, value=-1).mul_(softcap / 7.5).to(x.dtype)
                grads[0][i : i + rows] = product(g, weight.mT, for_hidden, E5M2)
                grads[1].add_(product(g.mT, x.mT, for_weight, E5M2))
        ctx.save_for_backward(grads[0], grads[1].to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, grad: Tensor):
        return *(g * grad.to(g.dtype) for g in ctx.saved_tensors), *[None] * 5


class GPT(nn.Module):
    def __init__(self, s: Settings):
        super().__init__()
        padded = -(-s.vocab_size // 64) * 64  # a head that tensor cores like
        self.softcap, self.head_rows, self.fp8_head = s.softcap, s.head_rows, s.fp8_head
        self.document_start = s.vocab_size - 1
        self.embed = nn.Parameter(torch.empty(padded, s.model_dim))
        self.bigram = nn.Parameter(torch.empty(s.bigram_rows, s.model_dim))
        self.smear = nn.Parameter(torch.empty(13))  # weights of 12 dimensions, and the strength
        self.value_embeds = nn.ParameterDict(
            {str(i): nn.Parameter(torch.empty(padded, s.model_dim)) for i in s.value_embed_blocks}
        )
        self.blocks = nn.ModuleList(Block(s, i) for i in range(s.num_layers))
        self.skip = nn.Parameter(torch.empty(1)) if s.skip else None
        self.skip_blocks, self.one_source = s.skip, s.one_source
        fixed = torch.Generator().manual_seed(0)
        signs = torch.randint(2, (s.bigram_signs, s.model_dim), generator=fixed)
        self.register_buffer("signs", signs.float() * 2 - 1, persistent=False)
        self.lm_head = nn.Parameter(torch.empty(padded, s.model_dim))
        self.long = [i in s.long_window_blocks for i in range(s.num_layers)]
        self.stretch = {}
        for window in {*s.long_window, s.val_windows[1]}:
            length = max(*s.seq_len, s.val_seq_len) * (2 if s.paired_heads else 1)
            cos, sin, self.stretch[window] = rotary_tables(length, window, s)
            self.register_buffer(f"cos{window}", cos, persistent=False)
            self.register_buffer(f"sin{window}", sin, persistent=False)

    def hidden(self, ids: Tensor, segments: Tensor, windows: tuple[int, int]) -> Tensor:
        """(B, T) ids -> (B, T, C) of the last block, normed."""
        T = ids.size(1)
        turns = {b.attn.turns for b in self.blocks if b.attn is not None}
        seen = {w: {n: sight(segments, w, T, n) for n in turns} for w in set(windows)}
        # no document sees the one before: its first token stands alone
        start, begins = self.document_start, ids == self.document_start
        cos, sin = (getattr(self, f"{name}{windows[1]}")[: 2 * T] for name in ("cos", "sin"))
        cos, sin = cos.to(self.embed.dtype), sin.to(self.embed.dtype)
        place = Place(cos, sin, self.stretch[windows[1]], begins[:, :, None, None])
        before = F.pad(ids[:, :-1], (1, 0), value=start).masked_fill(begins, start)
        pair = (36313 * ids) ^ (27191 * before)
        bigram = F.embedding(pair % self.bigram.size(0), self.bigram)
        x = F.embedding(ids, self.embed)
        gate = self.smear[12] * torch.sigmoid(x[:, 1:, :12] @ self.smear[:12, None].to(x.dtype))
        gate = gate.masked_fill(begins[:, 1:, None], 0)
        x0 = x = norm(torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], dim=1))
        if len(self.signs):
            bigram = bigram * F.embedding((before ^ ids) % len(self.signs), self.signs).to(x.dtype)
        source = kept = None
        for i, block in enumerate(self.blocks):
            table = self.value_embeds.get(str(i), None)
            value = None if table is None else F.embedding(ids, table)
            if i in self.skip_blocks[1:]:
                x = x + torch.sigmoid(self.skip).to(x.dtype) * kept
            source = source if i in self.one_source[1:] else None
            x, source = block(x, x0, bigram, source, value, place, seen[windows[self.long[i]]])
            kept = x if i in self.skip_blocks[:1] else kept
        return norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., C) -> (..., V) in fp32, between 0 and softcap."""
        return self.softcap * squash(F.linear(hidden, self.lm_head))

    def forward(self, ids, targets, segments, windows: tuple[int, int], weights: Tensor) -> Tensor:
        """Summed cross-entropy in nats over the targets, (B, T), that are not negative.

        weights (K,): of the next token, and of those after it in the same document.
        """
        after, ahead = F.pad(ids[:, 1:] == self.document_start, (0, 1), value=True), [targets]
        for _ in weights[1:]:
            ahead.append(F.pad(ahead[-1][:, 1:], (0, 1), value=-1).masked_fill(after, -1))
        targets = torch.stack(ahead, -1).flatten(0, 1)
        hidden = self.hidden(ids, segments, windows).flatten(0, 1)
        how = self.softcap, self.head_rows, self.fp8_head
        return HeadLoss.apply(hidden, self.lm_head, targets, weights, *how)


@torch.no_grad()
def init_parameters(model: GPT, s: Settings) -> None:
    """The same weights on every rank and device: drawn on the CPU from the seed."""
    generator = torch.Generator().manual_seed(s.seed)
    bound = (3 / s.model_dim) ** 0.5 * 0.5  # uniform with standard deviation 0.5 / sqrt(C)
    for name, p in model.named_parameters():
        top, last = name.split(".")[0], name.split(".")[-1]
        if last in ("qk", "v", "fc"):
            p.uniform_(-bound, bound, generator=generator)
        elif name.endswith("attn.proj"):
            p.uniform_(-1, 1, generator=generator).mul_(s.attn_init * (3 / s.model_dim) ** 0.5)
        elif last == "lm_head" and s.untie:
            model.embed.copy_(p.normal_(std=0.005, generator=generator))
        elif last in ("proj", "lm_head", "smear", "bigram", "gate", "value_gate", "own_value"):
            p.zero_()
        elif last == "skip":
            p.fill_(-1.5)
        elif top in ("embed", "value_embeds"):
            p.normal_(std=1.0 if top == "embed" else 0.01, generator=generator)
        elif last == "mix":
            p.copy_(torch.tensor([1.0, 0.0, 0.05]))
        else:
            raise AssertionError(f"no initial value is defined for {name}")


def build_model(s: Settings, device: torch.device) -> GPT:
    """The model with its first weights: matrices and tables in the device's dtype, scalars fp32."""
    model = GPT(s)
    init_parameters(model, s)
    for p in model.parameters():
        if device.type == "cuda" and p.ndim >= 2:
            p.data = p.data.bfloat16()
    return model.to(device)


def build_optimizer(model: GPT, s: Settings) -> Muon:
    """Muon for the blocks' matrices, Adam for the rest; each parameter is in one group."""
    rates = dict(embed=s.embed_lr, value_embeds=s.value_embed_lr, bigram=s.bigram_lr)
    rates |= dict(lm_head=s.head_lr, scalar=s.scalar_lr)
    adam = dict(use_muon=False, betas=s.adam_betas, eps=s.adam_eps, weight_decay=0.0)
    groups = {name: dict(lr=lr, every=s.adam_every, **adam) for name, lr in rates.items()}
    groups["scalar"]["every"] = 1
    muon = dict(lr=s.lr, weight_decay=s.weight_decay)
    groups |= dict(blocks=dict(muon), mlp_out=muon | dict(lr=s.lr * s.mlp_out_lr))
    groups["qk"] = muon | dict(heads=s.num_heads // s.qk_heads if s.qk_heads else None)
    for name, p in model.named_parameters():
        top, last = name.split(".")[0], name.split(".")[-1]
        kind = "qk" if last == "qk" else "mlp_out" if name.endswith("mlp.proj") else top
        group = groups["scalar" if p.ndim < 2 or last in ("gate", "value_gate") else kind]
        group.setdefault("params", []).append((name, p))
        group["initial_lr"] = group["lr"]
    groups = [group for group in groups.values() if "params" in group]
    return Muon(groups, cautious=s.cautious, beta2=s.beta2 or None, reduce_grads=True)


def set_schedule(optimizer: Muon, step: int, s: Settings) -> None:
    """Write the step's learning rates and momentum into the groups."""
    multiplier, momentum = lr_multiplier(step, s), momentum_at(step, s)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * multiplier
        if group["use_muon"]:
            group["momentum"] = momentum


# ------------------------------------------------------------------------------------------------
# data: GPT-2 tokens from shards, in the run's vocabulary, as rows of a batch


def count_rows(s: Settings) -> list[tuple[int, int, int]]:
    """(rows of the whole run, seq_len, max_document) of each stage."""
    ends = [round(end * s.train_steps) for end in s.stage_ends]
    steps = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    stages = zip(steps, s.batch_tokens, s.seq_len, s.max_document, strict=True)
    return [(n * batch // size, size, limit) for n, batch, size, limit in stages]


def survey_data(s: Settings, vocabulary: Vocabulary) -> tuple[list[Path], list[dict]]:
    """The training files that the schedule reads, and the log's entry of every shard; UserError."""
    train, val, shapes = ROOT / s.train_files, ROOT / s.val_file, count_rows(s)
    return shards.survey(train, val, s.val_tokens, shapes, s.rows, s.epochs, vocabulary)


class Batch(NamedTuple):
    ids: Tensor  # (B, T) int64
    targets: Tensor  # (B, T) int64, -1 where nothing is predicted
    segments: Tensor  # CPU: (B, T), each token's segment; CUDA: where segments start, int32


class Loader:
    """Makes a rank's batches from rows, on its device."""

    def __init__(self, s: Settings, ranks: "Ranks", vocabulary: Vocabulary):
        self.s, self.ranks, self.vocabulary = s, ranks, vocabulary

    def batch(self, rows: list, size: int) -> Batch:
        """Rows -> tensors; a row of less than `size` tokens is padded, unpredicted."""
        ids, targets = shards.fill(rows, size)
        begins = ids == self.vocabulary.document_start
        begins[:, 0] = True
        if self.ranks.device.type == "cpu":
            return Batch(*map(torch.from_numpy, (ids, targets, begins.cumsum(1))))
        arrays = (ids, targets, shards.segment_starts(begins))
        arrays = (torch.from_numpy(array).pin_memory() for array in arrays)
        return Batch(*(array.to(self.ranks.device, non_blocking=True) for array in arrays))

    def micro_batches(self, rows: list, size: int) -> list[Batch]:
        """Rows in as few equal batches as micro_batch_tokens allows."""
        most = min(self.s.micro_batch_tokens // size, len(rows))
        n = next(n for n in range(most, 0, -1) if len(rows) % n == 0)
        return [self.batch(rows[i : i + n], size) for i in range(0, len(rows), n)]

    def steps(self, files: list[Path], first: int = 0):
        """Yields this rank's micro-batches of each step from `first` on; rows depend on no rank."""
        s, rank, world_size = self.s, self.ranks.rank, self.ranks.world_size
        expand, start = self.vocabulary.expand, self.vocabulary.document_start
        arrays = (expand(shards.read_shard(p)) for _ in range(s.epochs) for p in files)
        rows = shards.ROW_MAKERS[s.rows](arrays, count_rows(s), start, s.seed)
        for step in range(s.train_steps):
            stage = stage_at(step, s)
            batch = [next(rows, None) for _ in range(stage.batch_tokens // stage.seq_len)]
            if batch[-1] is None:
                raise UserError(f"the data ended at step {step} of {s.train_steps}")
            share = len(batch) // world_size
            if step >= first:
                yield self.micro_batches(batch[rank * share : (rank + 1) * share], stage.seq_len)


# ------------------------------------------------------------------------------------------------
# evaluation


class Validation:
    """The whole validation set in rows of val_seq_len, the same tokens at any world size."""

    def __init__(self, s: Settings, loader: Loader):
        self.s, self.loader = s, loader
        tokens = loader.vocabulary.expand(shards.read_shard(ROOT / s.val_file))
        tokens = tokens[: (s.val_tokens or len(tokens) - 1) + 1]
        self.tokens = len(tokens) - 1  # that are predicted
        self.bytes = int(loader.vocabulary.bytes[tokens[1:]].sum())
        starts = range(0, self.tokens, s.val_seq_len)
        rows = [[(tokens, at, min(s.val_seq_len, self.tokens - at))] for at in starts]
        share = -(-len(rows) // loader.ranks.world_size)
        self.rows = rows[loader.ranks.rank * share :][:share]
        self.next_token = torch.ones(1, device=loader.ranks.device)

    @torch.no_grad()
    def loss(self, forward) -> tuple[float, float]:
        """Mean nats per token, and bits per byte, which alone compares across vocabularies."""
        total, length = torch.zeros((), dtype=torch.float64), self.s.val_seq_len
        size = max(1, self.s.micro_batch_tokens // length)
        for i in range(0, len(self.rows), size):
            rows = self.rows[i : i + size]
            rows += [[]] * (size - len(rows))  # one shape for all
            batch = self.loader.batch(rows, length)
            total = total + forward(*batch, self.s.val_windows, self.next_token)
        loss = self.loader.ranks.sum(total)[0] / self.tokens
        return loss, loss * self.tokens / self.bytes / math.log(2)


@torch.no_grad()
def probe_causality(run: Run, model: GPT, s: Settings, loader: Loader) -> None:
    """Change the second half of a row: no logit before may move, and some after must."""
    size, windows = s.seq_len[-1], (s.short_window[-1], s.long_window[-1])
    half, near = size // 2, min(size // 2, 512)  # what is near the change fits into memory
    rng, logits = np.random.default_rng(0), []
    tokens = rng.integers(s.vocab_size - 1, size=size + 1).astype(np.uint16)
    for row in (tokens, np.concatenate([tokens[:half], rng.permutation(tokens[half:])])):
        batch = loader.batch([[(row, 0, size)]], size)
        hidden = model.hidden(batch.ids, batch.segments, windows)
        logits.append(model.logits(hidden[0, half - near : half + near]))
    moved = (logits[0] - logits[1]).abs().amax(-1)
    change, effect = moved[:near].max().item(), moved[near:].max().item()
    ok = change <= 1e-3 < effect
    run.write("probe", name="causality", step=run.step, max_change=change, effect=effect, ok=ok)
    if not ok:
        what = f"by {change:g} before the change in a row (must be 0), by {effect:g} after it"
        raise ArithmeticError(f"the causality probe failed: logits moved {what} (must not be 0)")


# ------------------------------------------------------------------------------------------------
# training


def train_step(forward, optimizer: Muon, batches: list[Batch], step: int, s: Settings, ranks):
    """One optimizer step; summed loss and number of this rank's predictions, as tensors."""
    stage, total, count = stage_at(step, s), 0.0, 0
    weights = future_weights(step, s).to(ranks.device)
    for batch in batches:
        loss = forward(*batch, stage.windows, weights)
        # the optimizer averages over ranks: together the mean over the batch, however it is split
        (loss * (ranks.world_size / stage.batch_tokens)).backward()
        total, count = total + loss.detach(), count + (batch.targets >= 0).sum()
    set_schedule(optimizer, step, s)
    embed, head, tied = forward.embed, forward.lm_head, step < s.untie * s.train_steps
    if tied:
        head.grad.add_(embed.grad)
        embed.grad = None
    optimizer.step()
    if tied:
        embed.data.copy_(head)
    optimizer.zero_grad(set_to_none=True)
    return total, count


def device_error(model: GPT, s: Settings, loader: Loader, fp8: bool) -> float:
    """The largest relative error of attention and HeadLoss here, against the CPU's in fp32.

    Loss and gradients for a random row of documents of 77 tokens that see 7 back.
    """
    here, cpu, answers = loader.ranks.device, torch.device("cpu"), []
    tokens = np.arange(257, dtype=np.uint16) % 77
    tokens[tokens == 0] = loader.vocabulary.document_start
    for device, dtype, low in ((here, model.embed.dtype, fp8), (cpu, torch.float32, False)):
        batch = Loader(s, Ranks(0, 1, device), loader.vocabulary).batch([[(tokens, 0, 256)]], 256)
        draw = torch.Generator().manual_seed(0)
        qkv = torch.randn(3, 1, 256, s.num_heads, s.head_dim, generator=draw)
        weight = torch.randn(128, s.model_dim, generator=draw) / s.model_dim**0.5
        leaves = [x.to(device, dtype).requires_grad_() for x in (qkv, weight)]
        y = attention(*norm(leaves[0]), sight(batch.segments, 7, 256), s.attn_scale)
        hidden, once = norm(y.reshape(256, s.model_dim)), torch.ones(1, device=device)
        targets = batch.ids.view(-1, 1) % 128
        loss = HeadLoss.apply(hidden, leaves[1], targets, once, s.softcap, s.head_rows, low)
        grads = torch.autograd.grad(loss, leaves)
        answers.append([x.float().cpu() for x in (loss.detach(), *grads)])
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*answers, strict=True))


def self_check(run: Run, model: GPT, s: Settings, loader: Loader) -> dict:
    """A device_error that is large ends the run; in 8 bits, only their use, on every rank."""
    found = dict(error=device_error(model, s, loader, False))
    if run.ranks.sum(not found["error"] < 0.05)[0]:
        raise ArithmeticError(f"self-check: attention or loss are off by {found['error']:.1%} here")
    if s.fp8_head:
        try:
            low = found["fp8_error"] = device_error(model, s, loader, True)
        except (RuntimeError, ValueError) as error:  # no such products on this device
            low, found["fp8_error"] = math.inf, str(error).partition("\n")[0]
        if run.ranks.sum(not low < 0.15)[0]:
            run.say(f"SLOWER: the head is not in 8 bits, for the self-check found {found}")
            model.fp8_head = False
    return found | dict(fp8_head=model.fp8_head)


def warm_up(run: Run, forward, model: GPT, optimizer: Muon, s: Settings, loader: Loader) -> None:
    """Three steps of every stage's shapes on random tokens, which compiles what is compiled.

    Weights and optimizer state are restored after. In between no weight is zero any more, as many
    are at first, so that the causality probe sees every part.
    """
    before = [(p, p.detach().clone(), p.grad) for p in model.parameters()]
    for p, _, _ in before:
        p.grad = None
    state = copy.deepcopy(optimizer.state_dict())
    rng = np.random.default_rng(run.ranks.rank)
    for start in (0, *s.stage_ends[:-1]):
        step = round(start * s.train_steps)
        stage = stage_at(step, s)
        size = stage.seq_len
        row = [(rng.integers(s.vocab_size, size=size + 1).astype(np.uint16), 0, size)]
        rows = [row] * (stage.batch_tokens // size // run.ranks.world_size)
        for _ in range(3):
            batches = loader.micro_batches(rows, size)
            train_step(forward, optimizer, batches, step, s, run.ranks)
    probe_causality(run, model, s, loader)
    with torch.no_grad():
        for p, value, grad in before:
            p.copy_(value)
            p.grad = grad  # of a table between two steps of Adam
    optimizer.load_state_dict(state)


def validate(run: Run, forward, validation: Validation, step: int, steps: int, tokens: int):
    """Log and print the validation loss, off the clock; nats per token and bits per byte."""
    with run.off_clock("validation"):
        loss, bits = validation.loss(forward)
    size = dict(tokens=validation.tokens, bytes=validation.bytes, train_tokens=tokens)
    run.log_validation(step, steps, loss, bits, **size)
    return loss, bits


CHECKPOINT = {"settings", "step", "train_seconds", "model", "optimizer"}


def save(run: Run, model: GPT, optimizer: Muon, s: Settings, step: int) -> None:
    """A checkpoint of `step` steps beside the log, off the clock."""
    with run.off_clock("save"):
        state = dict(settings=dataclasses.asdict(s), step=step, train_seconds=run.train_seconds)
        state |= dict(model=model.state_dict(), optimizer=optimizer.full_state_dict())
        if run.ranks.rank == 0:
            path = harness.save_checkpoint(run.path.with_suffix(""), step, state)
            run.say(f"checkpoint: {path}")


def train(run: Run, s: Settings, files, entries, vocabulary, checkpoint: dict | None) -> None:
    """The whole run, from the model's first weights or a checkpoint to the last validation."""
    ranks, since = run.ranks, now()
    loader = Loader(s, ranks, vocabulary)
    model = build_model(s, ranks.device)
    checked = self_check(run, model, s, loader)
    optimizer = build_optimizer(model, s)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        run.train_seconds, run.step = checkpoint["train_seconds"], checkpoint["step"]
    first = run.step
    forward = torch.compile(model, dynamic=False, fullgraph=True) if s.compile else model
    validation = Validation(s, loader)
    sources = [__file__, sys.modules[Muon.__module__].__file__, shards.__file__]
    about = dict(num_params=sum(p.numel() for p in model.parameters()), self_check=checked)
    run.log_header(s, PRESETS, sources, shards=entries, first_step=first, **about)
    run.write("off_clock", name="startup", seconds=since - PROCESS_START)
    run.write("off_clock", name="model", seconds=now() - since)
    with run.off_clock("warmup", state_restored=True):
        warm_up(run, forward, model, optimizer, s, loader)
    tokens = sum(stage_at(step, s).batch_tokens for step in range(first))
    loss, bits = validate(run, forward, validation, first, s.train_steps, tokens)

    optimizer.register_step_pre_hook(lambda *_: run.waits())
    batches, run.patient = shards.prefetch(loader.steps(files, first)), s.save_every > 0
    run.clock(True)
    with torch.compiler.set_stance("fail_on_recompile"):  # everything was compiled off the clock
        for step in range(first, s.train_steps):
            run.step, run.at, last = step, step, step + 1 == s.train_steps
            total, count = train_step(forward, optimizer, next(batches), step, s, ranks)
            tokens += stage_at(step, s).batch_tokens
            if step % s.log_every == 0 or last:
                total, count = ranks.sum(total, count)
                grad_norm, multiplier = float(optimizer.grad_norm), lr_multiplier(step, s)
                run.log_step(step, s.train_steps, total / count, tokens, grad_norm, multiplier)
            if last or (s.val_every and (step + 1) % s.val_every == 0):
                loss, bits = validate(run, forward, validation, step + 1, s.train_steps, tokens)
            if s.save_every:
                stopped = ranks.sum(run.stop_asked is not None)[0]
                if last or stopped or (step + 1) % s.save_every == 0:
                    save(run, model, optimizer, s, step + 1)
                if stopped and not last:
                    raise KeyboardInterrupt(run.stop_asked or "a signal to another rank")
    run.clock(False)
    run.step, run.patient = s.train_steps, False

    with run.off_clock("probe"):
        probe_causality(run, model, s, loader)
        products = model.lm_head.numel() + sum(p.numel() for p in model.blocks.parameters())
        speed = run.speed(tokens, 6 * products)
    if s.sample_tokens:
        with run.off_clock("sample"):
            ids = harness.generate(model, s, loader, [vocabulary.document_start], s.sample_tokens)
        run.say(f"a sample: {vocabulary.decode(ids).strip()!r}")
    reached = (loss if s.preset == "gpu" else bits) <= s.target
    run.say(
        f"{loss:.4f} nats per token, {bits:.4f} bits per byte: target {s.target}"
        f" {'reached' if reached else 'missed'}{harness.best_record(s.preset)}\n{speed}\n"
        f"another seed: ./run.sh --seed {s.seed + 1}; a record: ./run.sh record NAME --runs 8"
    )


def sample(s: Settings, vocabulary: Vocabulary, checkpoint: dict, text: str) -> None:
    """Print a text and its continuation by a checkpoint."""
    ranks = harness.join_ranks(s.timeout)
    model, loader = build_model(s, ranks.device), Loader(s, ranks, vocabulary)
    model.load_state_dict(checkpoint["model"])
    prompt = [vocabulary.document_start, *vocabulary.encode(text)]
    ids = harness.generate(model, s, loader, prompt, s.sample_tokens or 80)
    print(text + vocabulary.decode(ids))


def main(argv: list[str]) -> int:
    harness.keep_memory()
    try:
        default = "gpu" if torch.cuda.is_available() else "cpu"
        s, args = harness.read_flags(argv, PRESETS, default, HABITS, CHECKPOINT)
        check_settings(s, int(os.environ.get("WORLD_SIZE", 1)))
        vocabulary = Vocabulary(s.vocab_size)
        if args.shards_needed:
            print(shards.count_fineweb(s.train_files, count_rows(s), s.rows))
            return 0
        if args.check:
            survey_data(s, vocabulary)
            return 0
        if args.sample is not None:
            sample(s, vocabulary, args.resume, args.sample)
            return 0
        ranks = harness.join_ranks(s.timeout)
        files, entries = ranks.from_first(lambda: survey_data(s, vocabulary))
        name = f"{s.preset}_s{s.seed}"
        path = ranks.from_first(lambda: harness.new_log(args.log_dir, args.run_id, name))
        run = Run(ranks, path, PROCESS_START)
        if args.resume:
            run.say(", ".join([f"continues after step {args.resume['step']}", *args.changed]))
    except UserError as error:
        if os.environ.get("RANK", "0") == "0":
            harness.tell(str(error))
        return 2
    code = harness.finish(run, lambda: train(run, s, files, entries, vocabulary, args.resume))
    if dist.is_initialized() and code == 0:
        dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
