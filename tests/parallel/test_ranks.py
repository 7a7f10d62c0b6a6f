"""What ranks share."""

import re

from tests.parallel.worlds import run_world


def test_a_message_of_gigabytes_takes_little_more_than_its_size() -> None:
    output = run_world(2, "tests.parallel.bytes_world")
    taken = [float(times) for times in re.findall(r"rank \d: ([\d.]+)", output)]
    assert len(taken) == 2
    assert max(taken) < 1.5, output
