#!/usr/bin/env bash
# Measures a GPU with megarl on a machine that has PyTorch and perhaps nothing else, without a network: README.md beside this file.
#   run.sh [--wheels DIR] [--venv DIR] [--tiny] [--minutes N] [--parts a,b] [--output DIR]
# --wheels: installs these into a venv (--venv, or one that is removed afterwards), which also sees all that is there already.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

wheels='' venv='' tiny='' gpu=' and a GPU' rest=()
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=${2:?"$1 needs a folder"}; shift ;;
        --venv) venv=${2:?"$1 needs a folder"}; shift ;;
        --tiny) tiny=yes gpu=''; rest+=("$1") ;;
        --minutes | --parts | --output) rest+=("$1" "${2:?"$1 needs a value"}"); shift ;;
        *) echo "run.sh: $1: unknown; see the top of $0" >&2; exit 2 ;;
    esac
    shift
done

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
    if said=$("$path" -W ignore -c "$probe" "$tiny" 2>/dev/null); then
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

if [ -n "$wheels" ]; then
    shopt -s nullglob
    names=("$wheels"/*.whl)
    [ ${#names[@]} -gt 0 ] || { echo "run.sh: --wheels $wheels: no *.whl there" >&2; exit 1; }
    if [ -z "$venv" ]; then
        venv=$(mktemp -d)
        trap 'rm -rf "$venv"' EXIT
    fi
    "$python" -m venv --system-site-packages --without-pip "$venv"
    # The Python found may be a venv itself, whose packages a venv made of it would not see.
    folders='import site, sys; print("\n".join(f"import site; site.addsitedir({p!r})" for p in sys.path if p.endswith("-packages")))'
    "$python" -c "$folders" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/what-is-there.pth"
    python=$venv/bin/python
    "$python" -m pip --version > /dev/null 2>&1 || "$python" -m ensurepip > /dev/null
    # NAME==VERSION: of one that is there for several Pythons pip takes the right file.
    mapfile -t names < <(printf '%s\n' "${names[@]##*/}" | awk -F- '{ print $1 "==" $2 }' | sort -u)
    PIP_CONFIG_FILE=/dev/null "$python" -m pip --isolated --disable-pip-version-check install --quiet --no-index --no-deps \
        --find-links "$wheels" "${names[@]}"
fi

export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
"$python" -m benchmarks.gpu --spent "$SECONDS" "${rest[@]}"
