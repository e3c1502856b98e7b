"""Records: make one, check one, list them, draw them.

    ./run.sh record NAME --runs 8            an attempt: eight seeds of the code as it stands
    python records/record.py verify DIR...   exit 0 valid, 1 invalid with every reason, 2 not judged
    python records/record.py table           write the tables of both READMEs from the logs
    python records/record.py plot [DIR]      a record's curves, or the history of every track

A record is a folder: record.json (what only a person can say), runs.jsonl (the ledger: the plan,
then a line when a run starts and one when it ends, each with the sha256 of the line before), the
code, and one log a run. Every number is computed from the logs; evidence.py reads them, and
nothing that a record holds is executed by verify, table or plot. Only plot needs a library.
"""

import argparse
import difflib
import html
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import NormalDist, fmean, stdev

import evidence
from evidence import FOLDER, LOG, NUMBER_LIMIT, TO_DO, TRACKS, Record, is_a, sha256

ROOT = Path(__file__).resolve().parent.parent
ALPHA = 0.01
BEGIN, END = "<!-- records:begin -->", "<!-- records:end -->"


class CannotJudge(Exception):
    """There is nothing that could be called valid or invalid: exit code 2."""


# ------------------------------------------------------------------------------------------------
# statistics


def incomplete_beta(x: float, a: float, b: float) -> float:
    """Regularized I_x(a, b) by Lentz's evaluation of its continued fraction (DLMF 8.17.22)."""
    if x > (a + 1) / (a + b + 2):  # here it converges slowly, and its mirror fast
        return 1 - incomplete_beta(1 - x, b, a)
    if x <= 0:
        return 0.0
    value, c, d = 1.0, 1.0, 0.0
    for i in range(10_000):
        m = i // 2
        term = -(a + m) * (a + b + m) if i % 2 else m * (b - m)
        term = term * x / ((a + i - 1) * (a + i)) if i else 1.0
        d, c = 1 / (1 + term * d), 1 + term / c
        value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(scale + a * math.log(x) + b * math.log1p(-x)) / a * (value - 1)


def t_tail(t: float, df: float) -> float:
    """P(T > t) of Student's t."""
    half = incomplete_beta(df / (df + t * t), df / 2, 0.5) / 2
    return half if t > 0 else 1 - half


def spread(values: list) -> tuple[float, float]:
    """Mean and sample deviation. Raises ValueError for what is no sample."""
    if not all(is_a(value, float) and math.isfinite(value) for value in values):
        raise ValueError(f"{values} are not all finite numbers")
    if len(values) < 2:
        raise ValueError(f"n = {len(values)}: a test needs two runs or more")
    if len(set(values)) == 1:
        raise ValueError(f"all {len(values)} values are {values[0]}: s = 0 is not chance")
    return fmean(values), stdev(values)


def t_test(values: list, target: float) -> float:
    """p of the one-sided one-sample t-test that the mean lies below the target."""
    mean, deviation = spread(values)
    return t_tail((target - mean) / (deviation / math.sqrt(len(values))), len(values) - 1)


def welch_test(fast: list, slow: list) -> float:
    """p of Welch's one-sided test that the mean of `fast` lies below that of `slow`."""
    (mean_a, dev_a), (mean_b, dev_b) = spread(fast), spread(slow)
    a, b = dev_a**2 / len(fast), dev_b**2 / len(slow)
    df = (a + b) ** 2 / (a**2 / (len(fast) - 1) + b**2 / (len(slow) - 1))
    return t_tail((mean_b - mean_a) / math.sqrt(a + b), df)


def power(effect: float, n: int) -> float:
    """About the chance that n runs reach p < ALPHA, with the mean `effect` deviations below the
    target: normal, less the z^2/2 runs that not knowing the deviation costs."""
    z = NormalDist().inv_cdf(1 - ALPHA)
    return NormalDist().cdf(effect * math.sqrt(max(0.0, n - z * z / 2)) - z)


