"""Token shards: what one is, how its GPT-2 tokens become a run's ids, and these become rows.

A shard is 256 little-endian int32 (magic 20240520, version 1, token count, zeros), then the tokens
as uint16: GPT-2's ids, a document start (50256) before every document. Needs numpy alone.
"""

import hashlib
import mmap
import os
import queue
import threading
from pathlib import Path

import numpy as np

HEADER_BYTES, MAGIC, VERSION = 1024, 20240520, 1
DOCUMENT_START = 50256  # GPT-2's <|endoftext|>
MERGES = "data/gpt2_merges.bin"
# the repository's root: where the merges are, also for a copy of this file that lies deeper
ROOT = next((p for p in Path(__file__).resolve().parents if (p / MERGES).exists()), Path.cwd())
# GPT-2 numbers the bytes that print first
_PRINT = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_ORDER = bytes(_PRINT + [b for b in range(256) if b not in _PRINT])


class UserError(ValueError):
    """What the user can mend; one sentence with the value and what mends it."""


def read_shard(path: str | Path) -> np.ndarray:
    """The uint16 tokens of a shard, mapped and not read; UserError where it is not whole."""
    mend = "fetch it again: `python data/fineweb.py download`, or `git checkout data`"
    if not Path(path).is_file():
        raise UserError(f"{path}: no such shard; {mend}")
    size = os.path.getsize(path)
    if size < HEADER_BYTES:
        raise UserError(f"{path}: {size} bytes, too short for a shard's header; {mend}")
    magic, version, count = (int(n) for n in np.fromfile(path, "<i4", 3))
    if (magic, version) != (MAGIC, VERSION):
        raise UserError(
            f"{path}: begins with {magic}, {version} where a shard has {MAGIC}, {VERSION}; {mend}"
        )
    expected = HEADER_BYTES + 2 * count
    if count < 1 or size != expected:
        raise UserError(
            f"{path}: {size} bytes, but its header counts {count} tokens ({expected} bytes); {mend}"
        )
    return np.memmap(path, "<u2", "r", offset=HEADER_BYTES)


def inspect_shard(path: str | Path) -> dict:
    """Name, bytes, tokens and sha256 of a shard that is read from end to end.

    UserError also where a token is none of GPT-2's 50,257 ids.
    """
    tokens = read_shard(path)
    digest = hashlib.sha256(np.fromfile(path, np.uint8, HEADER_BYTES))
    for start in range(0, len(tokens), 2**19):  # little enough to stay in the core's cache
        piece = tokens[start : start + 2**19]
        digest.update(piece)
        if piece.max() > DOCUMENT_START:
            at = int((piece > DOCUMENT_START).argmax())
            raise UserError(
                f"{path}: token {piece[at]} at {start + at} is none of GPT-2's 50257 ids;"
                " make the shard again"
            )
    size = HEADER_BYTES + 2 * len(tokens)
    entry = {"bytes": size, "tokens": len(tokens), "sha256": digest.hexdigest()}
    return {"name": Path(path).name, **entry}


def read_merges() -> list[list[int]]:
    """GPT-2's 50,000 merges: row r makes token 256 + r from two earlier ids."""
    return np.fromfile(ROOT / MERGES, "<u2").reshape(-1, 2).tolist()


def gpt2_tokens() -> list[bytes]:
    """The bytes of GPT-2's 50,256 ordinary tokens, by id."""
    tokens = [BYTE_ORDER[i : i + 1] for i in range(256)]
    for left, right in read_merges():
        tokens.append(tokens[left] + tokens[right])
    return tokens


def gpt2_encoding(vocab_size: int = DOCUMENT_START + 1):
    """A tiktoken.Encoding, made offline: GPT-2's first vocab_size - 1 tokens, then <|endoftext|>.

    A merge makes its token of two earlier ones, so any number of them will do; 257 means bytes.
    """
    import tiktoken

    # GPT-2's pattern in the possessive form that tiktoken uses: the same cuts, faster
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    ranks = {token: i for i, token in enumerate(gpt2_tokens()[: vocab_size - 1])}
    special = {"<|endoftext|>": vocab_size - 1}
    return tiktoken.Encoding(f"gpt2-{vocab_size}", pat_str=pattern, mergeable_ranks=ranks,
                             special_tokens=special)


def new_array(size: int) -> np.ndarray:
    """uint16, to be filled, in memory that goes back to the system: what malloc frees does not."""
    return np.frombuffer(mmap.mmap(-1, max(1, 2 * int(size))), np.uint16, size)


