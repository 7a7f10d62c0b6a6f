#!/usr/bin/env bash
# Packs the pinned stack of a GPU machine that has PyTorch and a GPU, but no network: README.md beside this file.
#   pack.sh FOLDER [ARCHITECTURE]       pieces of at most 52 MB in FOLDER/pieces, for sm_90 (Hopper) if nothing else is said
# They hold FOLDER/site, which is made of what stack.txt names unless it is there. That needs `make setup`, a network, and what
# launch/build_te.sh needs. FOLDER outside the checkout does not travel along with it.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
{ [ $# = 1 ] || [ $# = 2 ]; } && [[ ${2:-90} =~ ^[0-9]+$ ]] || { sed -n '2,5s/^# \?//p' "$0" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
architecture=${2:-90}
python=$root/.venv/bin/python

if [ ! -d "$folder/site" ]; then
    compiled=$HOME/.cache/megarl/transformer-engine     # as make test-gpu-paths has it
    "$root/launch/build_te.sh" "$python" "$compiled"
    rm -rf "$folder/partial"
    "$root/.venv/bin/uv" pip install --quiet --no-deps --link-mode copy --python "$python" --target "$folder/partial" \
        --requirements "$root/benchmarks/gpu/stack.txt" "$compiled"/*.whl
    mv "$folder/partial" "$folder/site"
fi

cd "$folder/site"
find . \( -path './sgl_kernel/sm[0-9]*' -not -path "./sgl_kernel/sm$architecture*" \) -delete
find . \( -name '*.a' -o -name ptxas-blackwell \) -delete
# Half of libtriton.so is what a debugger reads. Smaller ones are often patched such that strip breaks them.
find . -name '*.so*' -type f -size +150M -exec grep -qa '\.debug_info' {} \; -exec strip --strip-debug {} \;
find . -name '*.so*' -type f -exec grep -qaE 'nv_(rel)?fatbin' {} \; -print0 |
    xargs -0 --no-run-if-empty "$python" "$root/benchmarks/gpu/one_architecture.py" "$architecture"

rm -rf "$folder/pieces"
mkdir "$folder/pieces"
tar -c . | xz -T0 --x86 --lzma2=preset=6 | split -b 52MB -d - "$folder/pieces/stack.tar.xz."
cd "$folder/pieces"
sha256sum stack.tar.xz.* > SHA256SUMS
du -ch --apparent-size stack.tar.xz.*
