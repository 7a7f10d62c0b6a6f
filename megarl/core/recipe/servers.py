"""`resources`, `weights`, `serving`: the processes, and what servers do."""

from typing import Literal

from pydantic import Field

from megarl.core.recipe.section import Section


class Resources(Section):
    """How many processes and GPUs the learner and the servers have."""

    learner_ranks: int = Field(
        1, ge=1, description="GPUs or processes of the learner: TP x PP x CP x DP"
    )
    servers: int = Field(
        1, ge=1, description="number of SGLang servers to start with; more can join later"
    )
    server_tensor_parallel: int = Field(
        1, ge=1, description="GPUs per server; more than a node has: whole nodes"
    )
    colocate: bool = Field(
        False,
        description=(
            "true: servers and learner ranks share GPUs of one machine, one rank on each; where"
            " they take turns (pipeline), the learner has the KV cache's memory while it trains"
        ),
    )
    threads: int = Field(1, ge=1, description="CPU threads per learner rank or server")


class Weights(Section):
    """How servers get the weights of a new version."""

    transport: Literal["process_group", "cuda_ipc", "disk"] = Field(
        "process_group",
        description=(
            "how servers get weights; cuda_ipc: from the learner's memory (resources.colocate)"
        ),
    )
    bucket_mb: int = Field(512, ge=1, description="MiB sent at a time")
    full_every: int = Field(
        1,
        ge=1,
        description=(
            "one publication in this many sends all values, the others only what changed; 1: all do"
        ),
    )
    timeout_s: float = Field(
        600, gt=0, description="limit of each call or bucket of a publication, in seconds"
    )


class Serving(Section):
    """How SGLang servers use their memory and compute."""

    kv_tokens: int | None = Field(
        None, ge=1, description="tokens of a server's KV cache; null: what fits (GPU only)"
    )
    memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="share of a GPU's memory for weights and KV; null: SGLang's rule, nearly all",
    )
    max_running_requests: int = Field(
        256, ge=1, description="maximum requests that a server works on at once"
    )
    quantization: Literal["none", "fp8"] = Field(
        "none",
        description=(
            "fp8: servers multiply in FP8, with weights that are quantised at each publication; the"
            " learner stays bf16"
        ),
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3"] = Field(
        "auto",
        description=(
            "fp8_e4m3: servers keep k and v in a byte a number, and attend in FP8; auto:"
            " model.dtype"
        ),
    )
    expert_parallel: bool = Field(
        False,
        description=(
            "true: each GPU of a server has whole experts, its share of them; false: it has a part"
            " of every expert"
        ),
    )
    attention_copies: int = Field(
        1,
        ge=1,
        description=(
            "copies of the attention among a server's GPUs, each with requests and a KV cache of"
            " its own; 1: all GPUs divide its heads"
        ),
    )

    @property
    def sequence_kv_tokens(self) -> int | None:
        """The most tokens of one sequence for which a server has KV memory, which is
        that of one copy of the attention; None: unknown before it has started.
        """
        if self.kv_tokens is None:
            return None
        return self.kv_tokens // self.attention_copies

    @property
    def fp8_keys(self) -> tuple[str, ...]:
        """The keys that ask for FP8."""
        keys = []
        if self.quantization == "fp8":
            keys.append("serving.quantization")
        if self.kv_cache_dtype != "auto":
            keys.append("serving.kv_cache_dtype")
        return tuple(keys)
