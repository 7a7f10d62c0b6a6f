#!/usr/bin/env bash
# Compiles Transformer Engine's torch extension, which PyPI has as source only, against the torch of a Python environment.
#   launch/build_te.sh PYTHON FOLDER [SITE]
# The wheel goes to FOLDER, and stays there for the next time. SITE becomes a folder for PYTHONPATH with all of Transformer Engine, for
# an environment of requirements/cpu.txt, which lacks it. Versions are those of requirements/gpu.txt.
# It needs g++, ninja and the CUDA toolkit of the version that torch was built with (CUDA_HOME, else /usr/local/cuda), and no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# = 2 ] || [ $# = 3 ] || { sed -n '2,6s/^# \?//p' "$0" >&2; exit 2; }
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
mkdir -p "$2"
folder=$(cd "$2" && pwd)
version=$(sed -n 's/^transformer-engine==//p' requirements/gpu.txt)
built_for="transformer-engine-torch $version for torch $("$python" -c 'import torch; print(torch.__version__)')"

build() {
    export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
    local wanted found packages
    wanted=$("$python" -c 'import torch; print(torch.version.cuda)')
    found=$("$CUDA_HOME/bin/nvcc" --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p' || true)
    if [ "$found" != "$wanted" ]; then
        echo "build_te: torch was built with CUDA $wanted, CUDA_HOME=$CUDA_HOME has ${found:-no nvcc}: set CUDA_HOME to a toolkit $wanted" >&2
        exit 1
    fi
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    # Headers of cuDNN, NCCL and CUDA's libraries come from the wheels that torch uses, so that there is one version of each.
    export CPATH=$packages/cudnn/include:$packages/nccl/include:$packages/cu13/include
    # Without NCCL EP, an alternative to the all-to-all with which megarl sends tokens to experts: it needs newer NCCL headers.
    export NVTE_WITH_NCCL_EP=0
    export NVTE_PYTORCH_FORCE_BUILD=TRUE        # otherwise its setup first looks on GitHub for a wheel
    export PATH=${python%/*}:$PATH MAX_JOBS=${MAX_JOBS:-$(nproc)}
    echo "build_te: compiling $built_for into $folder (minutes)"
    rm -f "$folder"/transformer_engine_torch-*.whl
    "$python" -m pip wheel --quiet --no-cache-dir --no-build-isolation --no-deps --wheel-dir "$folder" \
        "transformer-engine-torch==$version"
    echo "$built_for" > "$folder/built-for"
}

[ "$(cat "$folder/built-for" 2>/dev/null)" = "$built_for" ] || build
if [ $# = 3 ] && [ "$(cat "$3/built-for" 2>/dev/null)" != "$built_for" ]; then
    rm -rf "$3"
    # The packages that its import needs beyond requirements/cpu.txt.
    mapfile -t pins < <(grep -E '^(transformer-engine|transformer-engine-cu13|ml-dtypes|onnx|onnx-ir|onnxscript)==' requirements/gpu.txt)
    "$python" -m pip install --quiet --no-deps --target "$3" "${pins[@]}" "$folder"/transformer_engine_torch-*.whl
    echo "$built_for" > "$3/built-for"
fi
