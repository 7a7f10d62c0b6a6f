#!/usr/bin/env bash
# Measures a GPU with megarl on a machine that has PyTorch and perhaps nothing else, without a network: README.md beside this file.
#   run.sh [--wheels DIR | --stack DIR] [--venv DIR] [--tiny] [--minutes N] [--parts a,b] [--output DIR]
# --wheels: installs these into a venv (--venv, or one that is removed afterwards), which also sees all that is there already.
# --stack: what unpack.sh unpacked are the packages of that venv, before those that are there.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

wheels='' stack='' venv='' tiny='' gpu=' and a GPU' rest=()
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=${2:?"$1 needs a folder"}; shift ;;
        --stack) stack=$(cd "${2:?"$1 needs a folder"}" && pwd); shift ;;
        --venv) venv=${2:?"$1 needs a folder"}; shift ;;
        --tiny) tiny=yes gpu=''; rest+=("$1") ;;
        --minutes | --parts | --output) rest+=("$1" "${2:?"$1 needs a value"}"); shift ;;
        *) echo "run.sh: $1: unknown; see the top of $0" >&2; exit 2 ;;
    esac
    shift
done

[ -z "$wheels" ] || [ -z "$stack" ] || { echo "run.sh: --stack has all that --wheels would bring: give one of them" >&2; exit 2; }

probe='
import sys
tiny = sys.argv[1] == "yes"
said = "Python " + ".".join(map(str, sys.version_info[:3]))
good = sys.version_info >= (3, 12)
try:
    import torch
    said += ", torch " + torch.__version__
    good = good and tuple(int(n) for n in torch.__version__.split(".")[:2]) >= (2, 11)
    if not tiny:
        cuda = torch.cuda.is_available()
        said += ", CUDA " + str(torch.version.cuda) + ("" if cuda else " with no GPU that it can use")
        good = good and cuda
except Exception as error:
    said += ", no torch (" + str(error) + ")"
    good = False
print(said)
sys.exit(not good)
'
python='' found=''
for candidate in "${MEGARL_PYTHON:-}" python3 python python3.12 python3.13 python3.14 "$root/.venv/bin/python"; do
    path=$(command -v "$candidate" 2>/dev/null) || continue
    if said=$(PYTHONPATH=${stack:-${PYTHONPATH:-}} "$path" -W ignore -c "$probe" "$tiny" 2>/dev/null); then
        python=$path
        echo "$path: $said"
        break
    fi
    found+="; $path is ${said:-no Python that starts}"
done
if [ -z "$python" ]; then
    echo "run.sh: no Python >= 3.12 with torch >= 2.11$gpu (say which: MEGARL_PYTHON=/path/to/python)${found:-; none on PATH}" >&2
    exit 1
fi
# Such as ninja, by which SGLang compiles kernels, where nobody has activated this Python's environment.
export PATH=$PATH:${python%/*}

if [ -n "$wheels$stack" ]; then
    if [ -z "$venv" ]; then
        venv=$(mktemp -d)
        trap 'rm -rf "$venv"' EXIT
    fi
    there=$python
    [ -x "$venv/bin/python" ] || "$there" -m venv --system-site-packages --without-pip "$venv"
    python=$venv/bin/python
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
fi
if [ -n "$stack" ]; then
    [ -L "$packages" ] || rmdir "$packages"
    ln -sfn "$stack" "$packages"
    # CUDA libraries that the stack leaves to what is there are looked for beside those that it brings.
    "$there" - "$stack" <<'LINK'
import importlib.util, pathlib, sys
spec = importlib.util.find_spec("nvidia")
for there in map(pathlib.Path, spec.submodule_search_locations if spec else ()):
    for file in (file for file in there.rglob("*") if file.is_file()):
        link = pathlib.Path(sys.argv[1], "nvidia", file.relative_to(there))
        if not link.exists():
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
LINK
    # cuDNN is one of them, and may be older than the one that the stack's torch was compiled with.
    export MEGARL_STACK=$stack CUDNN_HOME=$stack/nvidia/cudnn PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1
fi
if [ -n "$wheels$stack" ]; then
    # The Python found may be a venv itself, whose packages a venv made of it would not see.
    folders='import site, sys; print("\n".join(f"import site; site.addsitedir({p!r})" for p in sys.path if p.endswith("-packages")))'
    "$there" -c "$folders" > "$packages/what-is-there.pth"
fi
if [ -n "$wheels" ]; then
    shopt -s nullglob
    names=("$wheels"/*.whl)
    [ ${#names[@]} -gt 0 ] || { echo "run.sh: --wheels $wheels: no *.whl there" >&2; exit 1; }
    "$python" -m pip --version > /dev/null 2>&1 || "$python" -m ensurepip > /dev/null
    # NAME==VERSION: of one that is there for several Pythons pip takes the right file.
    mapfile -t names < <(printf '%s\n' "${names[@]##*/}" | awk -F- '{ print $1 "==" $2 }' | sort -u)
    PIP_CONFIG_FILE=/dev/null "$python" -m pip --isolated --disable-pip-version-check install --quiet --no-index --no-deps \
        --find-links "$wheels" "${names[@]}"
fi

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
"$python" -m benchmarks.gpu --spent "$SECONDS" "${rest[@]}"
