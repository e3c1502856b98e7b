"""train_gpt.py and data/shards.py: model, data, schedule, loop, log, and what a user gets wrong."""

import dataclasses
import json
import math
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import shards
import train_gpt as t
from ranks import launcher, run_ranks
from shards import gpt2_encoding

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
ALONE = t.Ranks(0, 1, CPU)
TINY = dataclasses.replace(
    t.CPU,
    **dict(vocab_size=257, num_layers=3, num_heads=2, head_dim=16, value_embed_blocks=(1,)),
    **dict(train_steps=6, batch_tokens=(256,), seq_len=(32,), max_document=(32,)),
    **dict(short_window=(32,), long_window=(32,), val_seq_len=32, val_windows=(32, 32)),
    **dict(micro_batch_tokens=256, val_every=0, log_every=1, sample_tokens=4, bigram_rows=512),
)
# the gpu preset's shape of everything, small: stages, windows, long rows of whole documents
TINY_GPU = dataclasses.replace(
    t.Settings(),
    **dict(vocab_size=257, num_layers=4, num_heads=2, head_dim=16, train_steps=8),
    **dict(bigram_rows=512, bigram_lr=0.05, embed_lr=0.05, value_embed_lr=0.05),
    **dict(value_embed_blocks=(1, 3), long_window_blocks=(1, 3), stage_ends=(0.5, 0.75, 1.0)),
    **dict(skip=(0, 2), no_attention=(2,), one_source=(1, 3), paired_heads=(0, 3)),
    **dict(bigram_signs=16),
    **dict(batch_tokens=(256, 512, 512), seq_len=(64, 128, 128), max_document=(24, 40, 40)),
    **dict(short_window=(4, 8, 8), long_window=(8, 16, 24), stage_lr=(1.0, 1.5, 1.5)),
    **dict(val_seq_len=64, val_windows=(8, 32), val_tokens=500, micro_batch_tokens=512),
    **dict(train_files="data/sotu_train_*.bin", val_file="data/sotu_val_000000.bin"),
    **dict(compile=False, epochs=1, momentum_warmup=4, momentum_cooldown=2, lr=0.02),
)


def write_shard(path: Path, tokens: np.ndarray) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = shards.MAGIC, shards.VERSION, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def loader(s: t.Settings, ranks: t.Ranks = ALONE) -> t.Loader:
    return t.Loader(s, ranks, shards.Vocabulary(s.vocab_size))


def shaken(s: t.Settings) -> t.GPT:
    """A model none of whose weights is zero."""
    model = t.build_model(s, CPU)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters():
            p.add_(torch.empty_like(p).normal_(std=0.2, generator=generator))
    return model


# ------------------------------------------------------------------------------------------------
# model


def test_norm_matches_torch_and_its_gradient_holds():
    x = torch.randn(5, 7, 16, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(t.norm(x), F.rms_norm(x, (16,)), atol=1e-5)
    assert torch.autograd.gradcheck(t.norm, x, atol=1e-5)


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_rotary_keeps_norms_and_products_depend_on_the_distance_alone(fraction):
    s = dataclasses.replace(TINY, rope_fraction=fraction)
    cos, sin, stretch = t.rotary_tables(40, 32, s)
    assert stretch == 1
    q, k = torch.randn(2, 16).double()
    rows = [v.expand(1, 40, 1, 16) for v in (q, k)]
    q, k = (t.rotate(row, cos.double(), sin.double())[0, :, 0] for row in rows)
    assert torch.allclose(q.norm(dim=-1), q[0].norm().expand(40))
    products = q @ k.T
    for distance in (0, 3, 11):
        assert torch.allclose(products.diagonal(-distance), products[distance, 0], atol=1e-5)
    assert not torch.allclose(products[3, 0], products[0, 0], atol=1e-3)


def test_attention_sees_its_own_segment_within_the_window_and_nothing_else():
    T, window = 12, 4
    segments = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])
    q, k, v = torch.randn(3, 2, T, 2, 8).double()
    ours = t.attention(q, k, v, t.sight(segments, window, T), 0.3)
    for b in range(2):
        for h in range(2):
            for i in range(T):
                seen = [
                    j for j in range(i + 1) if i - j <= window and segments[b, i] == segments[b, j]
                ]
                weights = torch.softmax(0.3 * k[b, seen, h] @ q[b, i, h], 0)
                assert torch.allclose(ours[b, i, h], weights @ v[b, seen, h], atol=1e-6)


