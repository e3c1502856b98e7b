"""What happens when things go wrong: real runs on CPU ranks, each with one fault.

    python tests/faults.py            a table: fault, what was expected, what came, seconds
    python tests/faults.py NAME...    some of them

A fault is put in from outside, by this script starting train_gpt.py's main() with a function
replaced; the run's log then holds this script's hash among its code, so it can never be a record.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ranks import ROOT, launcher

if __name__ == "__main__":
    sys.path[:0] = [str(ROOT)]

SMALL = (
    "--preset cpu --vocab_size 257 --num_layers 2 --num_heads 2 --head_dim 16"
    " --value_embed_blocks 1 --bigram_rows 512 --train_steps 6 --batch_tokens 256 --seq_len 32"
    " --max_document 32 --short_window 32 --long_window 32 --val_seq_len 32 --val_windows 32,32"
    " --val_tokens 2000 --micro_batch_tokens 256 --val_every 2 --log_every 1 --sample_tokens 4"
    " --timeout 20"
).split()
STOPPED = "failed|interrupted"  # as the launcher or the lost connection comes first
LEFT = 5.0  # seconds after its end in which a run may still have processes


@dataclass(frozen=True)
class Fault:
    """`do` at `where`, on `rank`, in step 3; and what has to come of it."""

    do: str = ""  # raise, hang, full disk, nan loss, nan gradient, or a signal's name
    where: str = "train"  # start, warmup, train, validate, save
    rank: int = 1
    to: str = "rank"  # who gets the signal: that rank, or the launcher
    ranks: int = 2
    flags: tuple[str, ...] = ()
    limits: tuple[tuple[int, int], ...] = ()  # resource limits of the whole run
    says: str = ""  # pattern of the last line on stderr
    status: str | None = "failed"  # of the log's end, a pattern; None: it cannot have one
    within: float = 45.0  # seconds


def signals() -> dict[str, Fault]:
    """Every signal that asks a run to end, to the launcher, at every place."""
    made = {}
    for name, where in (("SIGTERM", "warmup"), ("SIGINT", "train"), ("SIGTERM", "validate"),
                        ("SIGHUP", "train"), ("SIGTERM", "save")):  # fmt: skip
        saves = ("--save_every", "2") if where == "save" else ()
        made[f"{name} in {where}"] = Fault(
            name, where, 0, to="launcher", flags=saves, says=f"interrupted: {name}",
            status="interrupted",
        )  # fmt: skip
    made["SIGTERM at start"] = Fault("SIGTERM", "start", says="interrupted: SIGTERM", status=None)
    return made


FAULTS = {
    "a rank is killed": Fault("SIGKILL", says="rank 1 was killed by SIGKILL", status=STOPPED),
    "the first rank is killed": Fault("SIGKILL", rank=0, says="rank 0 was killed", status=None),
    "a rank is killed in warm-up": Fault(
        "SIGKILL", "warmup", says="rank 1 was killed by SIGKILL", status=STOPPED),
    "a rank is killed while saving": Fault(
        "SIGKILL", "save", 0, flags=("--save_every", "2"), says="rank 0 was killed", status=None),
    "the launcher is killed": Fault("SIGKILL", to="launcher", says="", status="interrupted"),
    **signals(),
    "SIGTERM to one process": Fault(
        "SIGTERM", rank=0, ranks=1, says="interrupted: SIGTERM at step 3", status="interrupted"),
    "SIGTERM to a run that saves": Fault(
        "SIGTERM", rank=0, ranks=1, flags=("--save_every", "100"),
        says="interrupted: SIGTERM at step 3", status="interrupted"),
    "a rank hangs": Fault(
        "hang", flags=("--timeout", "4"), says="imed out .*rank 1 is at step 3"),
    "an exception on one rank": Fault("raise", says="rank 1: failed: RuntimeError at step 3: boom"),
    "an exception in warm-up": Fault("raise", "warmup", says="RuntimeError at step 0: boom"),
    "an exception in validation": Fault("raise", "validate", 0, says="rank 0: failed: .*boom"),
    "NaN in one rank's loss": Fault("nan loss", says="FloatingPointError at step 3"),
    "NaN in a gradient": Fault("nan gradient", rank=0, says="gradient of parameter .*not finite"),
    "no room for the log": Fault(
        "full disk", "validate", 0, says="the log cannot be written: No space", status=None),
    "no room for the code": Fault(
        ranks=1, limits=((resource.RLIMIT_FSIZE, 4000),), says="File too large"),
    "no room for a checkpoint": Fault(
        ranks=1, flags=("--save_every", "3"), limits=((resource.RLIMIT_FSIZE, 200_000),),
        says="step_000003.pt cannot be written, is the disk full"),
    "a log folder that is a file": Fault(
        ranks=1, flags=("--log_dir", "README.md"), says="--log_dir .*README.md", status=None),
    "no memory": Fault(
        ranks=1, limits=((resource.RLIMIT_AS, 4 * 2**30),),
        flags=("--batch_tokens", str(2**22), "--micro_batch_tokens", str(2**22), "--epochs", "99",
               "--head_rows", str(2**22)),
        says="--micro_batch_tokens"),
    "a run id that is taken": Fault(
        ranks=1, flags=("--run_id", "taken"), says="taken.jsonl exists", status=None),
}  # fmt: skip


@dataclass
class Outcome:
    code: int
    last: str  # line on stderr
    log: list[dict]
    left: list[str]  # processes that were still there
    seconds: float
    folder: Path


def processes(mark: str) -> list[str]:
    """Commands of the living processes whose environment has the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it ended meanwhile
            continue
    return [command for command in found if command]  # a zombie has none


