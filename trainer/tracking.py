"""TensorBoard and metrics.jsonl, written by rank 0; on the other ranks nothing happens."""

import json
import math
import os
import time
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from configs.contract import write_atomically
from configs.run_dir import RunDir
from trainer.disk import in_one_sentence

_SHOWN_EVERY_S = 10.0
"""So often points go to TensorBoard's thread, which takes the interpreter from the training each time: 0.4 ms for a
single one."""


def as_json(metrics: dict[str, float]) -> dict[str, float | None]:
    """JSON has neither NaN nor infinity: null."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


class Tracker:
    """Scalars by step. A resume leaves each step once:
    later points of an earlier attempt are dropped from both files."""

    def __init__(self, run_dir: RunDir, resumed_step: int, config: str = "", metrics_bytes: int | None = None) -> None:
        """Go on after `resumed_step`, of metrics.jsonl after its first `metrics_bytes` if they are known; `config` is
        shown as text in TensorBoard, from the first point on."""
        self._run_dir = run_dir
        self._resumed_step = resumed_step
        self._config = config
        self._writer: Any = None
        self._pending: list[tuple[int, dict[str, float], float]] = []
        """Points that TensorBoard does not have yet: step, metrics, and when in seconds since the epoch."""
        self._shown = float("-inf")
        self._keep_until(run_dir.metrics, resumed_step, metrics_bytes)
        self._lines: IO[str] = open(run_dir.metrics, "a", encoding="utf-8")  # noqa: SIM115  # open as long as the run

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """One point: the value of each metric after `step` completed updates."""
        with in_one_sentence("write", self._run_dir.metrics):
            self._lines.write(json.dumps({"step": step} | as_json(metrics)) + "\n")
            self._lines.flush()
        self.show(step, metrics)

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """In TensorBoard only: what result.json holds too needs no line, which an end that is killed would double."""
        self._pending.append((step, dict(metrics), time.time()))
        if time.monotonic() - self._shown >= _SHOWN_EVERY_S:
            self._show_pending()

    def _show_pending(self) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for step, metrics, when in self._pending:
            # One event with all values: add_scalar makes one for each, through a queue and a hash in Python.
            values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
            self._events().file_writer.add_summary(Summary(value=values), step, when)
        self._pending, self._shown = [], time.monotonic()

    def log_hparams(self, hparams: dict[str, bool | int | float | str], metrics: dict[str, float]) -> None:
        """Settings with the final metrics, in this run: SummaryWriter.add_hparams would open a second one."""
        from torch.utils.tensorboard.summary import hparams as summaries

        for summary in summaries(hparams, metrics):
            self._events().file_writer.add_summary(summary)

    def size(self) -> int:
        """Bytes of metrics.jsonl so far."""
        self.flush()
        return self._run_dir.metrics.stat().st_size

    def flush(self) -> None:
        """Give everything so far to the system."""
        with in_one_sentence("write", self._run_dir.path):
            self._lines.flush()
            if self._pending:
                self._show_pending()
            if self._writer is not None:
                self._writer.flush()

    def sync(self) -> None:
        """Put what was flushed on the disk, before a checkpoint says that it is saved. From any thread."""
        with in_one_sentence("write", self._run_dir.metrics):
            os.fsync(self._lines.fileno())

    def close(self) -> None:
        self.flush()
        self.sync()
        self._lines.close()
        if self._writer is not None:
            self._writer.close()

    def _events(self) -> Any:
        if self._writer is None:
            # 0.5 s of import: not before the first point, so that the first step comes sooner.
            from torch.utils.tensorboard import SummaryWriter

            goes_on = any(self._run_dir.path.glob("events.out.tfevents.*"))
            purge = self._resumed_step + 1 if goes_on else None
            self._writer = SummaryWriter(str(self._run_dir.path), purge_step=purge, flush_secs=10)
            self._writer.add_text("config", f"```\n{self._config}\n```", self._resumed_step)
        return self._writer

    @staticmethod
    def _keep_until(path: Path, step: int, num_bytes: int | None) -> None:
        if not path.exists():
            return
        kept = []
        for line in path.read_bytes()[:num_bytes].decode(errors="replace").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError, TypeError):  # the last line of a killed attempt may be cut short
                continue
        write_atomically(path, "".join(kept))


class SampleLog:
    """Which samples this rank trained on, batch by batch, as it happens: a kill loses no line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "a", encoding="ascii", buffering=1)  # noqa: SIM115  # open as long as the run

    def write(self, batch: int, pieces: list[Tensor]) -> None:
        """`batch` is the number since the start of the run, `pieces` are the sample indices of its micro-batches."""
        ids = [index for piece in pieces for index in piece.tolist()]
        with in_one_sentence("write", self._path):
            self._file.write(json.dumps({"batch": batch, "sample_ids": ids}) + "\n")


class NullTracker:
    """The other ranks' tracker."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def show(self, step: int, metrics: dict[str, float]) -> None: ...

    def log_hparams(self, hparams: dict[str, bool | int | float | str], metrics: dict[str, float]) -> None: ...

    def size(self) -> int:
        return 0

    def flush(self) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...