@pytest.mark.parametrize("n", [1, 2])
def test_attention_with_everything_on_is_its_formula(n):
    """Gates, value embedding, own value, keys of the token before, pairs: by loops, in fp64."""
    s = dataclasses.replace(TINY_GPU, rope_fraction=0.5, num_heads=4)
    s = dataclasses.replace(s, paired_heads=(3,) if n == 2 else ())
    H, D, C, T, block = s.num_heads, s.head_dim, s.model_dim, 12, 3
    generator = torch.Generator().manual_seed(0)
    attn, window = t.Attention(s, block).double(), 6
    with torch.no_grad():
        for p in attn.parameters():
            p.normal_(std=0.3, generator=generator)
    x, value = torch.randn(2, 1, T, C, generator=generator).double()
    begins = torch.tensor([i in (0, 7) for i in range(T)])
    cos, sin, _ = (y.double() if isinstance(y, torch.Tensor) else y
                   for y in t.rotary_tables(n * T, s.long_window[0], s))  # fmt: skip
    place = t.Place(cos, sin, 1.5, begins[None, :, None, None])
    ours = attn(x, value, place, {n: t.sight(begins[None].cumsum(1), window, T, n).double()})[0]

    def unit(y):
        return y / y.square().mean(-1, keepdim=True).sqrt()

    def turn(y, at):  # pairs (i, i + D/2) as complex numbers; the first half of them rotates
        pairs = torch.complex(y[..., : D // 2], y[..., D // 2 :])
        angle = torch.zeros(D // 2).double()
        count = D // 4
        angle[:count] = at * 1024.0 ** -torch.linspace(0, 1, count).double()
        turned = pairs * torch.polar(torch.ones_like(angle), -angle)
        return torch.cat([turned.real, turned.imag], -1)

    x, value, still = x[0], value[0], torch.arange(D) % (D // 2) >= D // 4
    q, k = ((x @ w.T).view(T, H, D) for w in attn.qk)
    spot = n * torch.arange(T)[:, None] + torch.arange(H) % n  # heads of a pair take turns
    q, k = (
        torch.stack(
            [torch.stack([turn(unit(y[i, h]), spot[i, h]) for h in range(H)]) for i in range(T)]
        )
        for y in (q, k)
    )
    shifted = k.clone()
    for i in range(1, T):
        if not begins[i]:
            shifted[i][:, still] = k[i - 1][:, still]
    both = torch.cat([x[:, :6], value[:, :6]], -1)
    v = (x @ attn.v.T).view(T, H, D)
    v = v + 2 * torch.sigmoid(both @ attn.value_gate.T)[..., None] * value.view(T, H, D)
    for i in range(T):
        document = [j for j in range(i + 1) if not begins[j + 1 : i + 1].any()]
        heads = []
        for h in range(H):
            pairs = [(j, g) for j in document for g in range(H) if g // n == h // n]
            seen = [(j, g) for j, g in pairs if 0 <= spot[i, h] - spot[j, g] <= n * window]
            keys, values = (torch.stack([y[j, g] for j, g in seen]) for y in (shifted, v))
            chance = torch.softmax(1.5 * s.attn_scale * keys @ q[i, h], 0)
            y, own = chance @ values, unit(v[i, h])
            y = y - attn.own_value[h].tanh() * (y @ own) / D * own
            y = y * 2 * torch.sigmoid(x[i, :12] @ attn.gate[h])
            heads.append(y)
        assert torch.allclose(ours[i], torch.cat(heads) @ attn.proj.T, atol=1e-5), i


@pytest.mark.parametrize("s", [TINY, TINY_GPU], ids=["cpu", "gpu"])
def test_no_logit_depends_on_a_later_token_or_on_another_document(s):
    model, size, windows = shaken(s), s.seq_len[-1], (s.short_window[-1], s.long_window[-1])
    rng = np.random.default_rng(0)
    row = rng.integers(256, size=size + 1).astype(np.uint16)
    start = 9
    row[start] = 256  # a document begins
    logits = []
    for change in (None, size - 5, start - 3):
        changed = row.copy()
        if change is not None:
            changed[change] = (changed[change] + 1) % 256
        batch = loader(s).batch([[(changed, 0, size)]], size)
        logits.append(model.logits(model.hidden(batch.ids, batch.segments, windows))[0])
    later, other = ((x - logits[0]).abs().amax(-1) for x in logits[1:])
    assert later[: size - 5].max() == 0 < later[size - 5 :].min()
    assert other[start:].max() == 0 < other[start - 3]


def test_the_probe_catches_a_model_that_sees_the_future(monkeypatch, tmp_path):
    model, log = shaken(TINY), t.Run(ALONE, tmp_path / "probe.jsonl", 0.0)
    t.probe_causality(log, model, TINY, loader(TINY))
    monkeypatch.setattr(t, "sight", lambda segments, w, T, n: torch.zeros(len(segments), 1, T, T))
    with pytest.raises(ArithmeticError, match="causality probe failed"):
        t.probe_causality(log, model, TINY, loader(TINY))
    first, second = map(json.loads, log.path.read_text().splitlines())
    assert first["ok"] and first["max_change"] == 0 < first["effect"]
    assert not second["ok"] and second["max_change"] > 1e-3


def test_the_probe_does_not_pass_a_model_that_ignores_its_input(tmp_path):
    model = t.build_model(TINY, CPU)  # lm_head is zero: nothing moves at all
    with pytest.raises(ArithmeticError):
        t.probe_causality(t.Run(ALONE, tmp_path / "probe.jsonl", 0.0), model, TINY, loader(TINY))


@pytest.mark.parametrize("preset", ["cpu", "gpu"])
def test_every_parameter_is_in_one_group_and_gets_a_gradient(preset):
    s = {"cpu": TINY, "gpu": TINY_GPU}[preset]
    model = shaken(s)
    optimizer = t.build_optimizer(model, s)
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    batch = next(loader(s).steps(sorted(ROOT.glob(s.train_files))))[0]
    weights = t.future_weights(0, s)
    model(*batch, (s.short_window[0], s.long_window[0]), weights).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


@pytest.mark.parametrize("every", [1, 2])
def test_a_tied_embedding_trains_as_one_table_until_it_is_untied(every):
    s = dataclasses.replace(TINY, untie=2 / 3, adam_every=every, embed_lr=0.02, head_lr=0.02)
    two, one = t.build_model(s, CPU), t.build_model(s, CPU)
    one.embed = one.lm_head
    both = [(two, s), (one, dataclasses.replace(s, untie=0.0))]
    models = [(model, own, t.build_optimizer(model, own)) for model, own in both]
    for step, batches in enumerate(loader(s).steps(sorted(ROOT.glob(s.train_files)))):
        told = [t.train_step(m, opt, batches, step, own, ALONE)[0] for m, own, opt in models]
        if step < 4:
            assert torch.equal(two.embed, two.lm_head)
            assert torch.allclose(*told, rtol=1e-5)
            assert (two.embed - one.embed).abs().mean() < 1e-5  # Adam magnifies what nearly cancels
    assert step == 5 and not torch.allclose(two.embed, two.lm_head, atol=1e-3)


def test_the_first_loss_is_that_of_a_uniform_guess_and_the_head_is_soft_capped():
    model = t.build_model(TINY, CPU)
    batch = next(loader(TINY).steps(sorted(ROOT.glob(TINY.train_files))))[0]
    loss = model(*batch, (32, 32), torch.ones(1)) / (batch.targets >= 0).sum()
    padded = model.lm_head.size(0)
    assert math.isclose(loss.item(), math.log(padded), rel_tol=1e-5) and padded < 1.3 * 257
    hidden = torch.randn(3, TINY.model_dim)
    with torch.no_grad():
        model.lm_head.normal_()
        expected = 23 * torch.sigmoid((hidden @ model.lm_head.T + 5) / 7.5)
    assert torch.allclose(model.logits(hidden), expected)


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_the_head_s_loss_and_gradients_equal_the_plain_form_in_fp64(rows):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator) for n in (50, 40))
    targets = torch.randint(-1, 40, (50, 3), generator=generator)
    weights = torch.tensor([1.0, 0.5, 0.0])
    assert (targets < 0).any()
    mine = [hidden.requires_grad_(), weight.requires_grad_()]
    loss = t.HeadLoss.apply(*mine, targets, weights, 23.0, rows, False)
    (loss * 0.3).backward()
    exact = [x.detach().double().requires_grad_() for x in mine]
    logits = 23 * torch.sigmoid((exact[0] @ exact[1].T + 5) / 7.5)
    expected = sum(
        w * F.cross_entropy(logits, y, ignore_index=-1, reduction="sum")
        for w, y in zip(weights, targets.mT, strict=True)
    )
    (expected * 0.3).backward()
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-6)
    for x, reference in zip(mine, exact, strict=True):
        assert torch.allclose(x.grad.double(), reference.grad, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ["random", "one large weight", "rows of one number", "zero"])
def test_the_head_in_8_bits_is_near_fp64_and_never_overflows(case, dtype):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator) for n in (96, 80))
    weight *= 0 if case == "zero" else 0.1
    if case == "one large weight":
        weight[3, 5] = 2.0
    if case == "rows of one number":
        hidden = torch.eye(64).repeat(2, 1)[:96]
    targets, weights = torch.arange(96)[:, None] % 80, torch.tensor([1.75])
    low = [x.to(dtype).requires_grad_() for x in (t.norm(hidden), weight)]
    loss = t.HeadLoss.apply(*low, targets, weights, 23.0, 32, True)
    loss.backward()
    exact = [x.detach().double().requires_grad_() for x in low]
    logits = 23 * torch.sigmoid((exact[0] @ exact[1].T + 5) / 7.5)
    expected = 1.75 * F.cross_entropy(logits, targets[:, 0], reduction="sum")
    expected.backward()
    assert math.isclose(loss.item(), expected.item(), rel_tol=0.01)
    for x, reference in zip(low, exact, strict=True):
        error = (x.grad.double() - reference.grad).norm()
        assert error <= 0.08 * reference.grad.norm()
    low[0] = low[0].detach()  # as in a validation, which has all its bits
    both = [t.HeadLoss.apply(*low, targets, weights, 23.0, 32, fp8) for fp8 in (True, False)]
    assert both[0].item() == both[1].item()


