"""data/: the embedded corpus, the tokenizer, and the three commands of fineweb.py."""

import base64
import fcntl
import gzip
import hashlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import hub as stand_in

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data"
sys.path.insert(0, str(DATA))

import fineweb  # noqa: E402
import shards  # noqa: E402
import texts  # noqa: E402

NAMES = ["small_val_000000.bin", *(f"small_train_{i:06d}.bin" for i in (1, 2, 3))]
# fineweb.py with a small data set, and twenty times less patience
DRIVER = f"""
import sys, time
time.sleep = lambda seconds, sleep=time.sleep: sleep(seconds / 20)
sys.path.insert(0, {str(DATA)!r})
import fineweb
fineweb.DATASETS["10B"] = fineweb.Dataset({stand_in.REPO!r}, "small", 3)
"""


@pytest.fixture(scope="session")
def loopback():
    """127.0.0.1, also in a network namespace that is new."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), 1).close()
    except OSError:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                up = struct.pack("16sh", b"lo", 0x41)  # IFF_UP | IFF_RUNNING
                fcntl.ioctl(any_socket, 0x8914, up)  # SIOCSIFFLAGS
        except OSError as error:
            pytest.skip(f"no 127.0.0.1 here: {error}")


def make_shard(seed: int, tokens: int = 30_000) -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, tokens
    ids = np.random.default_rng(seed).integers(0, 50257, tokens).astype("<u2")
    return header.tobytes() + ids.tobytes()


@pytest.fixture
def hub(loopback):
    hub = stand_in.Hub({name: make_shard(i) for i, name in enumerate(NAMES)})
    yield hub
    hub.close()


def start(*args, endpoint="http://127.0.0.1:9", setup="", **env) -> subprocess.Popen:
    """fineweb.py as a process; 127.0.0.1:9 is a port that nobody answers."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k}
    clean |= {"HF_ENDPOINT": endpoint, "HF_HUB_DOWNLOAD_TIMEOUT": "1", **env}
    command = [sys.executable, "-c", DRIVER + setup + "\nfineweb.main()", *map(str, args)]
    return subprocess.Popen(command, env=clean, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def run(*args, **kwargs) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    process = start(*args, **kwargs)
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, out, err


def download(folder: Path, hub=None, shards=2, **kwargs) -> tuple[int, str, str]:
    endpoint = {"endpoint": hub.endpoint} if hub else {}
    return run("download", "--shards", shards, "--out", folder, **endpoint, **kwargs)


def assert_whole(folder: Path, hub, count: int = 3) -> None:
    """The folder has these shards, a manifest that says so, and nothing else."""
    expected = {name: hub.files[name] for name in NAMES[:count]}
    assert {path.name for path in folder.iterdir()} == {*expected, "manifest.json"}
    for name, data in expected.items():
        assert (folder / name).read_bytes() == data
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest == {name: {"bytes": len(data), "tokens": (len(data) - 1024) // 2,
                               "sha256": hashlib.sha256(data).hexdigest()}
                        for name, data in expected.items()}


def assert_refused(result: tuple[int, str, str], code: int, *words: str) -> None:
    """One sentence on stderr, with these words in it."""
    assert result[0] == code, result
    last = result[2].strip().split("\n")[-1]
    assert all(word in last for word in words) and "Traceback" not in result[2], result[2]


# ------------------------------------------------------------------------------------------------
# tokenizer and corpus


def test_tokenizer_is_gpt2s():
    encoding = shards.gpt2_encoding()
    assert encoding.n_vocab == 50257 and encoding.eot_token == 50256
    assert encoding.encode("hello world") == [31373, 995]
    assert encoding.encode(" SolidGoldMagikarp") == [43453]
    tokens = enumerate(shards.gpt2_tokens())
    lines = b"".join(base64.b64encode(token) + b" %d\n" % i for i, token in tokens)
    # what tiktoken itself expects of the r50k_base.tiktoken that it would download
    sha256 = "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
    assert hashlib.sha256(lines).hexdigest() == sha256


def test_tokenizer_of_the_first_ids():
    assert shards.gpt2_encoding(257).encode_ordinary("ab é") == [64, 65, 220, 127, 102]
    small = shards.gpt2_encoding(1024)
    text = "The State of the Union, 1790: 'tis   well.\n"
    assert small.decode(small.encode_ordinary(text)) == text
    assert small.eot_token == 1023 and max(small.encode_ordinary(text)) < 1023


def test_corpus_is_what_the_manifest_says():
    code, out, _ = run("verify", DATA)
    assert code == 0 and out.count("ok ") == 2


def test_corpus_is_text():
    encoding, documents = shards.gpt2_encoding(), []
    for split in ("train", "val"):
        tokens = shards.read_shard(DATA / f"sotu_{split}_000000.bin").tolist()
        starts = [i for i, token in enumerate(tokens) if token == 50256]
        assert starts[0] == 0
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            documents.append(encoding.decode(tokens[start + 1 : end], errors="strict"))
            assert encoding.encode_ordinary(documents[-1]) == tokens[start + 1 : end]
    assert len(documents) == 233 and sum(len(d.encode()) for d in documents) == 10_761_413
    assert documents[0].startswith("Fellow-Citizens of the Senate and House of Representatives")


# ------------------------------------------------------------------------------------------------
# download


def test_download_says_the_size_and_fetches_only_what_lacks(hub, tmp_path):
    code, out, err = download(tmp_path, hub, shards=1)
    assert code == 0 and not err and "fetching 2 shards, 0.00 GB" in out
    assert_whole(tmp_path, hub, 2)
    assert download(tmp_path, hub, shards=3)[0] == 0
    assert_whole(tmp_path, hub, 4)
    assert all(hub.count("GET", name) == 1 for name in NAMES)


def test_download_of_what_is_whole_needs_no_network(hub, tmp_path):
    assert download(tmp_path, hub)[0] == 0
    for extra in ({}, {"HF_HUB_OFFLINE": "1"}):
        assert download(tmp_path, **extra)[0] == 0
    assert_refused(download(tmp_path, shards=3), 1, "no network", "127.0.0.1:9")
    assert_refused(download(tmp_path, shards=3, HF_HUB_OFFLINE="1"), 1, "HF_HUB_OFFLINE")


def test_download_is_beside_the_script_by_default(hub, tmp_path):
    for path in DATA.glob("*.py"):
        shutil.copy(path, tmp_path)
    setup = f"fineweb.__file__ = {str(tmp_path / 'fineweb.py')!r}"
    assert run("download", "--shards", 1, endpoint=hub.endpoint, setup=setup)[0] == 0
    assert_whole(tmp_path / "small", hub, 2)


@pytest.mark.parametrize("shards", ["0", "-3", "500", "two"])
def test_download_refuses_a_number_of_shards(shards):
    result = run("download", "--shards", shards)
    assert_refused(result, 2, shards, "1 to 3" if shards != "two" else "int")


PASSING = {
    "cut half way": stand_in.cut(1),
    "one wrong byte": stand_in.altered(stand_in.one_wrong_byte, 1),
    "too short": stand_in.altered(lambda data, first: data[first:-2], 1),
    "too long": stand_in.altered(lambda data, first: data[first:] + b"..", 1),
    "empty": stand_in.altered(lambda data, first: b"", 1),
    "429": stand_in.status(429, "GET", 1, **{"Retry-After": "1"}),
    "503 on HEAD": stand_in.status(503, "HEAD", 1),
    "503 on GET": stand_in.status(503, "GET", 1),
    "stalled": stand_in.stalled(1.5, 1),
    "login page": stand_in.page("GET", 1),
}


@pytest.mark.parametrize("fault", PASSING)
def test_download_survives(hub, tmp_path, fault):
    hub.faults[NAMES[1]] = PASSING[fault]
    code, out, err = download(tmp_path, hub)
    assert code == 0, (out, err)
    assert_whole(tmp_path, hub)


@pytest.mark.parametrize("code", [429, 503])
def test_download_survives_a_busy_api(hub, tmp_path, code):
    hub.faults["api"] = stand_in.status(code, "GET", 2, **{"Retry-After": "3"})
    result, out, _ = download(tmp_path, hub, shards=1)
    assert result == 0 and f"the hub answers {code}; once more in 3 s" in out
    assert_whole(tmp_path, hub, 2)


LASTING = {
    "cut half way": ({NAMES[1]: stand_in.cut()}, [NAMES[1]]),
    "one wrong byte": ({NAMES[1]: stand_in.altered(stand_in.one_wrong_byte)}, [NAMES[1], "sha256"]),
    "no such file": ({NAMES[1]: stand_in.status(404, "HEAD")}, [NAMES[1], "404"]),
    "no such repository": ({"api": stand_in.status(404, "GET")}, [stand_in.REPO, "404"]),
    "not allowed": ({"api": stand_in.status(401, "GET")}, ["401", "HF_TOKEN"]),
    "503": ({NAMES[1]: stand_in.status(503, "GET")}, [NAMES[1], "503", "same command"]),
    "busy api": ({"api": stand_in.status(503, "GET")}, [stand_in.REPO, "503"]),
    "login page": (dict.fromkeys(["api", *NAMES], stand_in.page()), ["log in"]),
}


@pytest.mark.parametrize("fault", LASTING)
def test_download_ends_with_a_sentence(hub, tmp_path, fault):
    hub.faults, words = LASTING[fault]
    assert_refused(download(tmp_path, hub), 1, *words)
    assert not (tmp_path / NAMES[1]).exists()
    hub.faults = {}
    assert download(tmp_path, hub)[0] == 0  # the same command goes on
    assert_whole(tmp_path, hub)


def test_download_without_a_network_says_so_at_once(tmp_path):
    began = time.perf_counter()
    assert_refused(download(tmp_path), 1, "no network", "127.0.0.1:9")
    assert time.perf_counter() - began < 5  # 2 s, with room for a busy machine


JUNK = {
    "web page": lambda data: b"<html>404</html>",
    "LFS pointer": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "empty": lambda data: b"",
    "truncated": lambda data: data[:-100],
    "one wrong byte": lambda data: stand_in.one_wrong_byte(data, 0),
}


@pytest.mark.parametrize("junk, manifest", [*((junk, True) for junk in JUNK), ("web page", False),
                                            ("one wrong byte", False)])
def test_download_mends_junk(hub, tmp_path, junk, manifest):
    if manifest:
        assert download(tmp_path, hub)[0] == 0
    for name in NAMES[:2]:
        (tmp_path / name).write_bytes(JUNK[junk](hub.files[name]))
    code, out, _ = download(tmp_path, hub)
    assert code == 0 and f"{NAMES[1]}: " in out
    assert_whole(tmp_path, hub)
    assert hub.count("GET", NAMES[2]) == 1


def test_download_takes_whole_shards_from_elsewhere(hub, tmp_path):
    for name in NAMES[:2]:
        (tmp_path / name).write_bytes(hub.files[name])
    assert download(tmp_path, hub)[0] == 0
    assert_whole(tmp_path, hub)
    assert hub.count("GET", NAMES[0]) == hub.count("GET", NAMES[1]) == 0


def test_download_refuses_what_is_not_pinned(hub, tmp_path):
    pinned = f'''fineweb.DATASETS["10B"] = fineweb.Dataset(
        {stand_in.REPO!r}, "small", 3, pins=("{"0" * 64}",))'''
    assert_refused(download(tmp_path, hub, setup=pinned), 1, NAMES[0], "0" * 64)
    assert not (tmp_path / NAMES[0]).exists()


def test_download_refuses_ids_that_gpt2_has_not(hub, tmp_path):
    hub.files[NAMES[1]] = hub.files[NAMES[1]][:-2] + b"\xff\xff"
    assert_refused(download(tmp_path, hub), 1, NAMES[1], "65535")


def test_download_goes_on_after_a_kill(hub, tmp_path):
    hub.faults[NAMES[2]] = stand_in.stalled(1)
    process = start("download", "--shards", 2, "--out", tmp_path, endpoint=hub.endpoint)
    deadline = time.monotonic() + 30
    while not ((tmp_path / NAMES[1]).exists() and hub.count("GET", NAMES[2])):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (tmp_path / "download.tmp").exists() and not (tmp_path / NAMES[2]).exists()
    hub.faults = {}
    assert download(tmp_path, hub)[0] == 0
    assert_whole(tmp_path, hub)
    assert hub.count("GET", NAMES[1]) == 1


def test_download_stops_at_ctrl_c(hub, tmp_path):  # also where a shell ignores SIGINT, with &
    hub.faults[NAMES[2]] = stand_in.stalled(3)
    listens = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)"
    process = start("download", "--out", tmp_path, "--shards", 2, endpoint=hub.endpoint,
                    setup=listens, HF_HUB_DOWNLOAD_TIMEOUT="20")
    while not hub.count("GET", NAMES[2]):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130 and err.count("\n") == 1 and "goes on" in err


