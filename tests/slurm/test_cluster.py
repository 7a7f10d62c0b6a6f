"""The cluster of these tests: what it does when one of its own daemons dies."""

import psutil
import pytest

from tests.slurm.cluster import Cluster, DaemonDied


def test_a_daemon_that_dies_is_named_and_replaced(cluster: Cluster) -> None:
    psutil.Process(int((cluster.folder / "node3.pid").read_text())).kill()
    with pytest.raises(DaemonDied, match="node3 died while nothing was waited for"):
        cluster.wait_for(lambda: False, "nothing")
    cluster.revive()
    assert cluster.says("srun", "--nodelist=node3", "hostname").strip()
