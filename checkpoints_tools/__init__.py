"""Tools for what training leaves behind: `python -m checkpoints_tools convert | verify | inspect`.

    __main__.py    the command line
    model.py       a model wherever it is stored: Hugging Face directory or distributed checkpoint
    convert.py     one into the other
    verify.py      are two the same, tensor by tensor and bit by bit
    inspect.py     what a directory holds

They use megarl.models and nothing of the roles, and need no GPU.
"""
