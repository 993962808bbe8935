"""The parent process: plans, starts and watches the ranks. Never imports torch, so a typo is told at once."""
