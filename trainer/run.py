"""One attempt on one rank, from the start to its end: build, resume, train, evaluate, tell."""

import gc
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.beat import DATA, EVALUATION, FINISHING, SAVING
from configs.contract import WorkerPlan, write_atomically
from configs.run_dir import AttemptDir, RunDir, commit_settings, step_name
from trainer import checkpoint, disk, resume, summary, waiting
from trainer.account import Account, earlier_attempts, straggler_lines, time_of_run
from trainer.boundary import evaluate
from trainer.build import build
from trainer.data import workers
from trainer.details import write_details
from trainer.deterministic import told_if_not_deterministic
from trainer.evaluate import EvalResult, details_of
from trainer.faults import unreached
from trainer.guard import BadBatchError
from trainer.job import Job
from trainer.loop import train
from trainer.multistep import told_if_group_too_large
from trainer.optim import averaged_tensors
from trainer.rollback import roll_back
from trainer.runtime import RunContext
from trainer.snapshot import averaged_state, needed_space, save
from trainer.stop import StopFlag
from trainer.tracking import Tracker, as_json


@dataclass(frozen=True)
class Ending:
    """How the run ended on this rank; `checkpoint` is the one that holds its last step."""

    is_finished: bool
    step: int
    epoch: int
    checkpoint: str