def runs_needed(effect: float) -> int:
    """About how many runs give 80 % power; the inverse of `power`."""
    z = NormalDist().inv_cdf(1 - ALPHA)
    return math.ceil(((z + NormalDist().inv_cdf(0.8)) / effect) ** 2 + z * z / 2)


# ------------------------------------------------------------------------------------------------
# verify


def results(record: Record, arm: str = "record") -> list:
    """The last validation of each run, in the track's metric."""
    return [run.log["val"][-1][record.track["metric"]] for run in record.arm(arm)]


def seconds(record: Record, arm: str = "record", seeds: int = NUMBER_LIMIT) -> list:
    """Training seconds of each run, or of those with the first seeds."""
    end = record.plan["first_seed"] + seeds
    return [run.log["end"][0]["train_seconds"] for run in record.arm(arm)
            if run.start["seed"] < end]


def check_claim(record: Record):
    """What the record is for: a mean below the target, beyond chance."""
    values, target = results(record), record.track["target"]
    if len(values) < record.plan["runs"]:
        return  # a run is missing or not usable, which was said
    mean, deviation = spread(values)
    yield any(len(value.digits.rstrip("0")) >= 6 for value in values), \
        "its results are rounded, with zeros appended"
    if record.about.get("role") == "baseline":
        defined = math.ceil(round(mean * 1000, 6)) / 1000  # rounded: 1385.0000000000002 is 1385
        yield defined == target, f"as baseline it defines the target {defined}, not {target}"
    else:
        p, effect = t_test(values, target), (target - mean) / deviation
        more = f"; about {runs_needed(effect)} runs for 80 % power" if effect > 0 else ""
        yield p < ALPHA, f"p = {p:.6f} is not below {ALPHA}: mean {mean:.6f}, target {target}{more}"
    for arm in ("record", "baseline") if record.plan["pairs"] else ():
        spread(seconds(record, arm, record.plan["pairs"]))  # slower is no fault, equal times are


def judge(folder: Path) -> tuple[Record, list[str]]:
    """The record, and every reason why it is not valid. Raises CannotJudge."""
    record, reasons = Record(Path(os.path.abspath(folder))), []

    def apply(label: str, check, *args) -> None:
        try:
            reasons.extend(f"{label}: {why}" for holds, why in check(record, *args) if not holds)
        except (ValueError, RecursionError) as error:
            reasons.append(f"{label}: {error}")

    try:
        if not os.path.lexists(record.folder / "record.json"):
            raise CannotJudge(f"{folder}: there is no record.json in it, or no such folder")
        if record.folder.parent.name not in TRACKS:
            raise CannotJudge(f"{folder} does not lie in a folder that is named after a track")
        apply("record.json", evidence.check_about)
        apply("runs.jsonl", evidence.check_ledger)
        if record.about and record.plan:
            apply("code", evidence.check_code)
            apply("files", evidence.check_files)
            for run in record.runs:
                apply(f"{run.start['run_id']}.jsonl", evidence.check_log, run)
            apply("runs", evidence.check_runs)
            apply("claim", check_claim)
    except OSError as error:
        raise CannotJudge(f"{folder}: {error.strerror}") from None
    return record, reasons


def records_of(track: str) -> list[Path]:
    """The track's folders, oldest first."""
    return sorted(path for path in (ROOT / "records" / track).glob("*_*")
                  if re.fullmatch(FOLDER, path.name))


def lines_changed(record: Record) -> str:
    """'+12 -3 against Name': the baseline's code, else that of the record before; or nothing."""
    own, marks = record.folder, []
    earlier = [path.name for path in own.parent.glob("*_*")
               if path.name < own.name and re.fullmatch(FOLDER, path.name)]
    before = record.plan.get("against") or max(earlier, default="")
    for name in record.plan["code"]["record"] if before else ():
        old, new = (evidence.read(path).decode(errors="replace").splitlines()
                    if path.exists() else [] for path in (own.parent / before / name, own / name))
        marks += [line[0] for line in list(difflib.unified_diff(old, new, n=0))[2:]]
    return f"+{marks.count('+')} -{marks.count('-')} against {before[11:]}" if before else ""