def test_two_downloads_at_once(hub, tmp_path):
    hub.faults = dict.fromkeys(NAMES, stand_in.slow(0.3))
    both = [start("download", "--shards", 2, "--out", tmp_path, endpoint=hub.endpoint)
            for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert_whole(tmp_path, hub)
    assert all(hub.count("GET", name) == 1 for name in NAMES[:3])


def test_download_on_a_full_disk(hub, tmp_path):
    little = "fineweb.shutil.disk_usage = lambda path: type('Usage', (), {'free': 100_000})"
    assert_refused(download(tmp_path, hub, setup=little), 1, "100,000 free", str(tmp_path))
    quota = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))"
    assert_refused(download(tmp_path, hub, setup=quota), 1, "File too large")
    assert not list(tmp_path.glob("*.bin"))


# ------------------------------------------------------------------------------------------------
# tokenize

DOCUMENTS = [f"Document {i}, {'and so on ' * i}ünd Ende 🎉\n" for i in range(40)]


def write_inputs(folder: Path, documents: list[str]) -> dict[str, list[Path]]:
    """The same documents in every format."""
    from pyarrow import Table, parquet

    rows = "".join(json.dumps({"id": i, "text": d}) + "\n" for i, d in enumerate(documents))
    (folder / "a.jsonl").write_text(rows)
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.write(rows)
    parquet.write_table(Table.from_pydict({"text": documents}), folder / "a.parquet")
    texts = [folder / f"{i:03d}.txt" for i in range(len(documents))]
    for path, document in zip(texts, documents, strict=True):
        path.write_text(document, newline="")
    others = {kind: [folder / f"a.{kind}"] for kind in ("jsonl", "jsonl.gz", "parquet")}
    return {"txt": texts, **others}


