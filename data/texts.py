"""Shards of your own text: what `python data/fineweb.py tokenize` does.

Documents come in pieces, (does it begin a document, text), so that memory is bounded.
"""

import gzip
import hashlib
import io
import itertools
import json
import os
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from manifest import CORES, MANIFEST, examine, locked, shards_in, write_json
from shards import DOCUMENT_START, HEADER_BYTES, MAGIC, VERSION, UserError

PIECE = 2**16  # characters that one task tokenizes; more cost memory, less cost time
AHEAD = 16  # tasks waiting for each core: a busy machine does not leave it idle
LINE = 2**26  # bytes; a longer line of JSON is refused, not read
UNFINISHED = "tokenize.tmp"  # where an interrupted run goes on


def cut(text: io.TextIOBase) -> Iterator[tuple[bool, str]]:
    """The pieces of one document, cut before white space: there GPT-2's pattern cuts, too."""
    begins, rest = True, ""
    while block := text.read(PIECE):
        rest += block
        if len(block) < PIECE:
            break
        space = max(rest.rfind(" "), rest.rfind("\n"))
        end = len(rest[: space + 1].rstrip()) or len(rest)
        yield begins, rest[:end]
        begins, rest = False, rest[end:]
    if rest:
        yield begins, rest


def read_rows(path: Path, field: str) -> Iterator:
    """The field of each row of a .jsonl, .jsonl.gz or .parquet file."""
    if path.suffix == ".parquet":
        try:
            from pyarrow import parquet
        except ImportError:
            raise UserError(f"{path} needs pyarrow: pip install pyarrow") from None
        file = parquet.ParquetFile(path)
        if field not in file.schema_arrow.names:
            raise UserError(f"{path} has no --field {field} but {file.schema_arrow.names}")
        for batch in file.iter_batches(batch_size=256, columns=[field]):
            yield from batch.column(0).to_pylist()
        return
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(LINE), b""), 1):
            if len(line) == LINE:
                raise UserError(f"{path}, line {number}: over {LINE:,} bytes")
            try:
                yield json.loads(line)[field]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{path}, line {number}: no JSON object with --field {field} "
                                f"({error!r})") from None


def read_pieces(paths: list[Path], field: str) -> Iterator[tuple[bool, str]]:
    """The pieces of all documents, in order; a .txt file is one document."""
    for path in paths:
        try:
            if path.suffix == ".txt":
                with path.open(encoding="utf-8-sig", newline="") as text:
                    yield from cut(text)
                continue
            for row in read_rows(path, field):
                if not isinstance(row, str | None):
                    raise UserError(f"{path}: --field {field} is no text but {row!r:.40}")
                # half a surrogate pair, which JSON can hold, becomes "?"
                text = (row or "").encode("utf-8", "replace").decode()
                yield from cut(io.StringIO(text, newline=""))
        except UserError:
            raise
        except (ValueError, EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path} is damaged, or not what its name says: {error}") from None


def split_pieces(args, split: str, held_out: set[bytes]) -> Iterator[tuple[bool, str]]:
    """The pieces of one split; copies of validation documents are left out of training."""
    number = copies = 0
    for begins, text in read_pieces(args.val if split == "val" else args.inputs, args.field):
        if begins:
            number += 1
            wanted = not args.val_every or (
                (number % args.val_every == args.val_first % args.val_every) == (split == "val"))
            # a document of many pieces is known by the first: so much in common is a copy, too
            key = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if wanted and split == "val":
                held_out.add(key)
            elif wanted and key in held_out:
                wanted, copies = False, copies + 1
        if wanted:
            yield begins, text
    if copies:
        print(f"left {copies:,} copies of validation documents out of training")


