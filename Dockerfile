# Two images. `megarl doctor` is the check of both: what they start with, and a step of the build of the one that can run there.
#   gpu (the default): CUDA 13, the pinned GPU stack, Transformer Engine, NVIDIA Apex, megarl
#     docker build -t megarl .                     docker run --gpus all --ipc=host megarl train scalerl-8b …
#   cpu: the pinned CPU stack alone, for the quickstart and for trying recipes
#     docker build -t megarl:cpu --target cpu .    docker run megarl:cpu recipes
# Bases are given by tag; a registry's digest pins them: --build-arg CUDA_BASE=nvidia/cuda@sha256:… (docker buildx imagetools inspect).
ARG CUDA_BASE=nvidia/cuda:13.0.1-cudnn-devel-ubuntu24.04
ARG PYTHON_BASE=python:3.12.11-slim-bookworm

# megarl itself as a wheel, so that neither image has its source.
FROM ${PYTHON_BASE} AS wheel
WORKDIR /src
RUN pip install --no-cache-dir uv==0.13.8
COPY setup.py pyproject.toml README.md LICENSE ./
COPY megarl megarl
COPY checkpoints_tools checkpoints_tools
RUN uv build --wheel --out-dir /wheels .

FROM ${PYTHON_BASE} AS cpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir uv==0.13.8
COPY requirements/cpu.txt /tmp/cpu.txt
RUN uv pip install --system --no-cache --no-deps --compile-bytecode --requirements /tmp/cpu.txt
COPY --from=wheel /wheels /tmp/wheels
RUN uv pip install --system --no-cache --no-deps --compile-bytecode /tmp/wheels/*.whl \
    && useradd --create-home --uid 1000 megarl \
    && megarl doctor
USER 1000
WORKDIR /home/megarl
ENTRYPOINT ["megarl"]
CMD ["doctor"]

# Python, and what compiles: SGLang compiles kernels when it runs, so the GPU image keeps the compiler.
FROM ${CUDA_BASE} AS cuda
ENV DEBIAN_FRONTEND=noninteractive \
    VIRTUAL_ENV=/opt/megarl-venv \
    PATH=/opt/megarl-venv/bin:$PATH
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-dev python3.12-venv git ninja-build libnuma1 numactl bubblewrap \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv "$VIRTUAL_ENV" \
    && pip install --no-cache-dir uv==0.13.8
COPY requirements/gpu.txt /tmp/gpu.txt
RUN uv pip install --no-cache --no-deps --compile-bytecode --requirements /tmp/gpu.txt

# Both are compiled against the torch above. PyPI's `apex` is another project: NVIDIA's comes from its source.
FROM cuda AS compiled
ARG APEX_COMMIT=6424da3b4faa6c8f062da4a48c424fff3f02d42d
ARG TORCH_CUDA_ARCH_LIST="9.0;10.0"
WORKDIR /src
RUN pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels "transformer-engine-torch==2.20.2" \
    && git clone https://github.com/NVIDIA/apex apex \
    && git -C apex checkout "$APEX_COMMIT" \
    && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 APEX_PARALLEL_BUILD=8 \
       pip wheel --no-cache-dir --no-build-isolation --no-deps --wheel-dir /wheels ./apex

FROM cuda AS gpu
COPY --from=compiled /wheels /tmp/compiled
COPY --from=wheel /wheels /tmp/wheels
RUN uv pip install --no-cache --compile-bytecode /tmp/compiled/*.whl "transformer-engine[core_cu13]==2.20.2" \
    && uv pip install --no-cache --no-deps --compile-bytecode /tmp/wheels/*.whl \
    && useradd --uid 1001 --create-home megarl
USER 1001
WORKDIR /home/megarl
ENTRYPOINT ["megarl"]
CMD ["doctor"]
