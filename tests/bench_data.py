"""How fast data/fineweb.py is, next to what it is made of: `python tests/bench_data.py`

download, with its checks, against plain hf_hub_download from the same stand-in hub; tokenize, from
a file to shards, against tiktoken's own batches; verify against sha256 in as many threads. MB/s,
medians of interleaved rounds; in the last column, what we reach of theirs in the middle round.
"""

import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hub as stand_in
from test_data import DATA, fineweb, make_shard, shards

ROUNDS = 7
CLIENT = f"""
import os, shutil, sys, time
sys.path.insert(0, {str(DATA)!r})
import fineweb
import huggingface_hub, tqdm
from huggingface_hub import hf_hub_download
huggingface_hub.utils.disable_progress_bars()
which, folder, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
names = ["small_val_000000.bin", *(f"small_train_{{i:06d}}.bin" for i in range(1, count))]
fineweb.DATASETS["10B"] = fineweb.Dataset({stand_in.REPO!r}, "small", count)
sys.argv = ["fineweb.py", "download", "--shards", str(count - 1), "--out", folder]
began = time.perf_counter()
if which == "ours":
    sys.stdout = open(os.devnull, "w")
    fineweb.main()
else:
    for name in names:
        hf_hub_download({stand_in.REPO!r}, name, repo_type="dataset", local_dir=folder)
print(time.perf_counter() - began, file=sys.__stdout__)
"""


def race(what: str, megabytes: float, ours: Callable, theirs: Callable, name: str) -> None:
    """Run both in turns; either returns its seconds, or None to be timed from outside."""
    times = []
    for _ in range(ROUNDS):
        times.append([])
        for action in (ours, theirs):
            began = time.perf_counter()
            times[-1].append(action() or time.perf_counter() - began)
    a, b = (megabytes / statistics.median(column) for column in zip(*times, strict=True))
    ratio = statistics.median(theirs / ours for ours, theirs in times)
    print(f"{what:10}{a:7.0f} MB/s   {name:28}{b:7.0f} MB/s   {ratio:5.0%}", flush=True)


def bench_download(folder: Path) -> None:
    count, tokens = 6, 25_000_000
    names = ["small_val_000000.bin", *(f"small_train_{i:06d}.bin" for i in range(1, count))]
    hub = stand_in.Hub({name: make_shard(i, tokens) for i, name in enumerate(names)})

    def client(which: str) -> float:
        with tempfile.TemporaryDirectory(dir=folder) as out:
            command = [sys.executable, "-c", CLIENT, which, out, str(count)]
            done = subprocess.run(command, env={"HF_ENDPOINT": hub.endpoint, "HF_HOME": out},
                                  capture_output=True, text=True, check=True)
        return float(done.stdout)

    race("download", count * tokens * 2 / 1e6, lambda: client("ours"), lambda: client("plain"),
         "hf_hub_download")
    hub.close()


def bench_tokenize(folder: Path) -> None:
    encoding = fineweb.gpt2_encoding()
    corpus = encoding.decode(shards.read_shard(DATA / "sotu_train_000000.bin").tolist())
    documents = [corpus[i : i + 3000] for i in range(0, len(corpus), 3000)] * 4
    source = folder / "a.jsonl"
    source.write_text("".join(json.dumps({"text": f"{i}{text}"}) + "\n"
                              for i, text in enumerate(documents)))

    def ours() -> None:
        with tempfile.TemporaryDirectory(dir=folder) as out:
            sys.argv = ["fineweb.py", "tokenize", str(source), "--val-every", "100", "--out", out]
            fineweb.main()

    cores = fineweb.os.cpu_count()
    race("tokenize", sum(len(text.encode()) for text in documents) / 1e6, ours,
         lambda: encoding.encode_ordinary_batch(documents, num_threads=cores) and None,
         "tiktoken, as many threads")


def bench_verify(folder: Path) -> None:
    paths = [folder / f"x_train_{i:06d}.bin" for i in range(8)]
    for i, path in enumerate(paths):
        path.write_bytes(make_shard(i, 50_000_000))
    entries = dict(zip([p.name for p in paths], map(fineweb.examine, paths), strict=True))
    fineweb.write_json(folder / "manifest.json", {name: e for name, (e, _) in entries.items()})

    def sha256(path: Path) -> None:
        with path.open("rb") as file:
            hashlib.file_digest(file, "sha256")

    def theirs() -> None:
        with ThreadPoolExecutor(fineweb.os.cpu_count()) as pool:
            list(pool.map(sha256, paths))

    race("verify", len(paths) * 100, lambda: fineweb.verify(folder), theirs,
         "sha256, as many threads")


if __name__ == "__main__":
    for bench in (bench_download, bench_tokenize, bench_verify):
        with tempfile.TemporaryDirectory() as scratch:
            bench(Path(scratch))
