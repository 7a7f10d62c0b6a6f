"""Packaging of megarl. The CPU stack is requirements/cpu.txt; `pip install megarl[gpu]` is the pinned GPU stack."""

from setuptools import find_packages, setup

setup(
    name="megarl",
    version="0.1.0",
    description="Megatron-based reinforcement learning for large language models, dense and mixture-of-experts",
    license="Apache-2.0",
    python_requires=">=3.12,<3.13",
    packages=find_packages(include=["megarl", "megarl.*", "checkpoints_tools", "checkpoints_tools.*"]),
    package_data={
        "megarl": [
            "recipes/*.yaml",
            "recipes/suites/*.yaml",
            "core/base/configs/*.json",
            "lab/*/*.html",
            "lab/*/*.yaml",
        ]
    },
    install_requires=[
        "aiohttp",
        "datasets",
        "jinja2",
        "math-verify",
        "matplotlib",
        "msgspec",
        "numpy",
        "prometheus-client",
        "psutil",
        "pydantic>=2.10",
        "pyyaml",
        "pyzmq",
        "rich",
        "safetensors",
        "scipy",
        "tensorboard",
        "typer>=0.29",
    ],
    extras_require={
        "wandb": ["wandb"],
        "gpu": [
            "sglang==0.5.23",
            "torch==2.14.1",
            "megatron-core==0.19.2",
            "transformers==5.19.0",
            "transformer-engine[pytorch,core_cu13]==2.20.2",
        ],
    },
    entry_points={"console_scripts": ["megarl=megarl.cli:main"]},
)
