"""The parent process: plans, starts and watches the ranks. Never imports torch, so a typo is told at once."""

import gc

# What modules make while they are imported stays: looking through it again and again takes 6 % of a short command.
gc.set_threshold(50_000)
