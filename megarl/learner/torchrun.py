"""torchrun, whose store listens on --master-addr alone: `python -m megarl.learner.torchrun` with torchrun's arguments."""

from torch.distributed.run import main

from megarl import stores

if __name__ == "__main__":
    stores.bind_all()
    main()