def tokens_of(folder: Path, split: str) -> list[int]:
    paths = sorted(folder.glob(f"*_{split}_*.bin"))
    return [token for path in paths for token in shards.read_shard(path).tolist()]


def expected_tokens(documents: list[str]) -> list[int]:
    encoding = shards.gpt2_encoding()
    return [token for d in documents for token in (50256, *encoding.encode_ordinary(d))]


def tokenize(*args) -> tuple[int, str, str]:
    return run("tokenize", *args)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "jsonl.gz", "parquet"])
def test_tokenize_every_format(tmp_path, kind):
    inputs = write_inputs(tmp_path, DOCUMENTS)[kind]
    out = tmp_path / "mine"
    result = tokenize(*inputs, "--val-every", 10, "--val-first", 3, "--out", out,
                      "--shard-tokens", 500)
    assert result[0] == 0, result
    assert tokens_of(out, "val") == expected_tokens(DOCUMENTS[2::10])
    train = [d for i, d in enumerate(DOCUMENTS) if i % 10 != 2]
    assert tokens_of(out, "train") == expected_tokens(train)
    lengths = [len(shards.read_shard(path)) for path in sorted(out.glob("mine_train_*.bin"))]
    assert len(lengths) > 3 and set(lengths[:-1]) == {500} and 0 < lengths[-1] <= 500
    assert run("verify", out)[0] == 0
    assert not list(out.glob("*.tmp"))
    assert_refused(tokenize(*inputs, "--val-every", 2, "--out", out), 1, "mine_", "already")