def without_8_bits(rank: int, world_size: int, folder: str, bad: str) -> dict:
    """What the self-check finds where products in 8 bits fail, or are wrong, on the last rank."""
    original, run = t.product, t.Run(t.Ranks(rank, world_size, CPU), Path(folder) / "x.jsonl", 0.0)

    def product(a, b, scales=(), kind=t.E4M3):
        if scales and rank == world_size - 1 and bad == "fail":
            raise RuntimeError("only on GPUs of capability 8.9 and above\nand more")
        wrong = scales and rank == world_size - 1 and bad == "wrong"
        return original(a, b, scales, kind) * (1.3 if wrong else 1)

    t.product = product
    try:
        model, own = t.build_model(TINY_GPU, CPU), loader(TINY_GPU, run.ranks)
        return t.self_check(run, model, TINY_GPU, own) | {"in_use": model.fp8_head}
    finally:
        t.product = original


@pytest.mark.parametrize("bad", ["fail", "wrong"])
def test_a_head_that_one_rank_cannot_have_in_8_bits_is_left_out_on_all(bad, tmp_path):
    for world_size in (1, 2):
        found = run_ranks(world_size, without_8_bits, str(tmp_path), bad)
        assert not any(own["fp8_head"] or own["in_use"] for own in found)
    says = found[-1]["fp8_error"]
    assert says == "only on GPUs of capability 8.9 and above" if bad == "fail" else says > 0.15
    fine = run_ranks(1, without_8_bits, str(tmp_path), "")[0]
    assert fine["fp8_head"] and fine["error"] == 0 < fine["fp8_error"] < 0.1