@dataclass
class Run:
    """One rank of one attempt. `job` is None until everything is built."""

    plan: WorkerPlan
    run_dir: RunDir
    attempt: AttemptDir
    stop: StopFlag
    account: Account = field(default_factory=Account)
    job: Job | None = None

    def train(self) -> Ending:
        """Build, resume, train, evaluate, save. Raises LockstepError for what the user should know."""
        context = RunContext(self.plan)
        self.account.beat()
        job, screen = build(self, context)
        self._watch_for_stops(context)
        commit = summary.ask_git() if context.is_rank_zero else None
        last = resume.resume_newest(job, self.run_dir.checkpoints)
        context.together(lambda: self._check_space(job) if context.is_rank_zero else None)
        self.account.start_at(job.state.step)
        job.guard.forget_after(job.state)
        if context.is_rank_zero:
            commit_settings(self.run_dir, self.attempt)
            if (classes := job.facts["classes"]) is not None:
                write_atomically(self.run_dir.classes, json.dumps(classes, indent=1))
        if last is not None:
            screen.append(f"resume     {last}: epoch {job.state.epoch}, step {job.state.step}")
        for line in screen:
            job.console.line(line)
        if context.is_rank_zero:
            job.tracker = self._tracker(job)
            write_atomically(self.attempt.resumed, json.dumps({"checkpoint": last, "step": job.state.step}))
        if last is None and job.config.nonfinite == "rollback":
            save(job)  # something to go back to
        try:
            device, is_asked = job.facts["gpu"] or self.plan.device, job.config.virtual_shards > 0
            with told_if_not_deterministic(job.model, device, is_asked=is_asked), told_if_group_too_large(job):
                is_finished, result = self._train(job, commit)
        except BaseException:
            job.saver.abandon()
            raise
        finally:
            job.console.close()
            job.tracker.close()
        context.close()
        if result is not None:
            summary.check_expectations(job.config.expect, result["metrics"])
        return Ending(is_finished, job.state.step, job.state.epoch, step_name(job.state.step))

    def _check_space(self, job: Job) -> None:
        """Before the first step: what the run is to hold at once fits, the best and the one being written included."""
        folder, most = self.run_dir.checkpoints, job.config.checkpoint.keep + 2
        more = max(1, most - len(checkpoint.step_folders(folder)))
        each, largest = needed_space(job)
        why = f"{more} more checkpoints of {each:,} bytes, up to {most} at once"
        disk.check_space(folder, more * each, largest, why)

    def _train(self, job: Job, commit: summary.GitAnswer | None) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the run is finished, and if it is, its result."""
        job.console.start(job.total_steps, job.state.step)
        gc.freeze()  # all that was built so far stays; only what training makes is looked through
        gc.enable()
        seen, began = job.state.samples_seen, time.monotonic()
        while True:
            try:
                is_finished = train(job)
                break
            except BadBatchError as error:
                job.saver.settle()
                self.tidy_up()
                roll_back(job, str(error), self.run_dir.checkpoints)
                if job.context.is_rank_zero:
                    job.tracker.close()
                    job.tracker = self._tracker(job)
                save(job)  # a crash must not forget what is passed over, nor the budget
        self.account.enter(SAVING)
        job.saver.settle()
        if not is_finished:
            return False, None
        # An earlier attempt may have been killed between its last checkpoint and its result.
        if not job.evaluations and not evaluate(job):
            return False, None
        self.account.enter(FINISHING)
        job.console.close()
        rate = (job.state.samples_seen - seen) / (time.monotonic() - began)
        result = summary.result_of(job, self.plan, rate, (job.state.samples_seen - seen) / (self.account.busy_s() or 1))
        ranks = job.context.gather_objects(self.account.by_kind())
        if job.context.is_rank_zero:
            self._export(job)
            earlier = earlier_attempts(self.run_dir, self.attempt, self.account.first_step)
            spent = time_of_run(job.time_before, self.account.by_kind(), earlier)
            result |= {"time": spent.facts(), "git_commit": commit() if commit else None}
            on_gpu = job.context.device.type != "cpu"
            lines = straggler_lines(ranks, on_gpu=on_gpu) if len(ranks) > 1 else []
            self._tell_details(job, self.run_dir.path, step_name(job.state.step), job.evaluations)
            summary.report_result(job, self.run_dir, result, spent, lines)
            in_steps, spent_s = job.state.samples_seen - seen, self.account.busy_s()
            if spent_s >= waiting.NOT_BEFORE_S:
                waiting.tell_of_wait(job, self.account.seconds[DATA] / spent_s, in_steps / spent_s)
            steps = range(self.account.first_step, job.state.step)
            for line in unreached(job.config.faults, self.attempt.number, steps):
                job.console.line(line)
        return True, result

    def _watch_for_stops(self, context: RunContext) -> None:
        most, started = self.plan.config.max_time_s, self.plan.started
        left = math.inf if most is None else most - max(0.0, time.time() - started if started else 0.0)
        self.stop.watch(left, self.run_dir.stop if context.is_rank_zero else None)

    def _tracker(self, job: Job) -> Tracker:
        settings = json.dumps(job.config.model_dump(mode="json"), indent=1)
        return Tracker(self.run_dir, job.state.logged_until(), settings, job.metrics_bytes)

    def _export(self, job: Job) -> None:
        """model.safetensors, complete or absent, for other programs."""
        aside = self.run_dir.weights.with_suffix(".tmp")
        try:
            disk.write_tensors(aside, averaged_state(job, job.evaluator.model))
            aside.replace(self.run_dir.weights)
            disk.sync(self.run_dir.path)
        finally:
            aside.unlink(missing_ok=True)

    def _evaluated_data(self) -> str:
        return self.plan.eval_data or self.plan.config.data.name

    def _tell_details(self, job: Job, folder: Path, checkpoint: str, results: Mapping[str, EvalResult]) -> None:
        """Write what is known of each class into `folder`, and show the gist."""
        facts = {
            "checkpoint": checkpoint,
            "data": self._evaluated_data(),
            "samples": len(job.evaluator.source),
            "flip": job.config.eval.flip,
            "shift": job.config.eval.shift,
            "changed_settings": list(self.plan.eval_changes),
        }
        for line in write_details(folder, details_of(results), job.class_names(), facts):
            job.console.line(line)

    def evaluate(self) -> Ending:
        """Evaluate one checkpoint; write eval.json beside the plan."""
        context = RunContext(self.plan)
        self.account.beat()
        job, screen = build(self, context)
        for line in screen:
            job.console.line(line)
        folder, which = self.run_dir.checkpoints, self.plan.checkpoint
        name = resume.load_for_evaluation(job, folder, which)
        job.console.line(f"{name}, {context.world_size} x {self.plan.device}, precision {context.precision}")
        weights = {"": averaged_tensors(job.model)} | ({} if job.ema is None else {"ema_": job.ema.tensors})
        results: dict[str, EvalResult] = {}
        self.account.enter(EVALUATION)
        device, is_asked = job.facts["gpu"] or self.plan.device, job.config.virtual_shards > 0
        for prefix, tensors in weights.items():
            with told_if_not_deterministic(job.model, device, is_asked=is_asked):
                result = job.evaluator.evaluate(context, tensors, alive=self.account.beat, in_detail=True)
            assert result is not None, "nothing stops it"
            results[prefix] = result
            job.console.line(result.describe("EMA" if prefix else ""))
        if context.is_rank_zero:
            metrics: dict[str, float] = {}
            for prefix, each in results.items():
                metrics |= each.metrics(prefix, in_detail=True)
            answer = {"checkpoint": name, "data": self._evaluated_data(), "metrics": as_json(metrics)}
            write_atomically(self.attempt.path / "eval.json", json.dumps(answer, indent=1))
            self._tell_details(job, self.attempt.path, name, results)
            job.console.line(f"written to {self.attempt.path}")
        context.close()
        return Ending(True, job.state.step, job.state.epoch, name)

    def tidy_up(self) -> None:
        """Leave no process and no temporary file, however it ended."""
        workers.tidy_up()