def test_tokenize_validates_on_other_files_and_leaves_copies_out(tmp_path):
    inputs = write_inputs(tmp_path, DOCUMENTS)
    held_out = inputs["txt"][5:7]
    result = tokenize(*inputs["jsonl"], "--val", *held_out, "--out", tmp_path / "mine")
    assert result[0] == 0 and "left 2 copies" in result[1]
    assert tokens_of(tmp_path / "mine", "val") == expected_tokens(DOCUMENTS[5:7])
    assert tokens_of(tmp_path / "mine", "train") == expected_tokens(DOCUMENTS[:5] + DOCUMENTS[7:])


class Namespace:
    """What argparse makes of `tokenize`."""

    def __init__(self, inputs, out, val=(), val_every=0, shard_tokens=1000):
        self.inputs, self.val, self.out = list(inputs), list(val), out
        self.val_every, self.val_first, self.field = val_every, val_every, "text"
        self.shard_tokens = shard_tokens


def test_tokenize_a_long_document_in_pieces(tmp_path, monkeypatch):
    """Cuts and shard ends change no token, wherever they fall."""
    document = DOCUMENTS[39] * 3 + " \n\n  x\t y" * 20 + "long" * 9 + "  "
    (tmp_path / "long.txt").write_text(document, newline="")
    (tmp_path / "val.txt").write_text("another text")
    encoding = shards.gpt2_encoding()
    for piece in (50, 77, 120):
        monkeypatch.setattr(texts, "PIECE", piece)
        out = tmp_path / f"p{piece}"
        texts.tokenize(Namespace([tmp_path / "long.txt"], out, [tmp_path / "val.txt"],
                                 shard_tokens=100), encoding)
        assert tokens_of(out, "train") == expected_tokens([document])