def joined(tail: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.concatenate([tail, tokens], out=new_array(len(tail) + len(tokens)))


class Vocabulary:
    """GPT-2's first size - 1 ids, and the document start as the last one; 257 means bytes.

    A merge makes its token from two earlier ones, so that a token that is cut off falls back into
    what it was made from: the same as encoding the text with the fewer merges. Token t of GPT-2 is
    ids[offsets[t]:][: lengths[t]]; `bytes` has the bytes of text in each id.
    """

    def __init__(self, size: int):
        self.size, self.document_start = size, size - 1
        runs, count = [[i] for i in range(256)], [1] * 256
        for left, right in read_merges():
            kept = len(runs) < size - 1
            runs.append([len(runs)] if kept else runs[left] + runs[right])
            count.append(count[left] + count[right])
        runs.append([self.document_start])
        self.lengths = np.array([len(run) for run in runs])
        self.offsets = np.cumsum(self.lengths) - self.lengths
        self.ids = np.concatenate(runs).astype(np.uint16)
        self.bytes = np.array([*count[: size - 1], 0])

    def expand(self, tokens: np.ndarray) -> np.ndarray:
        """uint16 GPT-2 tokens -> uint16 ids below `size`."""
        if self.size == DOCUMENT_START + 1:
            return np.asarray(tokens)
        pieces = np.array_split(tokens, len(tokens) // 2**16 + 1)  # each stays in the cache
        ids, end = new_array(sum(self.lengths[piece].sum() for piece in pieces)), 0
        for piece in pieces:
            first, count = self.offsets[piece], self.lengths[piece]
            at = np.repeat(first - np.cumsum(count) + count, count) + np.arange(count.sum())
            start, end = end, end + len(at)
            ids[start:end] = self.ids[at]
        return ids

    def encode(self, text: str) -> list[int]:
        return gpt2_encoding(self.size).encode_ordinary(text)

    def decode(self, ids: list[int]) -> str:
        """Text of ids; the document start is an empty line."""
        tokens = [*gpt2_tokens()[: self.size - 1], b"\n\n"]
        return b"".join(tokens[i] for i in ids).decode("utf-8", "replace")


# A row is a list of pieces (tokens, start, length) for a model to read; a token's target is the
# next one of the stream, so that also the last token of a clipped document has its true successor.
# Both makers take arrays of tokens and yield rows of the sizes that are asked for, in order.


def stream_rows(arrays, shapes: list[tuple[int, int, int]], document_start: int, seed: int):
    """Rows cut from the stream without loss, shuffled inside each array by the seed.

    shapes: (rows, tokens of a row, unused) of each stage.
    """
    rng = np.random.default_rng(seed)
    block = max(size for _, size, _ in shapes)  # what is shuffled; shorter rows cut it up
    sizes = (size for count, size, _ in shapes for _ in range(count))
    size, tail = next(sizes), np.empty(0, np.uint16)
    for tokens in arrays:
        tokens = joined(tail, tokens)
        count = (len(tokens) - 1) // block
        tail = tokens[count * block :].copy()
        for i in map(int, rng.permutation(count)):
            start, end = i * block, (i + 1) * block
            while size and start + size <= end:
                yield [(tokens, start, size)]
                start, size = start + size, next(sizes, 0)
        del tokens  # before the next are read


def document_rows(arrays, shapes: list[tuple[int, int, int]], document_start: int, seed: int):
    """Rows of whole documents in the stream's order, clipped; what is clipped off is left out.

    shapes: (rows, tokens of a row, most tokens of a document) of each stage. A row of very many
    documents ends early, so that it has at most max_segments of them.
    """
    sizes = ((size, limit) for count, size, limit in shapes for _ in range(count))
    size, limit = next(sizes)
    tail, row, room = np.empty(0, np.uint16), [], size
    for tokens in arrays:
        tokens = joined(tail, tokens)
        starts = np.flatnonzero(tokens == document_start).tolist()
        for start, end in zip(starts[:-1], starts[1:], strict=True):
            row.append((tokens, start, min(end - start, limit, room)))
            room -= row[-1][2]
            if room == 0 or len(row) == max_segments(size):
                yield row
                size, limit = next(sizes, (0, 0))
                if not size:
                    return
                row, room = [], size
        tail = tokens[starts[-1] if starts else 0 :].copy()  # may go on in the next shard
        del tokens  # before the next are read


def max_segments(tokens: int) -> int:
    """Documents that a row has room for: shapes must not depend on the data."""
    return tokens // 64 + 8


def segment_starts(begins: np.ndarray) -> np.ndarray:
    """Where segments start in the flattened (B, T) rows, and the end, int32.

    Its length does not depend on the data: segments of no tokens fill up the room.
    """
    starts = np.full(len(begins) * max_segments(begins.shape[1]) + 1, begins.size, np.int32)
    found = np.flatnonzero(begins)
    assert len(found) < len(starts), f"{len(found)} segments in {begins.size} tokens"
    starts[: len(found)] = found
    return starts


def usable_tokens(tokens: np.ndarray, limit: int, document_start: int, rows: str) -> int:
    """Tokens that rows can be made of, where documents are clipped at `limit`."""
    if rows == "stream":
        return len(tokens) - 1
    starts = np.flatnonzero(tokens == document_start)
    return int(np.minimum(np.diff(starts, append=len(tokens)), limit).sum())


ROW_MAKERS = {"stream": stream_rows, "documents": document_rows}


def fill(rows: list, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of (tokens, start, length) -> ids and the tokens after them, -1 where a row has ended.

    Both (len(rows), size) int64.
    """
    ids = np.zeros((len(rows), size), np.int64)
    targets = np.full((len(rows), size), -1, np.int64)
    for i, row in enumerate(rows):
        at = 0
        for tokens, start, length in row:
            after = tokens[start + 1 : start + 1 + length]
            ids[i, at : at + length] = tokens[start : start + length]
            targets[i, at : at + len(after)] = after
            at += length
    return ids, targets


def prefetch(iterator, depth: int = 2):
    """Run an iterator in a thread, `depth` items ahead; what it raises is raised here."""
    items: queue.Queue = queue.Queue(depth)

    def work():
        try:
            for item in iterator:
                items.put((item, None))
            items.put((None, StopIteration()))
        except Exception as error:
            items.put((None, error))

    threading.Thread(target=work, daemon=True).start()
    while True:
        item, error = items.get()
        if isinstance(error, StopIteration):
            return
        if error:
            raise error
        yield item


def survey(
    train: Path, val: Path, val_tokens: int, shapes: list, rows: str, epochs: int, vocabulary
) -> tuple[list[Path], list[dict]]:
    """The training files that rows of these shapes use up, and what each shard read is.

    train: the pattern of the files, all of whose earlier ones are read from end to end, as is val;
    shapes: (rows, tokens of a row, most tokens of a document) of each stage. UserError for a
    damaged or foreign shard, or for too few tokens.
    """
    files = sorted(train.parent.glob(train.name))
    if not files:
        raise UserError(f"no file matches --train_files {train}: `python data/fineweb.py download`")
    if val.resolve() in {path.resolve() for path in files}:
        raise UserError(f"--val_file {val} is among --train_files {train}")
    entries, total, usable = [], 0, np.zeros(len(shapes))
    for path in files:
        entries.append({"split": "train", **inspect_shard(path)})
        tokens = vocabulary.expand(read_shard(path))
        total += len(tokens)
        start = vocabulary.document_start
        usable += [usable_tokens(tokens, limit, start, rows) for _, _, limit in shapes]
        # a stage that clips documents reads more of the stream for as many tokens
        pairs = zip(shapes, usable, strict=True)
        needed = sum(n * size * total / max(u, 1) for (n, size, _), u in pairs)
        if total >= needed:
            break
    if total * epochs < needed:
        raise UserError(
            f"the schedule reads {needed:,.0f} tokens, the {len(files)} shards of --train_files"
            f" hold {total:,}: fetch more, or give --epochs {int(-(-needed // total))} or fewer"
            " --train_steps"
        )
    entries.append({"split": "val", **inspect_shard(val)})
    if (have := len(vocabulary.expand(read_shard(val)))) < val_tokens + 1:
        raise UserError(f"--val_tokens {val_tokens}: {val} holds {have} tokens")
    return files[: len(entries) - 1], entries


def count_fineweb(train_files: str, shapes: list, rows: str) -> int:
    """FineWeb shards of 100M tokens to fetch for rows of these shapes; 0 for other files."""
    if "fineweb" not in train_files:
        return 0
    kept = 0.6 if rows == "documents" else 1.0  # of the stream at least, after the clipping
    return int(-(-sum(count * size for count, size, _ in shapes) // (kept * 1e8)))