def summary(record: Record) -> dict:
    """What a valid record says, in numbers."""
    values, last = results(record), record.arm("record")[0].log["val"][-1]
    (mean, deviation), target = spread(values), record.track["target"]
    pairs, first = record.plan["pairs"], record.arm("record")[0].log["header"][0]
    fast, slow = seconds(record, "record", pairs), seconds(record, "baseline", pairs)
    return {
        "n": len(values), "mean": mean, "deviation": deviation, "p": t_test(values, target),
        "margin": target - mean, "effect": (target - mean) / deviation,
        "seconds": fmean(seconds(record)), "steps": last["step"], "tokens": last["train_tokens"],
        "machine": f"{first['world_size']} x {first['device']}", "lines": lines_changed(record),
        "pairs": pairs, "ratio": fmean(slow) / fmean(fast) if pairs else None,
        "time_p": welch_test(fast, slow) if pairs else None,
    }


def report(record: Record) -> str:
    """The lines that verify prints of a valid record."""
    s, track = summary(record), record.track
    chance = "defines the target" if record.about.get("role") == "baseline" else \
        f"power {power(s['effect'], s['n']):.2f}, about {runs_needed(s['effect'])} runs for 80 %"
    cut = [run.start["run_id"] for run in record.runs if run.status == "interrupted"]
    lines = [
        f"{track['unit']}: mean {s['mean']:.6f}, sd {s['deviation']:.6f}, n = {s['n']}, "
        f"target {track['target']}, margin {s['margin']:.6f}, p = {s['p']:.3g}; {chance}",
        f"training: {s['seconds']:.2f} s a run, {s['steps']:,} steps, {s['tokens']:,} tokens, "
        f"{s['machine']}",
        f"lines changed: {s['lines'] or 'no record before it'}",
        f"confirmed by: {', '.join(record.about.get('confirmed_by', [])) or 'nobody yet'}",
    ]
    if s["pairs"]:
        claim = "faster" if s["time_p"] < ALPHA else "no time claim"
        lines.insert(2, f"time: {s['ratio']:.3f} times {record.plan['against']}'s speed in "
                     f"{s['pairs']} interleaved pairs, p = {s['time_p']:.3g} (Welch): {claim}")
    return "\n".join("  " + line for line in lines + [f"interrupted: {run}" for run in cut])


def verify(folders: list[Path]) -> int:
    """Print the verdict on every folder; the worst exit code."""
    worst = 0
    for folder in folders:
        try:
            record, reasons = judge(folder)
            code, text = (1, "invalid") if reasons else (0, "valid\n" + report(record))
            text = "\n  - ".join([f"{folder}: {text}", *(reason[:400] for reason in reasons)])
        except CannotJudge as error:
            code, text = 2, f"cannot judge {error}"
        # strangers' bytes reach the terminal here, and only here
        print("".join(c if c.isprintable() or c == "\n" else "?" for c in text), flush=True)
        worst = max(worst, code)
    return worst


# ------------------------------------------------------------------------------------------------
# run


def stamp(time: float | None = None) -> str:
    moment = datetime.now(UTC) if time is None else datetime.fromtimestamp(time, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


def append(folder: Path, kind: str, time: str | None = None, **fields) -> None:
    """One more line of the ledger, on the disk before anything else happens."""
    path = folder / "runs.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    entry = {"kind": kind, "previous": sha256(lines[-1]) if lines else "0" * 64,
             "time": time or stamp(), **fields}
    with open(path, "ab") as file:
        file.write(json.dumps(entry).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def close(folder: Path, run_id: str, exit_code: int | None) -> str:
    """Write how a run ended, by its log; exit_code is None where it was stopped or not seen."""
    path, log, digest = folder / f"{run_id}.jsonl", evidence.by_kind([]), None
    try:
        if path.exists():
            digest = sha256(path.read_bytes())
            log = evidence.by_kind(evidence.parse_lines(path.read_bytes(), LOG, whole=False))
        status = "interrupted" if evidence.is_cut(log) else "failed"
    except ValueError:
        status = "failed"
    if exit_code in (0, None) and [end["status"] for end in log["end"]] == ["ok"]:
        status = "ok"
    elif exit_code is not None and log["step"] and not log["end"]:
        status = "failed"  # it died by itself
    time = stamp(path.stat().st_mtime) if status == "ok" and exit_code is None else None
    append(folder, "end", time, run_id=run_id, status=status, log_sha256=digest)
    return status


def watch(command: list, lock: int) -> int | None:
    """Run a command to its end; its exit code, or None where we were asked to stop it."""
    # no compiled code is left beside the record's; the child holds the lock as long as it lives
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=[lock],
                               env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def code_of(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path.read_bytes()) for path in sorted(folder.glob("*.py"))}


