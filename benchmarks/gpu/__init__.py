"""What a GPU does with megarl, in half an hour on a machine that has PyTorch and no network: `benchmarks/gpu/run.sh`.

run.sh        finds a Python, installs wheels beside what is there
__main__.py   parts in turn ──► results/gpu-DATE-GPU.json and .md, written anew after each
process.py      one part: a process of its own with a limit, so that a fault costs that part only
part.py           in that process: rows to a file as they are measured
parts/              one file a part
networks.py         random models of real shapes; timing, memory, the peak of a matrix product
serving.py          the same on disk, for one SGLang server or a run
training.py         a run of `megarl train`, which may be killed
machine.py      what was measured on
report.py       JSON and Markdown
"""