def test_tokenize_goes_on_wherever_it_was_interrupted(tmp_path, monkeypatch):
    inputs = write_inputs(tmp_path, DOCUMENTS)["jsonl"]
    encoding = shards.gpt2_encoding()
    monkeypatch.setattr(texts, "PIECE", 300)
    straight = tmp_path / "straight" / "mine"
    texts.tokenize(Namespace(inputs, straight, val_every=10, shard_tokens=500), encoding)
    write_json, calls = texts.write_json, 0

    def killed(path, value):
        nonlocal calls
        calls += 1
        if calls % 2:
            write_json(path, value)
        else:
            raise KeyboardInterrupt  # after the shard has its name, before it is noted

    monkeypatch.setattr(texts, "write_json", killed)
    out = tmp_path / "mine"
    for _ in range(100):
        try:
            texts.tokenize(Namespace(inputs, out, val_every=10, shard_tokens=500), encoding)
            break
        except KeyboardInterrupt:
            with pytest.raises(shards.UserError, match="unfinished"):
                texts.tokenize(Namespace(inputs, out, val_every=5), encoding)
    assert calls > 6
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in straight.iterdir()}


def test_tokenize_goes_on_after_a_kill(tmp_path):
    text = tmp_path / "long.jsonl"
    text.write_text("".join(json.dumps({"text": f"{i} " + DOCUMENTS[30] * 20}) + "\n"
                            for i in range(1000)))
    command = ["tokenize", text, "--val-every", 50, "--shard-tokens", 300_000, "--out"]
    assert run(*command, tmp_path / "a" / "mine")[0] == 0
    out = tmp_path / "mine"
    process = start(*command, out)
    while not (out / "mine_train_000001.bin").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (out / "manifest.json").exists()
    assert run(*command, out)[0] == 0
    manifests = [(folder / "manifest.json").read_text() for folder in (out, tmp_path / "a/mine")]
    assert manifests[0] == manifests[1] and run("verify", out)[0] == 0


