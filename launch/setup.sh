#!/usr/bin/env bash
# Makes .venv with the pinned CPU stack of requirements/cpu.txt and megarl itself, or does nothing when it is up to date.
# Its Python 3.12 is MEGARL_PYTHON, or one on PATH, or pyenv's; else uv fetches one.
set -euo pipefail
cd "$(dirname "$0")/.."
unset PYTHONDONTWRITEBYTECODE        # without .pyc files every role compiles all it imports, at each start
export PIP_USER=0                    # some sites make pip install for the user, which it refuses to do in an environment

# The sandbox in which programs are graded (`grader: code`) is not a Python package.
if ! command -v bwrap >/dev/null; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        install=(timeout 300 apt-get install -y -qq --no-install-recommends bubblewrap)
        "${install[@]}" >/dev/null 2>&1 || { timeout 300 apt-get update -qq && "${install[@]}"; } >/dev/null 2>&1 || true
    fi
    command -v bwrap >/dev/null || echo "megarl: bubblewrap is missing; the grader code, the environment python and agents need it (docs/how-to/install.md)"
fi

stamp=.venv/.megarl-setup
here=$(cd .venv 2>/dev/null && pwd -P || echo "$(pwd -P)/.venv")
want=$({ cat requirements/cpu.txt setup.py launch/setup.sh; echo "$here"; } | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && exit 0

uv_pin=uv==0.13.8
is_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }
makes_venvs() { "$1" -c 'import venv, ensurepip' >/dev/null 2>&1; }   # Debian's python3 without python3-venv does not
python='' bare=''
for candidate in "${MEGARL_PYTHON:-}" python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
    if [ -n "$candidate" ] && is_312 "$candidate"; then
        if makes_venvs "$candidate"; then python=$candidate; break; fi
        bare=${bare:-$candidate}
    fi
done

# Without such a Python uv makes .venv: it needs no venv and no pip, and fetches a Python 3.12 where there is none.
find_uv() {
    uv=$(command -v uv || true)
    [ -z "$uv" ] || return 0
    for candidate in python3 python3.{14,13,12,11,10,9,8} python; do
        if timeout 180 "$candidate" -m pip install --quiet --retries 1 --target "$scratch" "$uv_pin" >/dev/null 2>&1; then
            uv=$scratch/bin/uv
            return 0
        fi
    done
    return 1
}

refuse() {
    cat >&2 <<MSG
megarl needs Python 3.12 with venv and pip (its stack has no wheels for other versions). $1
Get one, then run this again:
  Debian/Ubuntu:  apt-get install python3.12 python3.12-venv
  pyenv:          pyenv install 3.12
  uv:             install uv, which fetches a Python by itself; UV_PYTHON_INSTALL_MIRROR is where from, if not from the internet
or say where it is:  MEGARL_PYTHON=/path/to/python3.12 make …
MSG
    exit 1
}

# Programs of an environment name its folder, and megarl in it the checkout: moved or copied, it would run what was elsewhere.
if ! { [ -x .venv/bin/python ] && is_312 .venv/bin/python && [[ $(cat .venv/bin/pip 2>/dev/null) == *"$here/bin/"* ]]; }; then
    rm -rf .venv
    if [ -n "$python" ]; then
        echo "megarl: making .venv with $("$python" --version) (about 7 GB, a few minutes the first time)"
        "$python" -m venv .venv
    else
        scratch=$(mktemp -d)
        trap 'rm -rf "$scratch"' EXIT
        had="None was found on PATH or under pyenv"
        [ -z "$bare" ] || had="$bare lacks venv or pip"
        find_uv || refuse "$had, and there is neither uv nor a Python that could install it."
        echo "megarl: making .venv with uv, because there is no Python 3.12 with venv and pip (about 7 GB, a few minutes the first time)"
        said=$("$uv" venv --python "${bare:-3.12}" .venv 2>&1) || refuse "$had, and uv could not make .venv:
$said"
        "$uv" pip install --quiet --python .venv/bin/python pip
    fi
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check "$uv_pin"
# uv does not read pip's configuration, in which a site names its mirror of PyPI.
index=${UV_INDEX_URL:-${PIP_INDEX_URL:-$(.venv/bin/python -m pip config get global.index-url 2>/dev/null || true)}}
[ -z "$index" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}
# cpu.txt is the whole closure, so nothing is resolved: the same packages on every machine.
export UV_LINK_MODE=${UV_LINK_MODE:-copy} UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-180}
packages=(.venv/bin/uv pip install --python .venv/bin/python --no-deps)
"${packages[@]}" --compile-bytecode --requirements requirements/cpu.txt
"${packages[@]}" --quiet --no-build-isolation --editable .
echo "$want" > "$stamp"