def test_attention_that_is_wrong_on_a_device_ends_the_run_before_it_trains(tmp_path, monkeypatch):
    original = t.sight
    turn = iter((8, 7))  # the device sees one token too many, the CPU what it should
    monkeypatch.setattr(t, "sight", lambda segments, _, T: original(segments, next(turn), T))
    model, log = t.build_model(TINY, CPU), t.Run(ALONE, tmp_path / "x.jsonl", 0.0)
    with pytest.raises(ArithmeticError, match="attention or loss"):
        t.self_check(log, model, TINY, loader(TINY))


def test_several_next_tokens_are_those_of_the_same_document():
    s, weights = dataclasses.replace(TINY, seq_len=(16,)), torch.tensor([1.0, 0.5, 0.25])
    model = shaken(s)
    row = np.random.default_rng(0).integers(256, size=17).astype(np.uint16)
    row[6] = 256  # a document begins: no token before it is asked for what comes after
    batch = loader(s).batch([[(row, 0, 16)]], 16)
    logits = model.logits(model.hidden(batch.ids, batch.segments, (32, 32)))[0]
    chance, expected = torch.log_softmax(logits, -1), 0.0
    for at in range(16):
        for k, weight in enumerate(weights):
            inside = at + k < 16 and not any(row[at + 1 + j] == 256 for j in range(k))
            expected -= weight * chance[at, row[at + 1 + k]] if inside else 0
    assert torch.allclose(model(*batch, (32, 32), weights), expected, rtol=1e-5)


def test_the_weights_of_later_tokens_fall_over_a_third_of_the_run():
    s = dataclasses.replace(
        TINY, train_steps=90, future=(0.5, 0.25), future_ends=(2 / 3, 1 / 3)
    )
    told = [t.future_weights(step, s).tolist() for step in (0, 15, 30, 45, 60, 89)]
    expected = [(1, 0.5, 0.25), (1, 0.5, 0.125), (1, 0.5, 0), (1, 0.25, 0), (1, 0, 0), (1, 0, 0)]
    assert np.allclose(told, expected)


