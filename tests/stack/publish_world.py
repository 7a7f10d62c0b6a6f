"""One rank of test_publication_layouts: the same weights published from every layout of two ranks.

`python -m tests.stack.publish_world RECIPE URL FIRST_VERSION MODEL SCORES`; rank 0 prints one line of JSON a layout.
SCORES (.npz) is what the model thinks of the probe's sequences.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megarl import recipe as recipes
from megarl.messages import Publish, ServerAddress
from megarl.models import build, family_of, hf, parallel
from megarl.rundir import RunDir
from megarl.weights.publisher import Publisher

LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel": 2, "sequence_parallel": True},
    {"pipeline_parallel": 2},
    {},  # two data-parallel copies
]


def main(path: str, url: str, first_version: int, directory: Path, known: Path) -> None:
    reference = list(np.load(known).values())
    for version, layout in enumerate(LAYOUTS, first_version):
        overrides = [f"model.{key}={json.dumps(value)}" for key, value in layout.items()]
        recipe = recipes.load(path, [*overrides, "resources.learner_ranks=2"])
        parallel.start(recipe.model, seed=0, timeout_s=60)
        family = family_of(directory)
        chunks = build.build(recipe.model, directory)
        hf.load(chunks, family, directory)
        publisher = Publisher(recipe, RunDir.of(recipe).endpoints(), chunks, family)
        command = Publish(version=version, servers=(ServerAddress(id=0, url=url),))
        published = publisher.publish(command, "test", lambda sequences: reference)
        if dist.get_rank() == 0:
            assert published is not None
            (result,) = published.results
            values = (result.error, result.checksum, result.probe_logprob_diff, published.bytes_sent)
            print(json.dumps(values), flush=True)
    parallel.stop()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
