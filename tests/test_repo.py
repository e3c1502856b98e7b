"""The repository as a whole: run.sh as a user calls it, budgets, and what no file may contain."""

import ast
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUDGET = {  # lines; what a file needs beyond must earn it
    "train_gpt.py": 950, "muon.py": 980, "harness.py": 580, "data/fineweb.py": 400,
    "data/shards.py": 320, "records/record.py": 550, "records/evidence.py": 600, "README.md": 180,
}


def tracked(pattern: str) -> list[Path]:
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.split()
    return [ROOT / name for name in files if (ROOT / name).is_file()]


def start_sh(*arguments: str, folder: Path = ROOT, **variables: str) -> subprocess.Popen:
    """run.sh of `folder`, from another folder, in this test's own virtual environment."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "OMP_NUM_THREADS")}
    return subprocess.Popen(
        [str(folder / "run.sh"), *arguments],
        cwd="/",
        env={**environment, "VIRTUAL_ENV": sys.prefix, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run_sh(*arguments: str, folder: Path = ROOT, **variables: str) -> subprocess.CompletedProcess:
    process = start_sh(*arguments, folder=folder, **variables)
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def two_machines(port: str) -> dict[str, str]:
    """run.sh's variables for two machines of one process each, both of them here."""
    return dict(NNODES="2", NPROC="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """The files of the repository under a name that a careless script would trip over."""
    folder = tmp_path_factory.mktemp("a path") / "with [brackets] and $(date)"
    for path in tracked("."):
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    return folder


@pytest.mark.slow
def test_run_sh_trains_from_any_folder_by_any_path(copy):
    done = run_sh("--train_steps=3", "--val_tokens=2000", "--sample_tokens=5", folder=copy)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    pattern = r"step:3/3 val_loss:\d+\.\d{4} train_time:\d+ms step_avg:\d+\.\dms"
    assert any(re.match(pattern, line) for line in lines), done.stdout
    log = Path(lines[-1].removeprefix("log: "))
    assert log.is_absolute() and log.parent == copy / "logs" and log.exists()
    assert "no NVIDIA GPU" in done.stderr + done.stdout


@pytest.mark.slow
def test_two_machines_train_like_one_with_as_many_ranks(tmp_path):
    flags = ["--train_steps=3", "--val_tokens=2000", "--sample_tokens=0", f"--log_dir={tmp_path}"]
    shared = two_machines(free_port())
    nodes = [start_sh(*flags, NODE_RANK=rank, **shared) for rank in "01"]
    try:
        said = [node.communicate(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    one = run_sh(*flags, NPROC="2")
    last = [out.split("step:3/3 ")[1].split()[0] for out in (said[0][0], one.stdout)]
    assert last[0] == last[1] and "val_loss" in last[0]


@pytest.mark.slow
def test_a_machine_that_dies_ends_the_other_which_says_so(tmp_path):
    flags = ["--train_steps=400", "--val_tokens=2000", "--timeout=20", f"--log_dir={tmp_path}"]
    shared = two_machines(free_port())
    flags.append("--run_id=x")
    nodes = [start_sh(*flags, NODE_RANK=rank, **shared) for rank in "01"]
    try:
        log, deadline = tmp_path / "x.jsonl", time.monotonic() + 90
        while not (log.exists() and '"step"' in log.read_text()):
            assert time.monotonic() < deadline and nodes[0].poll() is None
            time.sleep(0.2)
        os.killpg(nodes[1].pid, signal.SIGKILL)
        _, said = nodes[0].communicate(timeout=60)
    finally:
        for node in nodes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
    assert nodes[0].returncode != 0
    assert re.search(r"rank 0: failed: .*(onnection|imed out)", said.strip().splitlines()[-1])
    assert '"status": "failed"' in log.read_text().splitlines()[-1]


@pytest.mark.parametrize("rank, said", [("0", "1/2 clients joined"), ("1", "timed out")])
def test_a_machine_that_never_comes_is_waited_for_so_long_and_no_longer(rank, said):
    shared = two_machines(free_port())
    done = run_sh("--train_steps=3", NODE_RANK=rank, JOIN_TIMEOUT="4", **shared)
    assert done.returncode == 1 and said in done.stderr.strip().splitlines()[-1]


def test_a_port_that_is_taken_is_said():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        shared = two_machines(port)
        done = run_sh("--train_steps=3", NODE_RANK="0", JOIN_TIMEOUT="4", **shared)
    assert done.returncode == 1
    assert re.search(rf"launcher failed: .*({port}|in use)", done.stderr.strip().splitlines()[-1])


@pytest.mark.parametrize(
    "arguments, variables, said",
    [
        (["--batch=1"], {}, "--batch"),
        (["--lr=x"], {}, "--lr x"),
        ([], {"NPROC": "0"}, "NPROC=0"),
        ([], {"NPROC": "$(touch /tmp/never)"}, "NPROC="),
        ([], {"NPROC": "3"}, "NPROC=1, 2, 4, 8, 16"),
        ([], {"NNODES": "2"}, "NODE_RANK"),
        (["--train_files=data/none*.bin"], {}, "data/fineweb.py download"),
    ],
)
def test_run_sh_refuses_in_one_sentence(arguments, variables, said):
    done = run_sh(*arguments, **variables)
    assert done.returncode == (1 if "NNODES" in variables else 2)
    last = done.stderr.strip().splitlines()[-1]
    assert said in last and "Traceback" not in done.stderr


def test_run_sh_refuses_a_gpu_that_torch_cannot_use(tmp_path):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: x)'\n")
    fake.chmod(0o755)
    done = run_sh("--train_steps=1", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 2 and "this torch has no CUDA" in done.stderr


def test_help_needs_no_hardware_and_lists_the_flags():
    done = run_sh("--help")
    assert done.returncode == 0 and "--batch_tokens" in done.stdout


def test_line_budgets_hold():
    for name, budget in BUDGET.items():
        count = len((ROOT / name).read_text().splitlines())
        assert count <= budget, f"{name} has {count} lines, {budget} are allowed"


def test_readme_names_every_file_with_its_lines():
    readme = (ROOT / "README.md").read_text()
    for name, lines in re.findall(r"^\| `([\w./]+)` \| (\d+) \|", readme, re.MULTILINE):
        assert int(lines) == len((ROOT / name).read_text().splitlines()), name
    for path in [*tracked("*.py"), ROOT / "run.sh"]:
        name = path.relative_to(ROOT).as_posix()
        if name.count("/") < 2:
            assert f"`{name}`" in readme, name


def test_no_file_executes_what_it_reads():
    """No exec, eval, pickle, shell=True or os.system, and torch.load only with weights_only."""
    for path in tracked("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                product = path.parent != ROOT / "tests"
                assert not (product and {"pickle", "marshal", "shelve"} & set(names)), where
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in ("exec", "eval", "os.system", "compile"), where
                given = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert given.get("shell") != "True", where
                if name == "torch.load":
                    assert given.get("weights_only") == "True", where


def test_no_file_tells_of_a_machine():
    """No absolute path of somebody's machine, no registry's host."""
    secret = re.compile(r"(?<![\w.])/(home|root|work|Users)/\w|pypi\.org|npmjs\.|debian\.org")
    allowed = {f"tests/test_{name}.py" for name in ("records", "repo", "faults")}
    allowed |= {"records/record.py"}
    for path in tracked("."):
        name = path.relative_to(ROOT).as_posix()
        if name in allowed or path.suffix in (".bin", ".png"):
            continue
        found = secret.search(path.read_text())
        assert not found, f"{name}: {found}"