def prepare(args, track: str) -> Path:
    """The attempt's folder: the one begun under this name, or a new one with code and plan."""
    begun = [path for path in records_of(track) if path.name[11:] == args.name]
    if begun:
        return begun[-1]
    against = {"against": Path(args.against).name} if args.against else {}
    if not {*against.values()} <= {path.name for path in records_of(track)}:
        raise ValueError(f"--against {args.against}: no such folder in records/{track}/")
    runs = 8 if args.runs is None else args.runs
    pairs = 0 if not against else runs if args.pairs is None else args.pairs
    if not 2 <= runs <= 1000 or (against and not 2 <= pairs <= runs):
        raise ValueError(f"{runs} runs and {pairs} pairs: two or more, and a run for each pair")
    folder = ROOT / "records" / track / f"{stamp()[:10]}_{args.name}"
    code = sorted(args.code.glob("*.py")) if args.code else [ROOT / name for name in evidence.CODE]
    if "train_gpt.py" not in [path.name for path in code]:
        raise ValueError(f"--code {args.code}: there is no train_gpt.py in it")
    folder.mkdir(parents=True)
    for path in code:
        shutil.copyfile(path, folder / path.name)
    about = {"name": args.name, "authors": args.authors or [TO_DO], "date": folder.name[:10],
             "track": track, "changed": args.changed or TO_DO, **against}
    about |= {"role": args.role} if args.role else {}
    (folder / "record.json").write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n",
                                        encoding="utf-8")
    planned = {"record": code_of(folder)}
    planned |= {"baseline": code_of(folder.parent / against["against"])} if against else {}
    append(folder, "plan", name=args.name, track=track, runs=runs, first_seed=args.first_seed,
           pairs=pairs, code=planned, **against)
    return folder


def run(args) -> int:
    """Make an attempt, or go on with the one that was begun under this name."""
    import fcntl  # not on Windows, where verify works all the same

    if not args.launch:
        raise ValueError("nothing to launch with after --: use ./run.sh record NAME --runs 8")
    if not re.fullmatch(FOLDER, f"2026-01-01_{args.name}"):
        raise ValueError(f"NAME {args.name!r}: letters, digits, - and _, at most 64")
    if found := [name for name in os.environ if re.fullmatch(evidence.COMPILER_VARIABLE, name)]:
        raise ValueError(f"{found[0]} is set, but a record has no extra compile settings: unset it")
    track = args.track or ("gpu" if shutil.which("nvidia-smi") else "cpu")
    folder = prepare(args, track)
    lock = os.open(folder / "runs.jsonl", os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"{folder.name}: another run goes on in this folder") from None
    plan, runs = evidence.read_ledger(folder)
    for key in ("runs", "pairs"):
        if getattr(args, key) not in (None, plan[key]):
            raise ValueError(f"--{key} {getattr(args, key)}: the plan of {folder.name} has "
                             f"{plan[key]}, fixed when it began")
    if runs and not runs[-1].end:  # nobody saw how it ended
        close(folder, runs[-1].start["run_id"], None)
        plan, runs = evidence.read_ledger(folder)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    slots, _ = evidence.attempts(plan, runs)
    for i, ((arm, seed), tries) in enumerate(slots, 1):
        statuses = [one.status for one in tries]
        if statuses[-1:] == ["ok"]:
            continue
        if statuses[-1:] == ["failed"] or len(statuses) > 1:
            print(f"record.py: {arm} seed {seed} {' and '.join(statuses)}: this attempt is over")
            break
        source = folder if arm == "record" else folder.parent / plan["against"]
        if code_of(source) != plan["code"][arm]:
            raise ValueError(f"the code in {source.name} is not the plan's: put it back as it was")
        run_id = f"{arm}_seed{seed}" + "_again" * len(statuses)
        print(f"record.py: run {i} of {len(slots)}: {run_id} in {folder.name}", flush=True)
        append(folder, "start", run_id=run_id, arm=arm, seed=seed)
        command = [*args.launch, str(source.relative_to(ROOT) / "train_gpt.py"), "--preset", track,
                   "--seed", str(seed), "--run_id", run_id, "--log_dir",
                   str(folder.relative_to(ROOT))]
        status = close(folder, run_id, exit_code := watch(command, lock))
        shutil.rmtree(folder / "code", ignore_errors=True)  # a script's own copy: it is in the plan
        if status != "ok":
            print(f"record.py: {run_id} {status}, exit code {exit_code}; "
                  + ("the same command goes on from here" if status == "interrupted" else
                     "a failed run counts: this attempt is over"))
            return 1
    return verify([folder])


