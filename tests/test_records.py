"""Records: the statistics against scipy, a valid record and what happens to it when it is forged,
an attempt from its first to its last run, tables and plots."""

import copy
import datetime
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))

import evidence  # noqa: E402
import record  # noqa: E402

CPU = record.TRACKS["cpu"]
CODE = {
    "train_gpt.py": '''"""step:1/1 val_loss:0.0001 torch._inductor.config TORCHINDUCTOR_X=1"""
import torch
from muon import Muon

# torch.compile(mode="max-autotune") stands here in a comment
print('{"kind": "val", "step": 100, "loss": 0.1}', "torch.compile(f, mode='max-autotune')")
step = torch.compile(Muon, dynamic=False, fullgraph=True)
''',
    "muon.py": "class Muon:\n    pass\n",
}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def stamp(moment: datetime.datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


class Forger:
    """A record in memory, sound until a test changes it; write() seals what it has."""

    def __init__(self, base: Path, losses=(1.3641, 1.3638, 1.3643, 1.3636), pairs=0, steps=25,
                 track="cpu", name="Test", seconds=60.0):
        self.now = datetime.datetime(2026, 11, 1, 12, tzinfo=datetime.UTC)
        self.folder = base / track / f"2026-11-01_{name}"
        self.code, self.logs, self.runs, self.steps = dict(CODE), {}, [], steps
        self.about = {"name": name, "authors": ["A. Person"], "date": "2026-11-01",
                      "track": track, "changed": "Nothing, it is a test."}
        hashes = {name: sha256(text.encode()) for name, text in CODE.items()}
        self.plan = {"kind": "plan", "time": stamp(self.now), "name": name, "track": track,
                     "runs": len(losses), "first_seed": 0, "pairs": pairs,
                     "code": {"record": dict(hashes)}}
        if pairs:
            self.plan |= {"against": "2026-10-01_Base"}
            self.about |= {"against": "2026-10-01_Base"}
            self.plan["code"]["baseline"] = hashes
        for arm, seed in evidence.schedule(self.plan):
            self.add(arm, seed, losses[seed], seconds * (1 if arm == "record" else 3) + seed)

    def add(self, arm: str, seed: int, loss: float, seconds: float, again: str = "") -> list:
        """One more run, with its log: steps of `seconds` in all, ending at `loss`."""
        run_id, rng = f"{arm}_seed{seed}{again}", random.Random(f"{arm} {seed}")
        track, vocab_size = self.plan["track"], 2048 if self.plan["track"] == "cpu" else 50257
        tokens = record.TRACKS[track]["val_tokens"][vocab_size]
        size = record.TRACKS[track]["val_bytes"] or 48_000_000
        loss += 1.23456789e-7  # no measured loss is round
        nats = loss if track == "gpu" else loss * math.log(2) * size / tokens
        train_name, train_hash = next(iter(record.TRACKS[track]["train_sha256"].items()))
        begin, wall = self.now, seconds + 12.25
        self.now += datetime.timedelta(seconds=round(wall) + 6)
        header = {
            "kind": "header", "run_id": run_id, "track": track, "seed": seed,
            "time": stamp(begin + datetime.timedelta(seconds=5)),
            "settings": {"preset": track, "seed": seed, "vocab_size": vocab_size,
                         "train_steps": self.steps, "log_every": 10},
            "code": {name: sha256(text.encode()) for name, text in CODE.items()},
            "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "numpy": "2.4.6", "cuda": None},
            "device": "Some CPU @ 2.20GHz", "world_size": 2, "threads": 1, "num_params": 1835029,
            "vocab_size": vocab_size, "environment": {"OMP_NUM_THREADS": "1"},
            "shards": [
                {"name": train_name, "split": "train", "bytes": 4096, "tokens": 1536,
                 "sha256": train_hash},
                {"name": f"{train_name.split('_')[0]}_val_000000.bin", "split": "val",
                 "bytes": 4096, "tokens": 1536, "sha256": record.TRACKS[track]["val_sha256"]}]}

        def val(step: int, loss: float) -> dict:
            return {"kind": "val", "step": step, "loss": loss, "tokens": tokens, "bytes": size,
                    "bits_per_byte": loss * tokens / size / math.log(2),
                    "train_tokens": 2048 * step, "train_seconds": seconds * step / self.steps}

        entries = [
            header,
            {"kind": "off_clock", "name": "startup", "seconds": 2.0},
            {"kind": "off_clock", "name": "warmup", "seconds": 5.0, "state_restored": True},
            {"kind": "probe", "name": "causality", "step": 0, "max_change": 0.0, "ok": True},
            {"kind": "off_clock", "name": "validation", "seconds": 2.5},
            val(0, math.log(vocab_size) + 1e-3 / 7)]
        for step in sorted({*range(0, self.steps, 10), self.steps - 1}):
            entries.append({
                "kind": "step", "step": step, "lr_multiplier": 1.0, "tokens": 2048 * (step + 1),
                "loss": math.log(vocab_size) * 0.97**step + rng.random() / 100,
                "grad_norm": rng.random(), "train_seconds": seconds * (step + 0.9) / self.steps})
        entries += [
            {"kind": "off_clock", "name": "validation", "seconds": 2.5},
            val(self.steps, nats),
            {"kind": "end", "status": "ok", "reason": "", "steps": self.steps,
             "train_seconds": seconds, "wall_seconds": wall, "peak_memory_mib": 700.0}]
        self.logs[run_id] = entries
        self.runs.append([
            {"kind": "start", "time": stamp(begin), "run_id": run_id, "arm": arm, "seed": seed},
            {"kind": "end", "time": stamp(self.now), "run_id": run_id, "status": "ok"}])
        return self.runs[-1]

    def line(self, kind: str, run: int = 0, at: int = 0) -> dict:
        """The at-th line of a kind in the log of the run-th run."""
        log = self.logs[self.runs[run][0]["run_id"]]
        return [entry for entry in log if entry["kind"] == kind][at]

    def everywhere(self, change) -> None:
        for log in self.logs.values():
            for entry in log:
                change(entry)

    def rehash(self, name: str, text: str) -> None:
        """New code, in the plan and in all logs too."""
        self.code[name] = text
        self.plan["code"]["record"][name] = sha256(text.encode())
        for log in self.logs.values():
            log[0]["code"][name] = sha256(text.encode())

    def write(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.code.items():
            (self.folder / name).write_text(text)
        (self.folder / "record.json").write_text(json.dumps(self.about, indent=2) + "\n")
        for run_id, entries in self.logs.items():
            lines = "".join(json.dumps(entry) + "\n" for entry in entries)
            (self.folder / f"{run_id}.jsonl").write_text(lines)
        lines = []
        for entry in [self.plan, *(entry for run in self.runs for entry in run)]:
            log = self.folder / f"{entry.get('run_id')}.jsonl"
            if entry["kind"] == "end":
                entry = {"log_sha256": sha256(log.read_bytes()) if log.exists() else None, **entry}
            previous = sha256(lines[-1].encode()) if lines else "0" * 64
            lines.append(json.dumps({**entry, "previous": previous}))
        (self.folder / "runs.jsonl").write_text("".join(line + "\n" for line in lines))
        return self.folder


def verdict(folder: Path, capsys) -> tuple[int, str]:
    code = record.main(["verify", str(folder)])
    return code, capsys.readouterr().out


# ------------------------------------------------------------------------------------------------
# statistics


@pytest.mark.parametrize("values, p", [
    ((3.2791, 3.2778, 3.2787, 3.2784), 0.005983), ((3.2772, 3.2756, 3.2784, 3.2783), 0.013719),
    ((3.281, 3.282, 3.2805), 0.94096)])
def test_known_p(values, p):
    assert record.t_test(list(values), 3.28) == pytest.approx(p, rel=1e-4)


@pytest.mark.parametrize("values", [
    [3.279] * 4, [3.279], [], [3.279, math.nan], [3.279, -math.inf], [3.279, "3,2779"],
    [3.279, True]])
def test_no_sample_no_p(values):
    with pytest.raises(ValueError):
        record.t_test(values, 3.28)


def test_statistics_agree_with_scipy():
    stats, special = pytest.importorskip("scipy.stats"), pytest.importorskip("scipy.special")
    rng = random.Random(0)
    for _ in range(300):
        a, b, x = rng.uniform(0.3, 200), rng.uniform(0.3, 200), rng.random()
        assert record.incomplete_beta(x, a, b) == pytest.approx(special.betainc(a, b, x), abs=1e-10)
        t, df = rng.gauss(0, 10), rng.uniform(1, 300)
        assert record.t_tail(t, df) == pytest.approx(stats.t.sf(t, df), rel=1e-10)
        fast = [rng.gauss(100, 3) for _ in range(rng.randint(2, 20))]
        slow = [rng.gauss(102, 1) for _ in range(rng.randint(2, 20))]
        welch = stats.ttest_ind(fast, slow, equal_var=False, alternative="less").pvalue
        assert record.welch_test(fast, slow) == pytest.approx(welch, rel=1e-10)
        one = stats.ttest_1samp(fast, 101, alternative="less").pvalue
        assert record.t_test(fast, 101) == pytest.approx(one, rel=1e-10)


def test_power_is_about_right():
    """Against the noncentral t; "about 15 runs" is one of the exact number."""
    stats = pytest.importorskip("scipy.stats")

    def exact(effect: float, n: int) -> float:
        return stats.nct.sf(stats.t.isf(record.ALPHA, n - 1), n - 1, effect * math.sqrt(n))

    for effect in (0.5, 0.9, 1.5, 2.5):
        needed = record.runs_needed(effect)
        assert exact(effect, needed + 1) > 0.8 > exact(effect, needed - 2)
        assert record.power(effect, needed) == pytest.approx(exact(effect, needed), abs=0.05)
    assert record.runs_needed(0.9) == 15 + 1


# ------------------------------------------------------------------------------------------------
# a valid record, and forgeries whose hashes all agree: what the lines say has to give them away


def test_valid_records(tmp_path, capsys):
    Forger(tmp_path, name="Base").write().rename(tmp_path / "cpu" / "2026-10-01_Base")
    code, text = verdict(Forger(tmp_path, pairs=2).write(), capsys)
    assert code == 0, text
    assert re.search(r"n = 4, target 1.365, margin 0\.001050, p = 0\.00\d+; power \S+ about", text)
    assert re.search(r"time: \d\.\d+ times 2026-10-01_Base's speed in 2 .*p = 1\.\d+e-05 \(W", text)
    assert "changed: +0 -0 against Base" in text and "confirmed by: nobody yet" in text
    code, text = verdict(Forger(tmp_path, (3.2791, 3.2778, 3.2787, 3.2784), track="gpu").write(),
                         capsys)
    assert code == 0 and "p = 0.00598" in text, text


def edit(*path, **values):
    """A mutation: change the values in a line of every log, found by kind and place."""
    kind, at = path

    def mutate(f: Forger) -> None:
        for log in f.logs.values():
            [entry for entry in log if entry["kind"] == kind][at].update(values)

    return mutate


def scale_clock(f: Forger) -> None:
    f.everywhere(lambda entry: entry.update(
        {key: value / 10 for key, value in entry.items() if "seconds" in key}))


def milliseconds(f: Forger) -> None:
    f.everywhere(lambda entry: entry.update(
        {key: value * 1000 for key, value in entry.items() if key == "train_seconds"}))


def cut_short(f: Forger, times: int = 1, keep: int = -2) -> None:
    """Run 0 was interrupted before it was run again."""
    again = [f.runs.pop(0)]
    for i in range(times):
        run_id = f"record_seed0_cut{i}"
        f.logs[run_id] = copy.deepcopy(f.logs["record_seed0"])[:keep]
        f.logs[run_id][0]["run_id"] = run_id
        start, end = copy.deepcopy(again[-1])
        other = {"run_id": run_id, "time": f.plan["time"]}
        again.insert(-1, [start | other, end | other | {"status": "interrupted"}])
    f.runs = again + f.runs


def copy_log(f: Forger) -> None:
    log = copy.deepcopy(f.logs["record_seed0"])
    log[0] = f.logs["record_seed1"][0]
    f.logs["record_seed1"] = [*log[:-1], f.logs["record_seed1"][-1]]
    for entry in log:  # the last validation a hair off, so that s is not to blame
        if entry["kind"] != "header" and "train_seconds" in entry:
            entry["train_seconds"] *= 61 / 60


def new_code(name: str, text: str):
    return lambda f: f.rehash(name, f.code[name] + text)


def change(do):
    return lambda f: do(f) and None


FORGED = {
    # the claim
    "not below by chance": (lambda f: f.__init__(f.folder.parents[1], (1.3649, 1.3641, 1.3652)),
                            1, "claim: p = 0.251058 is not below 0.01: mean 1.364733, t"),
    "mean above": (lambda f: f.__init__(f.folder.parents[1], (1.3661, 1.3662, 1.3663)),
                   1, "is not below 0.01: mean 1.3662"),
    "same loss each time": (lambda f: f.everywhere(
        lambda e: e["kind"] == "val" and e["step"] and e.update(
            loss=3.2, bits_per_byte=3.2 * e["tokens"] / e["bytes"] / math.log(2))), 1, "s = 0"),
    "one run": (lambda f: f.__init__(f.folder.parents[1], (1.3641,)), 1, "n = 1: a test needs two"),
    "a typed number": (lambda f: f.about.update(seconds=90), 1, "['seconds'] are no fields"),
    "rounded": (lambda f: f.everywhere(lambda e: e["kind"] == "val" and e["step"] and e.update(
        loss=round(e["loss"], 4))), 1, "fewer than six decimals"),
    "other bits per byte": (lambda f: f.line("val", 1, 1).update(bits_per_byte=1.3611111111),
                            1, "bits per byte, not what it says"),
    "a baseline that defines another target": (lambda f: f.about.update(role="baseline"),
                                               1, "defines the target 1.364, not 1.365"),
    "a baseline that defines it": (
        lambda f: (f.__init__(f.folder.parents[1], (1.3641, 1.3648, 1.3649)),
                   f.about.update(role="baseline")), 0, "defines the target"),
    # the person's part
    "authors missing": (lambda f: f.about.update(authors=[record.TO_DO]), 1, "authors is to be"),
    "changed missing": (lambda f: f.about.update(changed=record.TO_DO), 1, "changed is to be"),
    "authors no list": (lambda f: f.about.update(authors="me"), 1, "authors is 'me', not list"),
    "name of another": (lambda f: f.about.update(name="Other"), 1, "the folder is '2026-11-01_Te"),
    "no such date": (lambda f: f.about.update(date="2026-11-31"), 1, "day is out of range"),
    "secret": (lambda f: f.about.update(changed="see hf_" + "AbCdEfGhIjKlMnOpQr"), 1, "a secret"),
    "confirmed": (lambda f: f.about.update(confirmed_by=["B. Person"]), 0, "by: B. Person"),
    # the ledger
    "run deleted": (lambda f: f.logs.pop(f.runs.pop()[0]["run_id"]), 1, "seed 3 was planned and"),
    "failed run": (lambda f: (f.runs[1][1].update(status="failed"), f.line("end", 1).update(
        status="failed", reason="NaN")), 1, "record seed 1 failed: a failed run counts"),
    "one seed twice": (lambda f: (f.runs[1][0].update(seed=0), f.line("header", 1).update(seed=0)),
                       1, "record seed 0 was run again after ['ok']"),
    "a run of no plan": (lambda f: f.add("record", 9, 1.36, 60.0), 1, "is not in its place"),
    "order changed": (lambda f: f.runs.reverse(), 1, "its times run backwards"),
    "one id twice": (lambda f: [e.update(run_id="record_seed0") for e in f.runs[1]], 1, "twice"),
    "interrupted once": (cut_short, 0, "interrupted: record_seed0_cut0"),
    "interrupted twice": (lambda f: cut_short(f, 2), 1, "was interrupted twice: once is forgiven"),
    "called interrupted at its end": (lambda f: cut_short(f, 1, -1), 1, "but it finished or fai"),
    "called interrupted, but ok": (lambda f: cut_short(f, 1, 99), 1, "but it finished or failed"),
    "died before its first step": (lambda f: cut_short(f, 1, 6), 0, "valid"),
    "never finished": (lambda f: f.runs[3].pop(), 1, "seed 3 was planned and has no"),
    "path as run id": (lambda f: [e.update(run_id="../x") for e in f.runs[0]], 1, "is no run id"),
    "a plan for for ever": (lambda f: f.plan.update(runs=10**12), 1, "1 to 1000 runs"),
    "future ledger": (lambda f: f.runs[3][1].update(time="2126-11-01T12:00:00Z"), 1, "future"),
    # a log's order
    "end missing": (lambda f: f.logs["record_seed0"].pop(), 1, "one header, the run, and one end"),
    "two headers": (lambda f: f.logs["record_seed0"].insert(1, f.line("header")), 1, "one header"),
    "end says failed": (edit("end", 0, status="failed", reason="x"), 1, "ended as 'failed': x"),
    "a step left out": (lambda f: f.logs["record_seed2"].remove(f.line("step", 2, 1)),
                        1, "does not have the steps 0, 10, 20 ... 24"),
    "no last validation": (edit("val", 1, step=24), 1, "no validation at step 0 or at 25"),
    "validation of a later step": (
        lambda f: f.logs["record_seed0"].insert(6, f.logs["record_seed0"].pop(-2)),
        1, "steps and validations out of order"),
    "unknown kind": (edit("off_clock", 0, kind="note"), 1, "kind is 'note', not one of header"),
    "loss as text": (edit("val", 1, loss="3,2779"), 1, "loss is '3,2779', not float"),
    "no probe": (lambda f: f.logs["record_seed0"].remove(f.line("probe")), 1, "causality probe"),
    "probe failed": (edit("probe", 0, ok=False), 1, "no passed causality probe"),
    # time
    "time going back": (edit("step", 1, train_seconds=59.0), 1, "runs backwards or stands still"),
    "ms for s": (milliseconds, 1, "off the clock: not its 72.2 s"),
    "a faster clock": (scale_clock, 1, "by its own clock and 78 s by the ledger's"),
    "extra section": (edit("off_clock", 1, name="thinking"), 1, "'thinking' may not be off"),
    "state not restored": (edit("off_clock", 1, state_restored=False), 1, "restored the state"),
    "work beside the clock": (edit("end", 0, wall_seconds=90.0), 1, "not its 90.0 s"),
    "header before its start": (edit("header", 0, time="2026-10-31T12:00:00Z"), 1, "not between"),
    "negative seconds": (edit("off_clock", 0, seconds=-2.0), 1, "seconds is -2.0, out of range"),
    # data and model
    "other validation": (lambda f: f.line("header")["shards"][1].update(sha256="0" * 64),
                         1, "its validation shard is not the track's"),
    "trains on validation": (lambda f: f.line("header")["shards"][0].update(
        sha256=CPU["val_sha256"]), 1, "sotu_train_000000.bin is the val shard"),
    "other training data": (lambda f: f.line("header")["shards"][0].update(name="books.bin"),
                            1, "trains on books.bin: not the track's data"),
    "half a validation": (lambda f: f.line("val").update(tokens=74_000), 1, "validates on 74,000"),
    "trained before": (lambda f: f.line("val").update(loss=5.1, bits_per_byte=2.2),
                       1, "starts at 5.1000"),
    "tokens do not grow": (edit("step", 2, tokens=2048), 1, "training tokens do not add up"),
    "custom settings": (edit("header", 0, track="custom"), 1, "track is 'custom', not 'cpu'"),
    "one run with other settings": (
        lambda f: f.line("header", 2)["settings"].update(lr=0.1), 1, "first run in settings.lr"),
    "another machine": (lambda f: f.line("header", 2).update(device="Other"), 1, "run in device"),
    "a log under a new id": (copy_log, 1, "record_seed1 has the losses of record_seed0"),
    "compiler variable": (lambda f: f.line("header")["environment"].update(
        TORCHINDUCTOR_MAX_AUTOTUNE="1"), 1, "ran with TORCHINDUCTOR_MAX_AUTOTUNE"),
    "home path": (edit("header", 0, device="/home/" + "someone/cpu"), 1, "holds a home path"),
    "address": (edit("header", 0, device="10.1.2.3."), 1, "holds an address"),
    "host name": (edit("header", 0, hostname="box"), 1, "holds a host name"),
    "deep nesting": (edit("header", 0, versions=json.loads('{"a":' * 400 + "1" + "}" * 400)),
                     0, "valid"),
    # code
    "mode": (new_code("train_gpt.py", 'f = torch.compile(f, mode="max-autotune")\n'),
             1, "code: train_gpt.py line 8 gives torch.compile mode"),
    "decorator": (new_code("muon.py", "import torch as t\n\n@t.compile(options={})\ndef f(): 0\n"),
                  1, "muon.py line 5 gives torch.compile options"),
    "partial": (new_code("muon.py", "from torch import compile as c\nimport functools\n"
                         "g = functools.partial(c, **extra)\n"), 1, "gives torch.compile **"),
    "inductor": (new_code("muon.py", "import torch\nd = torch._inductor\nd.config.x = 1\n"),
                 1, "names torch._inductor.config.x"),
    "dynamo": (new_code("muon.py", "from torch._dynamo import config\n"), 1, "_dynamo.config"),
    "environ": (new_code("muon.py", 'import os\nos.environ["TORCHINDUCTOR_FREEZING"] = "1"\n'),
                1, "names TORCHINDUCTOR_FREEZING"),
    "getattr": (new_code("muon.py", 'import torch\nx = getattr(torch, "_inductor")\n'), 1, "names"),
    "exec": (new_code("muon.py", 'exec("x")\n'), 1, "calls exec: code that nobody can read"),
    "foreign import": (new_code("muon.py", "import fastmuon\n"), 1, "imports fastmuon"),
    "no Python": (new_code("muon.py", "x = (\n"), 1, "is not Python: SyntaxError"),
    "a script without muon.py": (lambda f: [f.rehash("train_gpt.py", "import torch\n"), *(
        code.pop("muon.py") for code in (f.code, f.plan["code"]["record"], *(
            log[0]["code"] for log in f.logs.values())))], 0, "valid"),
    "a module that no log names": (lambda f: (
        f.code.update({"kernels.py": "import torch\n"}), f.plan["code"]["record"].update(
            {"kernels.py": sha256(b"import torch\n")})), 0, "valid"),
    "a log of other code": (lambda f: f.line("header", 2)["code"].update({"muon.py": "0" * 64}),
                            1, "ran another muon.py than the plan's"),
    "code of another name": (lambda f: f.plan["code"]["record"].update({"../x.py": "0" * 64}),
                             1, "the plan does not list train_gpt.py"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged(name, tmp_path, capsys):
    mutate, expected, reason = FORGED[name]
    forger = Forger(tmp_path)
    mutate(forger)
    code, text = verdict(forger.write(), capsys)
    assert (code, reason in text) == (expected, True), text


# ------------------------------------------------------------------------------------------------
# the same record, its files changed after the fact


def rewrite(name: str, pattern: bytes, replacement: bytes):
    def mutate(folder: Path) -> None:
        data = (folder / name).read_bytes()
        assert re.search(pattern, data)
        (folder / name).write_bytes(re.sub(pattern, replacement, data, count=1))

    return mutate


def enlarge(folder: Path) -> None:
    with open(folder / "record_seed0.jsonl", "r+b") as file:
        file.truncate(200_000_000)


def link_out(folder: Path) -> None:
    shutil.move(folder / "record_seed0.jsonl", folder.parent / "elsewhere.jsonl")
    (folder / "record_seed0.jsonl").symlink_to("../elsewhere.jsonl")


def move(name: str):
    return lambda folder: folder.rename(folder.parent / name)


LOG, JSON = "record_seed0.jsonl", "record.json"
CHANGED = {
    "untouched": (lambda folder: None, 0, "valid"),
    "a digit of a loss": (rewrite(LOG, rb'(?<="step": 25, "loss": )\d', b"2"), 1, "is not what"),
    "one byte of code": (rewrite("muon.py", b"pass", b"pasS"), 1, "muon.py is not the code"),
    "log deleted": (lambda folder: (folder / LOG).unlink(), 1, "record_seed0.jsonl is missing"),
    "ledger deleted": (lambda folder: (folder / "runs.jsonl").unlink(), 1, "runs.jsonl is missing"),
    "ledger edited": (rewrite("runs.jsonl", b'"seed": 2', b'"seed": 7'), 1, "the sha256 of the"),
    "ledger's last line cut": (rewrite("runs.jsonl", rb"..\n$", b""), 1, "the last line is cut"),
    "code deleted": (lambda folder: (folder / "muon.py").unlink(), 1, "muon.py is missing"),
    "log's last line cut": (rewrite(LOG, rb".{9}\n$", b""), 1, "the last line is cut"),
    "CRLF": (rewrite(LOG, rb"\n", b"\r\n"), 1, "line 1: has a carriage return"),
    "BOM": (rewrite(LOG, rb"^", b"\xef\xbb\xbf"), 1, "starts with a byte order mark"),
    "not UTF-8": (rewrite(LOG, rb"Some", b"S\xf6me"), 1, "is not UTF-8"),
    "NaN": (rewrite(LOG, rb'"loss": [\d.]+', b'"loss": NaN'), 1, "NaN is not a number"),
    "infinity": (rewrite(LOG, rb'"loss": [\d.]+', b'"loss": 1e999'), 1, "1e999 is not finite"),
    "a huge integer": (rewrite(LOG, rb'"step": 0', b'"step": 1' + b"0" * 400), 1, "out of range"),
    "a key twice": (rewrite(LOG, rb'"loss":', b'"loss": 1.0, "loss":'), 1, "'loss' stands twice"),
    "empty log": (rewrite(LOG, rb"(?s)^.*$", b""), 1, "the last line is cut"),
    "nested for ever": (rewrite(LOG, rb'"versions": ', b'"versions": ' + b"[" * 100_000), 1,
                        f"{LOG}: line 1: is nested too deeply"),
    "a 2 MB line": (rewrite(LOG, rb"Some", b"x" * 2_000_000), 1, "bytes, the limit is 1,048,576"),
    "a 200 MB line": (enlarge, 1, "has 200,000,000 bytes, the limit is"),
    "link out": (link_out, 1, "record_seed0.jsonl is a link or no plain file"),
    "a pipe": (lambda folder: ((folder / LOG).unlink(), os.mkfifo(folder / LOG)), 1, "no plain"),
    "stray file": (lambda folder: (folder / "helper.py").touch(), 1, "helper.py is named neither"),
    "stray log": (lambda folder: shutil.copy(folder / LOG, folder / "seed9.jsonl"), 1, "seed9"),
    "a picture": (lambda folder: (folder / "loss.png").touch(), 0, "valid"),
    "compiled code": (lambda folder: (folder / "__pycache__").mkdir(), 1, "__pycache__ is named"),
    "terminal escapes": (rewrite(JSON, b"2026-11-01", b"\\\\u001b[2J"), 1, "'\\x1b[2J'"),
    "record.json no JSON": (rewrite(JSON, b"{", b"{{"), 1, "record.json: Expecting"),
    "record.json a list": (rewrite(JSON, rb"(?s)^.*$", b"[]"), 1, "is list, not an object"),
    "future date": (lambda folder: (rewrite(JSON, b"2026-11-01", b"2126-11-01")(folder),
                                    move("2126-11-01_Test")(folder)), 1, "is in the future"),
    "record.json deleted": (lambda folder: (folder / JSON).unlink(), 2, "there is no record.json"),
    "folder deleted": (lambda folder: move("x")(folder), 2, "no such folder"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_changed(name, tmp_path, capsys):
    mutate, expected, reason = CHANGED[name]
    folder = Forger(tmp_path).write()
    mutate(folder)
    here = next((path for path in folder.parent.glob("*_Test")), folder)
    code, text = verdict(here, capsys)
    assert (code, reason in text) == (expected, True), text
    assert "\x1b" not in text


def test_verify_tells_every_reason_and_the_worst_code(tmp_path, capsys):
    forger = Forger(tmp_path)
    forger.about["changed"] = record.TO_DO
    forger.line("probe", 1)["ok"] = False
    forger.line("end", 2)["wall_seconds"] = 100.0
    good = Forger(tmp_path, name="Good").write()
    code = record.main(["verify", str(good), str(forger.write()), str(tmp_path / "none")])
    out = capsys.readouterr().out
    assert code == 2 and out.count("  - ") == 4 and f"{good}: valid" in out, out
    outside = tmp_path / "elsewhere" / "2026-11-01_Test"
    shutil.copytree(forger.folder, outside)
    code, text = verdict(outside, capsys)
    assert code == 2 and "not lie in a folder that is named after a track" in text


def test_no_mutation_crashes_the_checker(tmp_path, capsys):
    """Any value anywhere may be of another type: a reason, never a traceback."""
    rng = random.Random(0)
    odd = [None, -1, 0, 2**70, 1e300, "x", "", [], {}, [None], {"a": 1}, True]
    for i in range(250):
        forger = Forger(tmp_path / str(i), losses=(1.3641, 1.3638), steps=3)
        value = rng.choice([forger.about, forger.plan, *forger.runs, *forger.logs.values()])
        while isinstance(value, (dict, list)) and value:
            parent, key = value, rng.choice(list(value if isinstance(value, dict)
                                                 else range(len(value))))
            value = parent[key]
        if key not in ("run_id", "kind"):
            parent[key] = rng.choice(odd)
        assert verdict(forger.write(), capsys)[0] in (0, 1)


def test_verify_is_quick(tmp_path):
    forger = Forger(tmp_path, [1.3641 + i / 1e5 for i in range(8)], steps=5000)
    begin = time.perf_counter()
    _, reasons = record.judge(forger.write())
    assert not reasons and time.perf_counter() - begin < 2


# ------------------------------------------------------------------------------------------------
# what the repository itself has


def test_track_is_the_corpus():
    manifest = ROOT / "data" / "manifest.json"
    if not manifest.exists():
        pytest.skip("no corpus yet")
    hashes = {name: entry["sha256"] for name, entry in json.loads(manifest.read_text()).items()}
    assert CPU["train_sha256"].items() <= hashes.items()
    assert hashes["sotu_val_000000.bin"] == CPU["val_sha256"]
    sys.path.insert(0, str(ROOT / "data"))
    import shards

    text = shards.read_shard(ROOT / "data" / "sotu_val_000000.bin")
    for size, predicted in CPU["val_tokens"].items():
        vocabulary = shards.Vocabulary(size)
        tokens = vocabulary.expand(text)[1:]
        assert (len(tokens), vocabulary.bytes[tokens].sum()) == (predicted, CPU["val_bytes"])


def test_presets_aim_at_the_target():
    train_gpt = pytest.importorskip("train_gpt")
    for name, track in record.TRACKS.items():
        assert train_gpt.PRESETS[name].target == track["target"]


@pytest.mark.parametrize("name", evidence.CODE)
def test_the_trunk_keeps_the_rule_on_compile_settings(name):
    if not (ROOT / name).exists():
        pytest.skip(f"no {name} yet")
    assert evidence.banned((ROOT / name).read_bytes(), {"harness", "muon", "shards"}) == []


@pytest.mark.parametrize("folder", [path for track in record.TRACKS for path in
                                    record.records_of(track)], ids=lambda path: path.name)
def test_stored_records_are_valid(folder):
    assert record.judge(folder)[1] == []


def test_tables_are_current():
    for path, text in record.tables().items():
        assert path.read_text() == text, "python records/record.py table"


# ------------------------------------------------------------------------------------------------
# run, with a stand-in for the launcher and the training script

TRAIN = '''
import argparse, hashlib, json, os, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
for flag in ("preset", "run_id", "log_dir"):
    parser.add_argument("--" + flag)
parser.add_argument("--seed", type=int)
args = parser.parse_args()
here, root = Path(__file__).parent, Path(__file__).parents[3]
plan = json.loads((root / "behaviour.json").read_text()).get(args.run_id, "ok")
if plan == "refuse":
    sys.exit(2)
lines = (root / "template.jsonl").read_text().replace("RUN_ID", args.run_id).splitlines()
entries = [json.loads(line) for line in lines]
header, shift = entries[0], (args.seed + 10 * ("baseline" in args.run_id)) / 1e5
header.update(seed=args.seed, time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
header["settings"]["seed"] = args.seed
header["code"] = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in here.glob("*.py")}
with open(Path(args.log_dir) / (args.run_id + ".jsonl"), "x") as log:
    for entry in entries:
        if entry["kind"] == "step" and entry["step"] and plan == "hang":
            print("hanging", flush=True)
            time.sleep(60)
        if "loss" in entry:
            entry["loss"] -= shift
        if "bits_per_byte" in entry:
            entry["bits_per_byte"] = entry["loss"] * entry["tokens"] / entry["bytes"] / LN2
        if entry["kind"] == "end":
            entry["train_seconds"] *= 1 + shift
            if plan in ("crash", "failed"):
                entry.update(status="failed", reason="NaN at step 3")
            if plan == "crash":
                sys.exit(1)
        log.write(json.dumps(entry) + "\\n")
        log.flush()
sys.exit(plan == "failed")
'''.replace("LN2", repr(math.log(2)))


@pytest.fixture
def tree(tmp_path):
    """A repository with the tool, a quick stand-in for training, and a folder for its whims."""
    (tmp_path / "records").mkdir()
    for name in ("record.py", "evidence.py"):
        shutil.copy(ROOT / "records" / name, tmp_path / "records")
    (tmp_path / "data").mkdir()
    for name in evidence.CODE:
        (tmp_path / name).write_text("")
    (tmp_path / "train_gpt.py").write_text(TRAIN)
    forger = Forger(tmp_path / "made", losses=(1.3641,), seconds=0.06)
    forger.everywhere(lambda e: e["kind"] == "off_clock" and e.update(seconds=0.01))
    forger.line("end")["wall_seconds"] = 0.1
    text = "".join(json.dumps(entry) + "\n" for entry in forger.logs["record_seed0"])
    (tmp_path / "template.jsonl").write_text(text.replace("record_seed0", "RUN_ID"))
    (tmp_path / "behaviour.json").write_text("{}")
    return tmp_path


FILLED = ["--authors", "A. Person", "--changed", "Nothing, it is a test."]


def attempt(tree: Path, *args, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "records/record.py", "run", *args, "--track", "cpu"]
    return subprocess.run([*command, "--", sys.executable], cwd=tree, text=True, timeout=60,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def behave(tree: Path, **plans) -> None:
    (tree / "behaviour.json").write_text(json.dumps(plans))


def started(tree: Path) -> list[str]:
    (ledger,) = (tree / "records").glob("cpu/*_Try/runs.jsonl")
    return [entry["run_id"] for entry in map(json.loads, ledger.read_text().splitlines())
            if entry["kind"] == "start"]


def test_run_from_first_to_last(tree):
    done = attempt(tree, "Base", "--runs", "3", *FILLED)
    assert done.returncode == 0, done.stdout
    base = next((tree / "records" / "cpu").iterdir())
    done = attempt(tree, "Try", "--runs", "4", "--against", str(base), "--pairs", "2", *FILLED)
    assert done.returncode == 0 and "valid" in done.stdout, done.stdout
    assert started(tree) == ["record_seed0", "baseline_seed0", "baseline_seed1", "record_seed1",
                             "record_seed2", "record_seed3"]
    assert "in 2 interleaved pairs" in done.stdout and "+0 -0 against Base" in done.stdout
    done = attempt(tree, "Try")
    assert done.returncode == 0 and "run 1" not in done.stdout  # nothing left: only verified
    assert attempt(tree, "Try", "--runs", "9").stdout.strip().endswith("fixed when it began")


def test_placeholders_are_told(tree):
    done = attempt(tree, "Try", "--runs", "3")
    assert done.returncode == 1
    assert done.stdout.count("  - ") == done.stdout.count(record.TO_DO) == 2, done.stdout


def test_interrupted_runs_go_on(tree):
    behave(tree, record_seed1="hang", record_seed2="refuse")
    command = [sys.executable, "records/record.py", "run", "Try", "--runs", "3", "--track", "cpu"]
    process = subprocess.Popen([*command, *FILLED, "--", sys.executable], cwd=tree, text=True,
                               stdout=subprocess.PIPE)
    for line in process.stdout:
        if line == "hanging\n":
            second = attempt(tree, "Try")
            assert second.returncode == 2 and "another run goes on" in second.stdout
            process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    done = attempt(tree, "Try")  # seed 2 is refused before it writes a log
    assert done.returncode == 1 and "record_seed2 interrupted, exit code 2" in done.stdout
    behave(tree)
    done = attempt(tree, "Try")
    assert done.returncode == 0, done.stdout
    assert "interrupted: record_seed1" in done.stdout
    assert started(tree) == ["record_seed0", "record_seed1", "record_seed1_again", "record_seed2",
                             "record_seed2_again"]


def test_killed_without_a_word_goes_on(tree):
    behave(tree, record_seed1="hang")
    command = [sys.executable, "records/record.py", "run", "Try", "--runs", "2", "--track", "cpu"]
    process = subprocess.Popen([*command, *FILLED, "--", sys.executable], cwd=tree, text=True,
                               stdout=subprocess.PIPE, start_new_session=True)
    for line in process.stdout:
        if line == "hanging\n":
            os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    behave(tree)
    done = attempt(tree, "Try")
    assert done.returncode == 0 and "interrupted: record_seed1" in done.stdout, done.stdout


@pytest.mark.parametrize("how", ["failed", "crash"])
def test_failed_run_ends_the_attempt(tree, how):
    behave(tree, record_seed1=how)
    done = attempt(tree, "Try", "--runs", "3", *FILLED)
    assert done.returncode == 1 and "record_seed1 failed, exit code 1" in done.stdout
    done = attempt(tree, "Try")
    assert done.returncode == 1 and "this attempt is over" in done.stdout
    assert "record seed 1 failed: a failed run counts" in done.stdout
    assert started(tree) == ["record_seed0", "record_seed1"]


def test_run_refuses(tree):
    done = subprocess.run([sys.executable, "records/record.py", "run", "Try"], cwd=tree, text=True,
                          stderr=subprocess.PIPE)
    assert done.returncode == 2 and "use ./run.sh record NAME" in done.stderr
    for args, reason in ((["../x"], "letters, digits"), (["Try", "--runs", "1"], "1 runs and 0"),
                         (["Try", "--against", "none"], "no such folder in records/cpu/")):
        done = attempt(tree, *args)
        assert done.returncode == 2 and reason in done.stdout, done.stdout
    done = attempt(tree, "Try", env={**os.environ, "TORCHINDUCTOR_FREEZING": "1"})
    assert done.returncode == 2 and "TORCHINDUCTOR_FREEZING is set" in done.stdout
    assert not list((tree / "records").glob("cpu/*"))
    attempt(tree, "Try", "--runs", "2")
    shutil.rmtree(next(tree.glob("records/cpu/*_Try")))
    behave(tree, record_seed1="refuse")
    attempt(tree, "Try", "--runs", "2")
    (next(tree.glob("records/cpu/*_Try")) / "muon.py").write_text("# changed\n")
    done = attempt(tree, "Try")
    assert done.returncode == 2 and "is not the plan's: put it back" in done.stdout


# ------------------------------------------------------------------------------------------------
# table and plot


def test_table_and_plot(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(record, "ROOT", tmp_path)
    records = tmp_path / "records"
    records.mkdir()
    assert record.main(["plot"]) == 2 and "no valid record to draw" in capsys.readouterr().err
    marks = f"before\n{record.BEGIN}\nold\n{record.END}\nafter\n"
    for path in (tmp_path / "README.md", records / "README.md"):
        path.write_text(marks)
    assert record.main(["table"]) == 0
    assert (records / "README.md").read_text().count("No record yet.") == 2
    forger = Forger(records)
    forger.about["authors"] = ["A | <b>"]
    folder = forger.write()
    assert record.main(["table"]) == 0
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| 2026-11-01 | [Test](records/cpu/2026-11-01_Test/) | A &#124; &lt;b&gt; " in text
    assert "(cpu/2026-11-01_Test/)" in (records / "README.md").read_text()
    assert record.main(["plot", str(folder)]) == 0 and (folder / "loss.png").stat().st_size > 9999
    assert record.main(["plot"]) == 0 and (records / "history.png").exists()
    assert verdict(folder, capsys)[0] == 0  # the picture may lie there
    (folder / "muon.py").write_text("")
    assert record.main(["table"]) == 2 and record.main(["plot", str(folder)]) == 2
