"""A member of a position as a cluster manager starts it: ``outside_member.py FOLDER``; worker 1 is killed once."""

import sys

from lightning.pytorch.callbacks import ModelCheckpoint
from sharded import Kill, Ordinary, Waits, fit

STEPS = 12

if __name__ == "__main__":
    keep = ModelCheckpoint(sys.argv[1], "{step}", every_n_train_steps=STEPS)
    fit(Ordinary(), (2, 1, 2), Kill(1, 2, 1), Waits(3), keep, max_steps=STEPS, enable_checkpointing=True)