def test_a_longer_window_slows_what_turns_slowly_and_nothing_else():
    s = dataclasses.replace(TINY, head_dim=64, rope_fraction=1.0)
    s = dataclasses.replace(s, long_window=(256,), val_windows=(256, 512))
    angles = [torch.acos(t.rotary_tables(2, window, s)[0][1, 0, :32]) for window in (256, 512)]
    turns = 256 * angles[0] / (2 * math.pi)
    ratio, exact = angles[1] / angles[0], (0.5 + 0.5 * ((turns - 1) / 31).clamp(0, 1))
    assert (turns > 32).any() and (turns < 1).any()
    assert torch.allclose(ratio, exact, rtol=0.05)  # acos is coarse near 1
    assert math.isclose(t.rotary_tables(2, 512, s)[2], 1 + 0.2 * math.log(2))


# ------------------------------------------------------------------------------------------------
# vocabulary and rows


@pytest.mark.parametrize("size", [257, 1024, 2048, 4096])
def test_expanded_tokens_equal_the_text_encoded_with_fewer_ranks_on_the_whole_corpus(size):
    vocabulary, pieces = shards.Vocabulary(size), shards.gpt2_tokens()
    encoding = gpt2_encoding(size)
    for path in ROOT.glob("data/sotu_*.bin"):
        tokens = np.array(shards.read_shard(path))
        starts = np.flatnonzero(tokens == shards.DOCUMENT_START)
        documents = np.split(tokens, starts)[1:]
        texts = [b"".join(pieces[i] for i in d[1:]).decode() for d in documents]
        expected = encoding.encode_ordinary_batch(texts, num_threads=2)
        for document, ids in zip(documents, expected, strict=True):
            ours = vocabulary.expand(document)
            assert ours[0] == size - 1 and ours[1:].tolist() == ids
        text_bytes = sum(len(text.encode()) for text in texts)
        assert vocabulary.bytes[vocabulary.expand(tokens)].sum() == text_bytes


def test_the_whole_vocabulary_is_gpt2s_and_decodes():
    vocabulary = shards.Vocabulary(50257)
    ids = gpt2_encoding().encode_ordinary("Fellow citizens, naïve 議会!")
    assert np.array_equal(vocabulary.expand(np.array(ids, np.uint16)), ids)
    assert vocabulary.decode([*ids, 50256]) == "Fellow citizens, naïve 議会!\n\n"