# ------------------------------------------------------------------------------------------------
# table and plot


def rows(track: str, prefix: str) -> list[str]:
    """The track's table in Markdown. Raises ValueError for a record that is not valid."""
    what, lines = TRACKS[track], []
    for folder in records_of(track):
        record, reasons = judge(folder)
        if reasons:
            raise ValueError(f"{folder.name} is not valid: {reasons[0]}")
        s = summary(record)
        who = html.escape(", ".join(record.about["authors"])).replace("|", "&#124;")
        faster = f"{s['ratio']:.2f} (p = {s['time_p']:.1g})" if s["pairs"] else ""
        chance = "defines the target" if record.about.get("role") == "baseline" \
            else f"p = {s['p']:.1g}"
        lines.append(
            f"| {folder.name[:10]} | [{folder.name[11:]}]({prefix}{track}/{folder.name}/) | {who} "
            f"| {s['mean']:.4f} (sd {s['deviation']:.4f}, n = {s['n']}, {chance}) "
            f"| {s['seconds']:.1f} | {faster} | {s['steps']:,} | {s['tokens']:,} | {s['lines']} |")
    return [f"**{track}**: {what['target']} {what['unit']} or less", "", *([
        f"| date | record | by | {what['unit']} | training, s | times as fast | steps | tokens "
        "| lines |", "|" + "---|" * 9, *lines] if lines else ["No record yet."]), ""]


def tables() -> dict[Path, str]:
    """The text that each README with the two markers ought to have."""
    texts = {}
    for path, prefix in ((ROOT / "README.md", "records/"), (ROOT / "records" / "README.md", "")):
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if BEGIN in text and END in text:
            head, tail = text.split(BEGIN)[0], text.split(END)[1]
            middle = "\n".join(line for track in TRACKS for line in rows(track, prefix))
            texts[path] = f"{head}{BEGIN}\n{middle}{END}{tail}"
    return texts


def table() -> int:
    for path, text in tables().items():
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} is current")
    return 0


def draw_arm(axes, record: Record, arm: str, name: str, color: str) -> None:
    """Training losses in the track's metric, each run thin and their mean thick; validations as
    dots. The runs of an arm have the same steps."""
    metric, logs = record.track["metric"], [run.log for run in record.arm(arm)]
    vals, label = [val for log in logs for val in log["val"]], f"{name}, n = {len(logs)}"
    for ax, x, val_x in ((axes[0], "train_seconds", "train_seconds"),
                         (axes[1], "tokens", "train_tokens")):
        xs = [[entry[x] for entry in log["step"]] for log in logs]
        # nats per token, or those in the bits per byte that the run's last validation had for one
        ys = [[entry["loss"] * log["val"][-1][metric] / log["val"][-1]["loss"]
               for entry in log["step"]] for log in logs]
        for one in zip(xs, ys, strict=True):
            ax.plot(*one, color=color, linewidth=0.4, alpha=0.3)
        ax.plot([*map(fmean, zip(*xs, strict=True))], [*map(fmean, zip(*ys, strict=True))],
                color=color, linewidth=1)
        ax.plot([val[val_x] for val in vals], [val[metric] for val in vals], "o", color=color,
                markersize=4, label=label if ax is axes[0] else None)


