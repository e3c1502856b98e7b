#!/usr/bin/env bash
# ./run.sh [flags]                      set up, then train on what this machine has: GPUs or its CPU
# ./run.sh test [pytest flags]          set up for development, then ruff and pytest
# ./run.sh record NAME --runs 8 [...]   a record attempt: see records/README.md
# ./run.sh --help                       every flag
#
# Environment: NPROC processes on this machine (default: its GPUs, or its cores), NNODES, NODE_RANK,
# MASTER_ADDR, MASTER_PORT (29500) and JOIN_TIMEOUT (600 s) for several machines, PYTHON the
# interpreter that a new .venv is made with.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"

fail() { printf 'run.sh: %s\n' "$1" >&2; exit 2; }

# a virtual environment, and what the requirements say, installed anew only when they changed
setup() {
    local requirements=$1 stamp
    if [[ -z ${VIRTUAL_ENV:-} ]]; then
        if [[ ! -x .venv/bin/python ]]; then
            "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
                fail "needs Python 3.11 or newer: PYTHON=python3.11 ./run.sh"
            "${PYTHON:-python3}" -m venv .venv || fail "python3 -m venv failed: install python3-venv"
        fi
        VIRTUAL_ENV=$PWD/.venv
    fi
    python=$VIRTUAL_ENV/bin/python
    stamp=$VIRTUAL_ENV/.${requirements%.txt}.installed
    if ! cat requirements.txt "$requirements" | cmp -s - "$stamp"; then
        printf 'run.sh: installing %s\n' "$requirements" >&2
        "$python" -m pip install --quiet --disable-pip-version-check -r "$requirements" ||
            fail "pip could not install $requirements: see above"
        cat requirements.txt "$requirements" >"$stamp"
    fi
}

# GPUs that an NVIDIA driver shows; 0 without one
count_gpus() {
    if command -v nvidia-smi >/dev/null 2>&1; then
        { nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c '^GPU' || true
    else
        find /dev -maxdepth 1 -name 'nvidia[0-9]*' 2>/dev/null | wc -l
    fi
}

# ranks talk over the loopback interface, which a sandbox without network may have down
if ! (exec 3<>/dev/udp/127.0.0.1/9) 2>/dev/null; then
    ip link set lo up 2>/dev/null || fail "the loopback interface is down: ip link set lo up"
fi

if [[ ${1:-} == test ]]; then
    shift
    setup requirements-dev.txt
    export OMP_NUM_THREADS=1
    "$python" -m ruff check .
    exec "$python" -m pytest "$@"
fi

setup requirements.txt
gpus=$(count_gpus)
if ((gpus > 0)); then
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        fail "$gpus NVIDIA GPUs are visible, but this torch has no CUDA: mend the driver or reinstall torch (pip install --force-reinstall -r requirements.txt)"
    default=$gpus
else
    # one rank with one thread for each core: OpenMP threads that wait for a busy core cost far more
    cores=$(nproc)
    default=1
    while ((default * 2 <= cores && default < 16)); do default=$((default * 2)); done
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi
nproc=${NPROC:-$default} nnodes=${NNODES:-1}
[[ $nproc =~ ^[1-9][0-9]*$ ]] || fail "NPROC=$nproc: a number of processes, 1 or more"
[[ $nnodes =~ ^[1-9][0-9]*$ ]] || fail "NNODES=$nnodes: a number of machines, 1 or more"
((gpus == 0 || nproc <= gpus)) || fail "NPROC=$nproc, but this machine has $gpus GPUs: NPROC=$gpus"

if ((nnodes > 1)); then
    rendezvous=(--nnodes "$nnodes" --node_rank "${NODE_RANK:?NODE_RANK: 0 on the first machine, then 1, 2, ...}"
        --master_addr "${MASTER_ADDR:?MASTER_ADDR: the address of the first machine}"
        --master_port "${MASTER_PORT:-29500}" --rdzv_conf "timeout=${JOIN_TIMEOUT:-600}")
else
    rendezvous=(--standalone)
fi
launch=("$python" harness.py "${rendezvous[@]}" --nproc_per_node "$nproc")  # torchrun

if [[ ${1:-} == record ]]; then
    shift
    exec "$python" records/record.py run "$@" -- "${launch[@]}"
fi

for flag in "$@"; do
    case $flag in
        --help | -h) exec "$python" train_gpt.py --help ;;
        --sample | --sample=*) exec "$python" train_gpt.py "$@" ;;
    esac
done
if ((gpus > 0)); then
    shards=$("$python" train_gpt.py --shards_needed "$@")
    if ((shards > 0)); then "$python" data/fineweb.py download --shards "$shards"; fi
else
    printf 'run.sh: no NVIDIA GPU here: the CPU track, %s ranks\n' "$nproc"
fi
# mistakes in flags and data show here, in one sentence, before any process group is made
WORLD_SIZE=$((nproc * nnodes)) "$python" train_gpt.py --check "$@"
exec "${launch[@]}" train_gpt.py "$@"