def positions(tmp_path: Path, counts: list[int], every: int) -> list[Path]:
    """Shards whose tokens are their own position in the stream, a document start at `every`."""
    tokens = np.arange(sum(counts), dtype=np.uint16)
    tokens[::every] = 50256
    ends = np.cumsum(counts)
    for i, (end, count) in enumerate(zip(ends, counts, strict=True)):
        write_shard(tmp_path / f"p_train_{i:06}.bin", tokens[end - count : end])
    return sorted(tmp_path.glob("p_train_*.bin"))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_stream_rows_show_every_token_once_at_any_world_size(tmp_path, world_size):
    s = dataclasses.replace(TINY, vocab_size=50257, train_steps=10, batch_tokens=(128,))
    files = positions(tmp_path, [500, 20, 761], every=97)  # 1281 tokens: 10 steps of 128, one left
    seen, targets = [], []
    for rank in range(world_size):
        for batches in loader(s, t.Ranks(rank, world_size, CPU)).steps(files):
            for batch in batches:
                seen += batch.ids.flatten().tolist()
                targets += batch.targets.flatten().tolist()
                assert batch.ids.size(0) * world_size * len(batches) == 4
    starts = -(-1280 // 97)
    expected = [i for i in range(1280) if i % 97]
    assert sorted(i for i in seen if i != 50256) == expected and seen.count(50256) == starts
    follows = [(b == a + 1) or 50256 in (a, b) for a, b in zip(seen, targets, strict=True)]
    assert all(follows)


def test_the_order_of_stream_rows_depends_on_the_seed_and_nothing_else(tmp_path):
    files = positions(tmp_path, [1281], every=97)
    s = dataclasses.replace(TINY, vocab_size=50257, train_steps=10, batch_tokens=(128,))

    def order(s):
        return [b.ids[0, 0].item() for batches in loader(s).steps(files) for b in batches]

    assert order(s) == order(s) != order(dataclasses.replace(s, seed=1))


def test_document_rows_hold_whole_documents_clipped_with_their_true_successors(tmp_path):
    files = positions(tmp_path, [700, 800], every=50)  # 30 documents of 50, one over the border
    shapes = [(5, 64, 20), (3, 96, 1000)]
    arrays = (np.array(shards.read_shard(path)) for path in files)
    rows = list(shards.document_rows(arrays, shapes, 50256, seed=0))
    assert [sum(length for *_, length in row) for row in rows] == [64] * 5 + [96] * 3
    pieces = [(tokens[at + 1].item() - 1, size) for row in rows for tokens, at, size in row]
    assert [at for at, _ in pieces] == list(range(0, 50 * len(pieces), 50))  # each start, in order
    assert max(size for _, size in pieces[:20]) == 20 and max(s for _, s in pieces) == 50
    s = dataclasses.replace(TINY_GPU, vocab_size=50257)
    batch = loader(s).batch(rows, 96)
    inside = (batch.ids < 50256) & (batch.targets >= 0) & (batch.targets < 50256)
    inside[:5, 64:] = False
    assert torch.equal(batch.targets[inside], batch.ids[inside] + 1)
    assert (batch.targets[:5, 64:] == -1).all()  # what pads a short row is not predicted


def test_what_breaks_in_the_reading_thread_is_raised_in_the_loop():
    def broken():
        yield 1
        raise OSError("the disk is gone")

    items = shards.prefetch(broken())
    assert next(items) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(items)


# ------------------------------------------------------------------------------------------------
# schedule and loop


def test_schedules_at_their_corners():
    s = dataclasses.replace(TINY_GPU, train_steps=100, cooldown_frac=0.4, cooldown_floor=0.1)
    lr = [t.lr_multiplier(step, s) for step in range(100)]
    assert lr[0] == lr[49] == 1.0 and lr[50] == lr[60] == 1.5
    assert math.isclose(lr[80], 1.5 * (0.1 + 0.9 * 0.5)) and math.isclose(lr[99], 0.18375)
    s = dataclasses.replace(s, momentum_warmup=10, momentum_cooldown=5)
    momentum = [t.momentum_at(step, s) for step in range(100)]
    assert momentum[0] == momentum[99] == 0.85 and momentum[10] == momentum[94] == 0.95
    assert [t.stage_at(i, s).batch_tokens for i in (0, 49, 50, 74, 75, 99)] == [
        *(256, 256, 512, 512, 512, 512)
    ]


def first_steps(rank: int, world_size: int, s: t.Settings, steps: int = 5, warm: bool = False):
    """(loss, gradient norm) of the first steps, and the validation loss after them."""
    ranks = t.Ranks(rank, world_size, CPU)
    own = loader(s, ranks)
    model = t.build_model(s, CPU)
    optimizer = t.build_optimizer(model, s)
    if warm:
        with tempfile.TemporaryDirectory() as folder:
            t.warm_up(t.Run(ranks, Path(folder) / "x.jsonl", 0.0), model, model, optimizer, s, own)
    batches, told = own.steps(sorted(ROOT.glob(s.train_files))), []
    for step in range(steps):
        total, count = t.train_step(model, optimizer, next(batches), step, s, ranks)
        total, count = ranks.sum(total, count)
        told.append((total / count, float(optimizer.grad_norm)))
    return told, t.Validation(s, own).loss(model)


@pytest.mark.parametrize(
    "s",
    [TINY, TINY_GPU, dataclasses.replace(TINY_GPU, untie=0.0)],
    ids=["cpu", "gpu", "gpu never tied"],
)
def test_ranks_and_accumulation_change_nothing(s):
    s = dataclasses.replace(s, val_tokens=3001)  # divides by nothing
    steps = s.train_steps
    alone, val = first_steps(0, 1, s, steps)
    assert alone[0][0] > alone[-1][0] and alone[-1][1] > 0
    smaller = dataclasses.replace(s, micro_batch_tokens=max(s.seq_len))
    split, split_val = first_steps(0, 1, smaller, steps)
    near = 1e-4 if s.untie else 1e-5  # a tied table's gradients nearly cancel: Adam magnifies
    assert np.allclose(alone, split, rtol=near) and np.allclose(val, split_val, rtol=near)
    for world_size in (2, 4):
        for told, other_val in run_ranks(world_size, first_steps, smaller, steps):
            assert np.allclose(alone, told, rtol=1e-4)
            assert np.allclose(val, other_val, rtol=1e-4)


def test_validation_is_the_same_at_any_world_size():
    s = dataclasses.replace(TINY, val_tokens=3001)
    (_, val), twice = first_steps(0, 1, s, steps=0), run_ranks(3, first_steps, s, 0)
    for _, other in twice:
        assert np.allclose(val, other, rtol=1e-6)


@pytest.mark.parametrize("s", [TINY, TINY_GPU], ids=["cpu", "gpu"])
def test_warm_up_leaves_no_trace(s):
    assert first_steps(0, 1, s) == first_steps(0, 1, s, warm=True)


@pytest.mark.slow
def test_the_gpu_preset_compiled_gives_the_same_losses_and_never_compiles_on_the_clock():
    """Two stages and the validation, with 8 bits in the head; a recompilation would end the run."""
    stages = dict(stage_ends=(0.5, 1.0), stage_lr=(1.0, 1.5), batch_tokens=(256, 512))
    stages |= dict(seq_len=(64, 128), max_document=(24, 40), short_window=(4, 8))
    s = dataclasses.replace(TINY_GPU, **stages, long_window=(8, 24), train_steps=4, log_every=1)
    told, _ = first_steps(0, 1, s, steps=4)
    log = run("--preset", "gpu", *flags_of(s, t.Settings()), "--compile")
    losses = [line["loss"] for line in log if line["kind"] == "step"]
    assert np.allclose(losses, [loss for loss, _ in told], rtol=1e-4)


# ------------------------------------------------------------------------------------------------
# the script as a user runs it


def flags_of(s: t.Settings, preset: t.Settings) -> list[str]:
    """What to add to --preset for these settings."""
    return [
        f"--{f.name}={','.join(map(str, v)) if isinstance(v, tuple) else v}"
        for f in dataclasses.fields(s)
        if f.type is not bool and (v := getattr(s, f.name)) != getattr(preset, f.name)
    ]


TINY_FLAGS = flags_of(TINY, t.CPU)


def command(*flags: str, cwd: Path = ROOT, ranks: int = 1) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*launcher(ranks), str(ROOT / "train_gpt.py"), "--preset", "cpu", *flags],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def run(*flags: str, ranks: int = 1) -> list[dict]:
    """Train, and read the log that the last line of the output names."""
    done = command(*flags, ranks=ranks)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip().splitlines()[-1].removeprefix("log: "))
    assert path.is_absolute()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def short_flags(tmp_path_factory) -> list[str]:
    logs = tmp_path_factory.mktemp("logs")
    steps = ["--train_steps=30", "--val_every=20", "--val_tokens=2000", "--log_every=10"]
    return [*steps, f"--log_dir={logs}"]