BAD_INPUTS = {
    "line.jsonl": (b'{"text": "good"}\n{"text": "bad}\n', ["line 2", "--field text"]),
    "key.jsonl": (b'{"txet": "good"}\n', ["line 1", "--field text"]),
    "list.jsonl": (b"[1, 2]\n", ["line 1", "--field text"]),
    "number.jsonl": (b'{"text": 17}\n', ["--field text", "17"]),
    "latin1.txt": ("Übermut".encode("latin-1"), ["utf-8"]),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "good"}\n' * 999)[:-20], ["damaged"]),
    "page.jsonl.gz": (b"<html>", ["page.jsonl.gz"]),
    "page.parquet": (b"<html>" * 99, ["page.parquet"]),
    "empty.txt": (b"", ["no document is left for train"]),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_tokenize_refuses_damaged_text(tmp_path, name):
    content, words = BAD_INPUTS[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "val.txt").write_text("a text")
    result = tokenize(tmp_path / name, "--val", tmp_path / "val.txt", "--out", tmp_path / "mine")
    assert_refused(result, 1, *words)
    assert not list(tmp_path.glob("mine/*_train_*.bin"))


def test_tokenize_refuses_bad_usage(tmp_path, monkeypatch, capsys):
    text = tmp_path / "a.txt"
    text.write_text("a text")
    out = ["--out", tmp_path / "mine"]
    for args, word in (
        ([text, *out], "--val"),
        ([text, "--val", text, *out], "is an input and in --val"),
        ([text, "--val-every", "0", *out], "from 1"),
        ([text, "--val-every", "5", "--val-first", "6", *out], "--val-first 6"),
        ([tmp_path / "none.txt", "--val-every", "2", *out], "no file"),
        ([tmp_path, "--val-every", "2", *out], ".jsonl"),
        ([text, "--val-every", "2"], "--out"),
    ):
        monkeypatch.setattr(sys, "argv", ["fineweb.py", "tokenize", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            fineweb.main()
        assert_refused((ended.value.code, *capsys.readouterr()), 2, word)
    assert not (tmp_path / "mine").exists()


def test_tokenize_says_that_pyarrow_is_missing(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    result = run("tokenize", tmp_path / "a.parquet", "--val-every", 2, "--out", tmp_path / "mine",
                 setup="sys.modules['pyarrow'] = None")
    assert_refused(result, 1, "pip install pyarrow")


def test_tokenize_takes_half_a_surrogate_pair(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one \\ud83d two"}\n{"text": "three"}\n')
    assert tokenize(tmp_path / "a.jsonl", "--val-every", 2, "--out", tmp_path / "mine")[0] == 0
    assert tokens_of(tmp_path / "mine", "train") == expected_tokens(["one ? two"])


@pytest.mark.parametrize("text", [" ", "a", "!\n", "\u00df"])
def test_tokenize_a_million_equal_characters(tmp_path, text):
    document = "x" + text * (1_200_000 // len(text)) + "x"
    (tmp_path / "a.txt").write_text(document, newline="")
    (tmp_path / "b.txt").write_text("another text")
    result = tokenize(tmp_path / "a.txt", "--val", tmp_path / "b.txt", "--out", tmp_path / "mine")
    assert result[0] == 0, result
    tokens = tokens_of(tmp_path / "mine", "train")
    assert shards.gpt2_encoding().decode(tokens[1:]) == document


def test_tokenize_in_little_memory(tmp_path):
    """One line of 30 MB, and 6 MB without a space; memory in MB."""
    (tmp_path / "a.txt").write_text("to be or not to be, " * 1_500_000)
    (tmp_path / "b.txt").write_text("quo" * 2_000_000)
    tell = ("import atexit, resource\natexit.register(lambda: print("
            "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10))")
    result = run("tokenize", tmp_path / "a.txt", "--val", tmp_path / "b.txt", "--out",
                 tmp_path / "mine", setup=tell)
    assert result[0] == 0 and int(result[1].split()[-1]) < 500, result


def test_tokenize_the_yardstick(tmp_path):
    text = ROOT.parent / "shared/data/fineweb_edu_sample.txt"
    if not text.exists():
        pytest.skip(f"no {text}")
    (tmp_path / "val.txt").write_text("another text")
    assert tokenize(text, "--val", tmp_path / "val.txt", "--out", tmp_path / "mine")[0] == 0
    assert len(tokens_of(tmp_path / "mine", "train")) == 217_889  # a document start among them


# ------------------------------------------------------------------------------------------------
# verify


def put(folder: Path, name: str, data: bytes, manifest: bool = True) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    if manifest:
        entries = fineweb.read_manifest(folder)
        entries[name] = {"bytes": len(data), "tokens": (len(data) - 1024) // 2,
                         "sha256": hashlib.sha256(data).hexdigest()}
        fineweb.write_json(folder / "manifest.json", entries)


def header(*words: int) -> bytes:
    return np.array(words, "<i4").tobytes().ljust(1024, b"\0")


BAD_SHARDS = {
    "magic": (header(1, 1, 500) + bytes(1000), "begins with 1"),
    "version": (header(20240520, 2, 500) + bytes(1000), "2"),
    "count too large": (header(20240520, 1, 501) + bytes(1000), "501"),
    "count negative": (header(20240520, 1, -500) + bytes(1000), "-500"),
    "count of nothing": (header(20240520, 1, 0), "0 tokens"),
    "id": (header(20240520, 1, 500) + bytes(998) + b"\x51\xc4", "50257"),
    "short": (b"", "0 bytes"),
    "web page": (b"<html>".ljust(2024), "begins with"),
}


@pytest.mark.parametrize("manifest", [True, False])
def test_verify_names_every_bad_shard(tmp_path, manifest):
    put(tmp_path, "x_val_000000.bin", make_shard(0, 500), manifest)
    for i, (data, _) in enumerate(BAD_SHARDS.values()):
        put(tmp_path, f"x_train_{i:06d}.bin", data, manifest)
    code, out, err = run("verify", tmp_path)
    assert code == 1 and f"{len(BAD_SHARDS)} of {len(BAD_SHARDS) + 1} shards" in err
    assert "ok   x_val_000000.bin\n" in out and ("no manifest" in out) == (not manifest)
    for i, (_, word) in enumerate(BAD_SHARDS.values()):
        line = next(line for line in out.split("\n") if f"bad  x_train_{i:06d}.bin: " in line)
        assert word in line


def test_verify_compares_with_the_manifest(tmp_path):
    for i in range(5):
        put(tmp_path, f"x_train_{i:06d}.bin", make_shard(i, 500))
    put(tmp_path, "x_val_000000.bin", make_shard(1, 500))  # the same as train shard 1
    put(tmp_path, "x_train_000005.bin", make_shard(9, 500), manifest=False)
    (tmp_path / "x_train_000000.bin").unlink()
    (tmp_path / "x_train_000002.bin").write_bytes(stand_in.one_wrong_byte(make_shard(2, 500), 0))
    (tmp_path / "x_train_000003.bin").write_bytes(make_shard(3, 400))
    code, out, _ = run("verify", tmp_path)
    lines = dict(line[5:].split(": ", 1) for line in out.split("\n") if line.startswith("bad"))
    assert code == 1 and len(lines) == 5
    for name, word in (("train_000000", "missing"), ("train_000002", "sha256"),
                       ("train_000003", "1,824 bytes instead of 2,024"),
                       ("train_000005", "not in manifest.json"),
                       ("val_000000", "the same content as x_train_000001.bin")):
        assert word in lines[f"x_{name}.bin"]


def test_verify_refuses_what_is_no_folder_of_shards(tmp_path):
    assert_refused(run("verify", tmp_path), 1, "no shards", str(tmp_path))
    assert_refused(run("verify", tmp_path / "none"), 1, "no shards")
    (tmp_path / "manifest.json").write_text("{")
    assert_refused(run("verify", tmp_path), 1, "manifest.json", "not JSON")
