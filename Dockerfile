# Two images. `megarl doctor` is the check of both: what they start with, and a step of the build of the one that can run there.
#   gpu (the default): CUDA 13, the pinned GPU stack, Transformer Engine, megarl. Nodes need NVIDIA's driver r580 or newer
#     docker build -t megarl .                     docker run --gpus all --ipc=host megarl train scalerl-8b …
#   cpu: the pinned CPU stack alone, for the quickstart and for trying recipes
#     docker build -t megarl:cpu --target cpu .    docker run megarl:cpu recipes
# Bases are given by tag; a registry's digest pins them: --build-arg CUDA_BASE=nvidia/cuda@sha256:… (docker buildx imagetools inspect).
ARG CUDA_BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG PYTHON_BASE=python:3.12.11-slim-bookworm
# kubectl, by which a run on Kubernetes starts its roles in its pods.
ARG KUBECTL_BASE=rancher/kubectl:v1.34.1

FROM ${KUBECTL_BASE} AS kubectl

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

# Python, and what compiles: SGLang compiles kernels when it runs, so the GPU image keeps the compiler. The base has no cuDNN: there
# is one, torch's, and CUDNN_HOME shows it to Transformer Engine, which would otherwise prefer the system's. CUDA_HOME is the base's
# toolkit: wheels bring an nvcc 13.5, whose PTX a driver of CUDA 13.0 refuses. NCCL loads libibverbs and mlx5's provider, which the
# base has not; without them it uses TCP where there is InfiniBand. On Blackwell SGLang's attention runs kernels that NVIDIA compiled,
# which FlashInfer (its package for them is not on PyPI any more) fetches and checks by their sums; compute nodes often have no network.
FROM ${CUDA_BASE} AS cuda
ENV DEBIAN_FRONTEND=noninteractive \
    VIRTUAL_ENV=/opt/megarl-venv \
    PATH=/opt/megarl-venv/bin:$PATH \
    CUDA_HOME=/usr/local/cuda \
    CUDNN_HOME=/opt/megarl-venv/lib/python3.12/site-packages/nvidia/cudnn \
    FLASHINFER_CUBIN_DIR=/opt/flashinfer-cubins
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-dev python3.12-venv ninja-build libnuma1 numactl \
        libibverbs1 ibverbs-providers bubblewrap \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv "$VIRTUAL_ENV" \
    && pip install --no-cache-dir uv==0.13.8
COPY requirements/gpu.txt /tmp/gpu.txt
RUN uv pip install --no-cache --no-deps --compile-bytecode --requirements /tmp/gpu.txt
# A list of files that cannot be read counts as empty there; without those of attention this step fails.
RUN flashinfer download-cubin && ls "$FLASHINFER_CUBIN_DIR"/*/fmha/trtllm-gen/*.cubin > /dev/null

FROM cuda AS compiled
WORKDIR /src
COPY launch/build_te.sh launch/
COPY requirements/gpu.txt requirements/
RUN launch/build_te.sh "$VIRTUAL_ENV/bin/python" /wheels

FROM cuda AS gpu
COPY --from=kubectl /bin/kubectl /usr/local/bin/kubectl
COPY --from=compiled /wheels /tmp/compiled
COPY --from=wheel /wheels /tmp/wheels
RUN uv pip install --no-cache --no-deps --compile-bytecode /tmp/compiled/*.whl /tmp/wheels/*.whl \
    && useradd --uid 1001 --create-home megarl
USER 1001
WORKDIR /home/megarl
ENTRYPOINT ["megarl"]
CMD ["doctor"]