@pytest.mark.slow
def test_a_short_run_learns_and_its_log_reads_back(short_flags):
    log = run(*short_flags)
    header, end = log[0], log[-1]
    assert header["kind"] == "header" and header["track"] == "custom" and header["seed"] == 0
    assert set(header["settings"]) == {f.name for f in dataclasses.fields(t.Settings)}
    assert [shard["split"] for shard in header["shards"]] == ["train", "val"]
    assert end["kind"] == "end" and end["status"] == "ok" and end["steps"] == 30
    steps = [line for line in log if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [0, 10, 20, 29]
    assert steps[-1]["tokens"] == 30 * 2048 and steps[0]["loss"] - steps[-1]["loss"] > 1.5
    vals = [line for line in log if line["kind"] == "val"]
    assert [line["step"] for line in vals] == [0, 20, 30]
    assert abs(vals[0]["loss"] - math.log(2048)) < 0.01
    for line in vals:
        bits = line["loss"] * line["tokens"] / line["bytes"] / math.log(2)
        assert math.isclose(line["bits_per_byte"], bits, rel_tol=1e-12)
    assert all(line["ok"] for line in log if line["kind"] == "probe")
    off = sum(line["seconds"] for line in log if line["kind"] == "off_clock")
    assert abs(off + end["train_seconds"] - end["wall_seconds"]) < 0.05 * end["wall_seconds"]
    code = Path(short_flags[-1].removeprefix("--log_dir=")) / "code"
    kept = {path.name for path in code.glob("*/*.py")}
    assert kept == set(header["code"]) == {"train_gpt.py", "muon.py", "harness.py", "shards.py"}


@pytest.mark.slow
def test_two_ranks_train_like_one_and_validation_does_not_disturb(short_flags):
    one = run(*short_flags, "--val_every=0")
    two = run(*short_flags, "--val_every=7", ranks=2)
    losses = [[x["loss"] for x in log if x["kind"] == "step"] for log in (one, two)]
    assert np.allclose(losses[0][:2], losses[1][:2], rtol=1e-4)  # steps 0 and 10
    assert np.allclose(*losses, rtol=1e-2)  # rounding grows with every step
    assert two[0]["world_size"] == 2


BAD = {
    "--lr=fast": "fast",
    "--no_such_flag": "--no_such_flag",
    "--preset=tpu": "there are gpu, cpu",
    "--run_id=a/b": "letters, digits",
    "--vocab_size=100": "257",
    "--rows=columns": "stream",
    "--batch_tokens=2000": "multiple of --seq_len 128",
    "--batch_tokens=2048,4096": "one value for each of 1 stages",
    "--micro_batch_tokens=64": "128",
    "--value_embed_blocks=9": "block 9",
    "--no_attention=1": "block 1 needs its attention",
    "--skip=3,1": "the earlier one first",
    "--qk_heads=3": "does not divide --num_heads 4",
    "--future=0.5": "--future_ends",
    "--train_steps=0": "at least 1",
    "--train_steps=100000": "--epochs",
    "--val_tokens=10000000": "holds",
    "--train_files=data/nothing_*.bin": "python data/fineweb.py download",
    "--train_files=data/sotu_*.bin": "is among --train_files",
}


@pytest.mark.parametrize("flag", BAD)
def test_a_mistake_gets_one_sentence_and_exit_code_2(flag, capsys, tmp_path):
    assert t.main(["--preset", "cpu", f"--log_dir={tmp_path}/logs", flag]) == 2
    said = capsys.readouterr().err
    assert BAD[flag] in said and said.count("\n") == 1 and said.startswith("train_gpt.py: ")
    assert not (tmp_path / "logs").exists()


def damage(tokens: np.ndarray, path: Path, how: str) -> None:
    write_shard(path, tokens)
    whole = path.read_bytes()
    header = np.frombuffer(whole[:1024], "<i4").copy()
    header[{"magic": 0, "version": 1, "count": 2, "huge": 2}.get(how, 9)] = {
        **dict(magic=7, version=2, count=-5, huge=2**31 - 1)
    }.get(how, 0)
    made = {
        "empty": b"",
        "cut": whole[:-7],
        "page": b"<!DOCTYPE html>" + b" " * 2000,
        "pointer": b"version https://git-lfs.github.com/spec/v1\n",
    }
    path.write_bytes(made.get(how, header.tobytes() + whole[1024:]))


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize(
    "how", ["empty", "cut", "page", "pointer", "magic", "version", "count", "huge", "id", "missing"]
)
def test_a_damaged_shard_is_named_before_anything_starts(tmp_path, capsys, how, split):
    tokens = np.arange(6000, dtype=np.uint16)
    for name in ("train", "val"):
        write_shard(tmp_path / f"x_{name}.bin", tokens)
    bad = tmp_path / f"x_{split}.bin"
    if how == "id":
        tokens[77] = 50300
    damage(tokens, bad, how)
    if how == "missing":
        bad.unlink()
    files = [f"--train_files={tmp_path}/x_train*.bin", f"--val_file={tmp_path}/x_val.bin"]
    logs = f"--log_dir={tmp_path}/logs"
    assert t.main(["--preset", "cpu", "--train_steps=1", "--vocab_size=50257", logs, *files]) == 2
    said = capsys.readouterr().err
    assert f"x_{split}" in said and said.count("\n") == 1
    if how == "id":
        assert "50300 at 77" in said
    if how == "cut":
        assert str(bad.stat().st_size) in said and str(1024 + 12000) in said


def test_a_batch_that_the_ranks_cannot_share_names_the_sizes_that_fit(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert t.main(["--preset", "cpu", "--check"]) == 2
    assert "NPROC=1, 2, 4, 8, 16" in capsys.readouterr().err


def test_no_compiler_is_said_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert t.main(["--preset", "cpu", "--compile", "--check"]) == 2
    assert "--no-compile" in capsys.readouterr().err


def test_a_log_is_never_overwritten(short_flags, tmp_path):
    (tmp_path / "mine.jsonl").write_text("precious\n")
    done = command("--train_steps=1", f"--log_dir={tmp_path}", "--run_id=mine")
    assert done.returncode == 2 and "choose another" in done.stderr
    assert (tmp_path / "mine.jsonl").read_text() == "precious\n"


def test_a_nan_stops_the_run_before_the_step_and_marks_the_log_failed(tmp_path, monkeypatch):
    def poisoned(forward, optimizer, batches, step, s, ranks):
        if step == 2:
            matrices = next(g["params"] for g in optimizer.param_groups if g["use_muon"])
            matrices[0].data.view(-1)[0] = math.nan
        return train_step(forward, optimizer, batches, step, s, ranks)

    train_step = t.train_step
    monkeypatch.setattr(t, "warm_up", lambda *_: None)
    monkeypatch.setattr(t, "train_step", poisoned)
    assert t.main(["--preset", "cpu", f"--log_dir={tmp_path}", "--run_id=nan", *TINY_FLAGS]) == 1
    lines = [json.loads(line) for line in (tmp_path / "nan.jsonl").read_text().splitlines()]
    assert lines[-1]["status"] == "failed" and "step 2" in lines[-1]["reason"]
    assert [line["step"] for line in lines if line["kind"] == "step"] == [0, 1]


@pytest.mark.parametrize("flags", [["--help"]])
def test_help_shows_every_setting_with_its_meaning(flags, capsys):
    with pytest.raises(SystemExit) as left:
        t.main(flags)
    said = " ".join(capsys.readouterr().out.split())
    assert left.value.code == 0
    for field in dataclasses.fields(t.Settings):
        assert f"--{field.name}" in said
    assert "optimizer steps (1400 [" in said