def encode(pieces: Iterator[tuple[bool, str]], encoding) -> Iterator[tuple[int, np.ndarray]]:
    """(number of pieces, their uint16 tokens) of group after group, in order, on all cores."""
    start = np.array([DOCUMENT_START], np.uint16)

    def work(group: list[tuple[bool, str]]) -> tuple[int, np.ndarray]:
        parts = []
        for begins, text in group:
            parts += [start] * begins
            parts.append(encoding.encode_to_numpy(text, disallowed_special=()))
        return len(group), np.concatenate(parts, dtype=np.uint16, casting="unsafe")

    def groups() -> Iterator[list[tuple[bool, str]]]:
        for piece in pieces:
            group, size = [piece], len(piece[1])
            while size < PIECE and (piece := next(pieces, None)):
                group.append(piece)
                size += len(piece[1])
            yield group

    queue = deque()
    with ThreadPoolExecutor(CORES) as pool:
        for group in itertools.chain(groups(), [None] * AHEAD * CORES):  # None: no more
            queue.append(group and pool.submit(work, group))
            if len(queue) > AHEAD * CORES:
                yield queue.popleft().result()


def slices(groups: Iterator[tuple[int, np.ndarray]], at: list[int],
           shard_tokens: int) -> Iterator[tuple[np.ndarray, list[int]]]:
    """Tokens that do not cross a shard's end, and where the next ones begin: pieces, tokens."""
    (before, used), room = at, shard_tokens
    for count, tokens in groups:
        while used < len(tokens):
            part = tokens[used : used + room]
            used += len(part)
            room = (room - len(part)) or shard_tokens
            yield part, [before, used]
        before, used = before + count, 0


def write_split(args, split: str, pieces: Iterator[tuple[bool, str]], state: dict,
                encoding) -> None:
    """Write the shards that a split lacks; after each, `at` is where the next one begins."""
    from tqdm import tqdm

    mine = state[split]
    shards, at = mine["shards"], mine["at"]
    groups = encode(itertools.islice(pieces, at[0], None), encoding)
    stream = slices(groups, at, args.shard_tokens)
    with tqdm(desc=split, unit=" tokens", unit_scale=True, disable=None) as bar:
        for first in stream:
            name = f"{args.out.resolve().name}_{split}_{len(shards):06d}.bin"
            fresh, tokens = args.out / f"{name}.tmp", 0
            with fresh.open("wb") as file:
                file.seek(HEADER_BYTES)
                for part, mine["at"] in itertools.chain([first], stream):
                    file.write(part)
                    bar.update(len(part))
                    tokens += len(part)
                    if tokens == args.shard_tokens:
                        break
                file.seek(0)  # what was skipped is zeros
                file.write(np.array([MAGIC, VERSION, tokens], "<i4"))
                file.flush()
                os.fsync(file.fileno())
            shards[name], _ = examine(fresh)
            fresh.replace(args.out / name)
            write_json(args.out / UNFINISHED, state)
            tqdm.write(f"{name}: {tokens:,} tokens")
    if not shards:
        raise UserError(f"no document is left for {split}: name other files by --val, or another "
                        "--val-every; a .txt file is one document")


def tokenize(args, encoding) -> None:
    """Make shards of texts: validation first, so that training can leave its copies out."""
    if not args.val:
        args.val = args.inputs
    source = [[str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
              for path in (*args.inputs, *args.val)]
    source += [len(args.val), args.val_every, args.val_first, args.field, args.shard_tokens]
    state = {"source": source, **{s: {"shards": {}, "at": [0, 0]} for s in ("val", "train")}}
    with locked(args.out):
        unfinished = args.out / UNFINISHED
        if unfinished.exists():
            state = json.loads(unfinished.read_text())
            if state["source"] != source:
                raise UserError(f"{args.out} holds an unfinished run on other inputs or settings: "
                                "repeat that command to finish it, or delete the folder")
        elif found := shards_in(args.out):
            raise UserError(f"{args.out} has {found[0]} already: delete it, or name another --out")
        held_out: set[bytes] = set()
        for split in ("val", "train"):
            write_split(args, split, split_pieces(args, split, held_out), state, encoding)
        manifest = state["val"]["shards"] | state["train"]["shards"]
        write_json(args.out / MANIFEST, manifest)
        unfinished.unlink()
    print(f"{args.out.resolve()}: {len(manifest)} shards are whole")