def run(fault: Fault, folder: Path) -> Outcome:
    """Train with the fault; a run that does not end in time is killed, with exit code -9."""
    mark, log_dir = f"FAULT={folder.name}-{time.time_ns()}", folder / "logs"
    log_dir.mkdir(parents=True, exist_ok=True)
    (log_dir / "taken.jsonl").write_text("precious\n")
    plan = f"{fault.do},{fault.where},{fault.rank},{fault.to}"
    flags = [*SMALL, "--log_dir", str(log_dir), "--run_id", "run", *fault.flags]
    command = [*launcher(fault.ranks), __file__, "--drive", plan]
    start = time.perf_counter()

    def limit() -> None:
        for what, size in fault.limits:
            resource.setrlimit(what, (size, size))

    process = subprocess.Popen(
        [*command, *flags],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **dict([mark.split("=")])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit,  # noqa: PLW1509
        start_new_session=True,
    )
    try:
        if fault.where == "start":
            time.sleep(1.5)
            process.send_signal(getattr(signal, fault.do))
        _, said = process.communicate(timeout=fault.within)
    except subprocess.TimeoutExpired:
        process.kill()
        _, said = process.communicate()
    seconds, deadline = time.perf_counter() - start, time.perf_counter() + LEFT
    while (left := processes(mark)) and time.perf_counter() < deadline:
        time.sleep(0.1)
    path = log_dir / "run.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    log = [json.loads(line) for line in lines if line.endswith("}")]
    last = ([""] + said.strip().splitlines())[-1]
    return Outcome(process.returncode, last, log, left, seconds, log_dir)


def faulty(fault: Fault, outcome: Outcome) -> list[str]:
    """What is not as it has to be."""
    ends = [line["status"] for line in outcome.log if line["kind"] == "end"]
    checks = {
        "exit code 0": outcome.code == 0,
        "had to be killed": outcome.code == -9 and fault.to != "launcher",
        f"said {outcome.last!r}": not re.search(fault.says, outcome.last),
        f"the log ended as {ends}": not re.fullmatch(fault.status or ".*", " ".join(ends)),
        "the log says ok": "ok" in ends,
        f"left {outcome.left}": bool(outcome.left),
        "took too long": outcome.seconds > fault.within,
        "another run's log was touched": (outcome.folder / "taken.jsonl").read_text()
        != "precious\n",
    }
    return [what for what, bad in checks.items() if bad]


def drive(plan: str, flags: list[str]) -> int:
    """Be train_gpt.py with a fault in it."""
    do, where, rank, to = plan.split(",")
    import harness
    import train_gpt as t

    here, done = int(os.environ.get("RANK", 0)) == int(rank), []

    def act(target) -> None:
        done.append(do)
        if do == "raise":
            raise RuntimeError("boom")
        if do == "hang":
            time.sleep(600)
        if do.startswith("SIG"):
            os.kill(os.getppid() if to == "launcher" else os.getpid(), getattr(signal, do))
            time.sleep(2)  # before anything else happens
        if do == "full disk":
            target.file = open("/dev/full", "w")
        if do == "nan loss":
            target.lm_head.data[0, 0] = float("nan")
        if do == "nan gradient":
            target.blocks[0].mlp.fc.register_hook(lambda grad: grad * float("nan"))

    places = {
        "train": (t, "train_step"),
        "warmup": (t, "warm_up"),
        "validate": (t, "validate"),
        "save": (harness, "save_checkpoint"),
    }
    if here and do and where in places:
        module, name = places[where]
        original = getattr(module, name)

        def wrapped(*args):
            if not done and (where != "train" or args[3] == 3):
                act(args[0])
            return original(*args)

        setattr(module, name, wrapped)
    return t.main(flags)


def table(names: list[str]) -> int:
    print(f"{'fault':32} {'as expected':12} {'s':>5}  what it said last")
    wrong = 0
    for name in names or FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run(FAULTS[name], Path(folder))
            bad = faulty(FAULTS[name], outcome)
        wrong += bool(bad)
        print(f"{name:32} {'NO' if bad else 'yes':12} {outcome.seconds:5.1f}  {outcome.last[:150]}")
        for what in bad:
            print(f"{'':32} {what}")
    return int(wrong > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--drive"]:
        sys.exit(drive(sys.argv[2], sys.argv[3:]))
    sys.exit(table(sys.argv[1:]))