def plot(folder: Path | None, out: Path | None) -> int:
    """Draw a record's runs beside its baseline's, or without a folder each track's history."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if folder:
        record, reasons = judge(folder)
        if reasons:
            raise ValueError(f"{folder} is not valid: {reasons[0]}")
        track, out = record.track, out or record.folder / "loss.png"
        figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
        draw_arm(axes, record, "record", record.about["name"], "tab:blue")
        if record.plan["pairs"]:
            draw_arm(axes, record, "baseline", record.plan["against"][11:], "tab:orange")
        for ax, what in zip(axes, ("training seconds", "training tokens"), strict=True):
            ax.axhline(track["target"], color="black", linestyle="--", linewidth=1,
                       label=f"target {track['target']}" if ax is axes[0] else None)
            # from a little below the target; the first, steep part is left out
            ax.set(xlabel=what, ylabel=track["unit"], xlim=(0, None),
                   ylim=(0.96 * track["target"], 1.6 * track["target"]))
        figure.legend(loc="outside lower center", ncols=3)
    else:
        valid = {track: [record for record, reasons in map(judge, records_of(track)) if not reasons]
                 for track in TRACKS}
        out, drawn = out or ROOT / "records/history.png", [name for name in TRACKS if valid[name]]
        if not drawn:
            raise ValueError("there is no valid record to draw")
        figure, axes = pyplot.subplots(1, len(drawn), figsize=(5.5 * len(drawn), 4.5),
                                       layout="constrained", squeeze=False)
        for ax, track in zip(axes[0], drawn, strict=True):
            ax.plot([record.folder.name.replace("_", "\n", 1) for record in valid[track]],
                    [fmean(seconds(record)) for record in valid[track]], "o-")
            ax.set(title=f"{track}: {TRACKS[track]['target']} {TRACKS[track]['unit']}",
                   ylabel="training seconds of a run", ylim=(0, None))
    figure.savefig(out, dpi=120)
    print(f"wrote {out}")
    return 0


def main(argv: list[str]) -> int:
    argv, launch = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv \
        else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("run", help="make an attempt, or go on with it")
    make.add_argument("name")
    make.add_argument("--runs", type=int, help="seeds, fixed from now on (8)")
    make.add_argument("--track", choices=TRACKS, help="gpu where there is an NVIDIA driver, or cpu")
    make.add_argument("--against", help="a record to interleave with, for a claim about time")
    make.add_argument("--pairs", type=int, help="seeds that both run (all)")
    make.add_argument("--first_seed", type=int, default=0)
    make.add_argument("--code", type=Path, help="folder of train_gpt.py (this tree)")
    make.add_argument("--authors", nargs="+")
    make.add_argument("--changed", help="what is new, in a sentence")
    make.add_argument("--role", choices=("record", "baseline"), help="baseline: defines the target")
    check = commands.add_parser("verify", help="0 valid, 1 invalid, 2 not judged")
    check.add_argument("folders", nargs="+", type=Path)
    commands.add_parser("table", help="write the tables of the READMEs")
    draw = commands.add_parser("plot", help="a record's curves; without DIR the history")
    draw.add_argument("folder", nargs="?", type=Path)
    draw.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    try:
        if args.command == "run":
            args.launch = launch
            return run(args)
        if args.command == "verify":
            return verify(args.folders)
        return table() if args.command == "table" else plot(args.folder, args.out)
    except (ValueError, OSError, CannotJudge) as error:
        print(f"record.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
