"""Measures megarl on a GPU, in half an hour on a machine with PyTorch and without a
network: `benchmarks/gpu/run.sh`.

run.sh        finds a Python, and installs wheels in addition to its packages
__main__.py   runs the parts in turn ──► results/gpu-DATE-GPU.json and .md, rewritten
              after each
process.py      runs one part in a process of its own with a time limit, so that a fault
                costs only that part
part.py           in that process: writes rows to a file as they are measured
parts/              one file per part
networks.py         random models of real shapes; timing, memory, the peak rate of a
                    matrix product
serving.py          such models on disk, for one SGLang server or a run
training.py         a run of `megarl train`, which may be killed
machine.py      describes the machine
report.py       JSON and Markdown
"""
