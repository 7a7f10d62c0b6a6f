"""Packaging of megarl. The pinned stacks are requirements/cpu.txt and gpu.txt."""

from setuptools import find_packages, setup

STACK = ["torch==2.14.1", "megatron-core==0.19.2", "sglang==0.5.23", "transformers==5.19.0"]
"""The four packages on whose internals megarl relies, as in requirements/*.in."""
TRANSFORMER_ENGINE = [
    "transformer-engine[core-cu13]==2.20.2",
    "nvdlfw-inspect",
    "onnx",
    "onnxscript",
]
"""Without its torch extension, which launch/build_te.sh compiles."""

setup(
    name="megarl",
    version="0.2.0",
    description=(
        "Megatron-based reinforcement learning for large language models, dense and"
        " mixture-of-experts"
    ),
    license="Apache-2.0",
    python_requires=">=3.12,<3.13",
    packages=find_packages(
        include=["megarl", "megarl.*", "checkpoints_tools", "checkpoints_tools.*"]
    ),
    package_data={
        "megarl": [
            "recipes/*.yaml",
            "recipes/suites/*.yaml",
            "recipes/studies/*.yaml",
            "core/base/configs/*.json",
            "predict/*/*.html",
            "predict/*/*.yaml",
            "tools/*/*.html",
        ]
    },
    install_requires=[
        "aiohttp",
        "datasets",
        "jinja2",
        "markdown-it-py",
        "markupsafe",
        "matplotlib",
        "mpmath",
        "msgspec",
        "numpy",
        "prometheus-client",
        "psutil",
        "pyarrow",
        "pydantic>=2.10",
        "pyseccomp",
        "pyyaml",
        "pyzmq",
        "rich",
        "safetensors",
        "scipy",
        "tensorboard",
        "tokenizers",
        "typer>=0.29",
        "zstandard",
    ],
    extras_require={
        "cpu": STACK,
        "gpu": STACK + TRANSFORMER_ENGINE,
        "wandb": ["wandb"],
        "reasoning-gym": ["reasoning-gym==0.1.25"],
        "lm-eval": ["lm-eval==0.4.13"],
    },
    entry_points={"console_scripts": ["megarl=megarl.cli:main"]},
)
