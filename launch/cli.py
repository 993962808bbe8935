"""`python -m launch`, also installed as `lockstep`. Exit codes: configs/errors.py."""

import os
import sys
from pathlib import Path
from typing import Annotated, Never

import typer

from configs.errors import ConfigError, EnvironmentProblem, LockstepError
from configs.sections import FaultKind
from launch.backends import Launcher
from launch.follow import say
from launch.options import Options

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Train one model on 1 process, N GPUs or N nodes, by the same command and with the same results.",
)

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file, such as configs/mnist.yaml")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="name of a run, as `runs` lists it")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="settings, such as optim.lr=0.1")]
Nproc = Annotated[str | None, typer.Option("--nproc", metavar="N|auto", help="processes on this node; auto: one a GPU")]
LauncherOption = Annotated[Launcher | None, typer.Option("--launcher", help="what starts several processes [torchrun]")]
RunName = Annotated[str | None, typer.Option("--run-name", metavar="NAME", help="goes on with the run of this name")]
Fresh = Annotated[bool, typer.Option("--fresh", help="start anew beside a run of that name")]
AllowChanges = Annotated[bool, typer.Option("--allow-changes", help="go on with a run though settings differ")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the plan and stop")]
RunsDir = Annotated[Path, typer.Option("--runs-dir", envvar="LOCKSTEP_RUNS", help="folder of all runs")]
Nnodes = Annotated[int, typer.Option("--nnodes", min=1, help="machines that train together")]
NodeRank = Annotated[int, typer.Option("--node-rank", min=0, help="which of them this is")]
Endpoint = Annotated[str | None, typer.Option("--rdzv-endpoint", metavar="HOST:PORT", help="where they meet: node 0")]
LocalAddr = Annotated[str | None, typer.Option("--local-addr", help="this node's address for the others")]
Probe = Annotated[bool, typer.Option("--probe", help="also measure parameters, checkpoint, one step (imports torch)")]
ProbeBatch = Annotated[bool, typer.Option("--probe-batch", help="also find the largest micro-batch that fits")]
Out = Annotated[Path, typer.Option("--out", metavar="FOLDER", help="where the picture of samples goes")]
EvalData = Annotated[
    Path | None, typer.Option("--data", metavar="FOLDER", help="other images: a folder for each class, by its name")
]
Checkpoint = Annotated[str, typer.Option("--checkpoint", metavar="best|last|STEP", help="which one to evaluate")]

RUNS = Path("runs")


@app.command()
def train(
    config: Config,
    overrides: Overrides = None,
    nproc: Nproc = None,
    launcher: LauncherOption = None,
    name: RunName = None,
    fresh: Fresh = False,
    allow_changes: AllowChanges = False,
    dry_run: DryRun = False,
    runs_dir: RunsDir = RUNS,
    nnodes: Nnodes = 1,
    node_rank: NodeRank = 0,
    endpoint: Endpoint = None,
    local_addr: LocalAddr = None,
) -> None:
    """Train by a config file."""
    from launch import start

    options = Options(
        overrides or (), nproc, launcher, name, fresh, allow_changes, runs_dir, nnodes, node_rank, endpoint, local_addr
    )
    _exit(start.show_plan(config, options) if dry_run else start.train(config, options))


@app.command()
def plan(
    config: Config,
    overrides: Overrides = None,
    nproc: Nproc = None,
    launcher: LauncherOption = None,
    name: RunName = None,
    fresh: Fresh = False,
    allow_changes: AllowChanges = False,
    probe: Probe = False,
    probe_batch: ProbeBatch = False,
    runs_dir: RunsDir = RUNS,
    nnodes: Nnodes = 1,
    node_rank: NodeRank = 0,
    endpoint: Endpoint = None,
    local_addr: LocalAddr = None,
) -> None:
    """Print what `train` would do: commands, environment, settings and where they come from, arithmetic."""
    from launch import probe as probing
    from launch import start

    options = Options(
        overrides or (), nproc, launcher, name, fresh, allow_changes, runs_dir, nnodes, node_rank, endpoint, local_addr
    )
    wanted = ((probing.probe, probe), (probing.probe_batch, probe_batch))
    _exit(start.show_plan(config, options, probes=[ask for ask, is_wanted in wanted if is_wanted]))


@app.command()
def resume(
    run: Run,
    overrides: Overrides = None,
    nproc: Nproc = None,
    launcher: LauncherOption = None,
    allow_changes: AllowChanges = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Go on with a run from its newest checkpoint; on another number of processes too."""
    from launch import start

    _exit(start.resume(run, Options(overrides or (), nproc, launcher, allow_changes=allow_changes, runs=runs_dir)))


@app.command("eval")
def evaluate(
    run: Run,
    overrides: Overrides = None,
    checkpoint: Checkpoint = "best",
    data: EvalData = None,
    nproc: Nproc = None,
    launcher: LauncherOption = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Evaluate a checkpoint of a run on the whole test split, or on another folder of images."""
    from launch import start

    _exit(start.evaluate(run, checkpoint, Options(overrides or (), nproc, launcher, runs=runs_dir), data))


@app.command()
def runs(runs_dir: RunsDir = RUNS) -> None:
    """List the runs: status, step, top-1, wall time."""
    from launch.runs_table import render_runs

    say(render_runs(runs_dir))


@app.command("check-data")
def check_data(config: Config, overrides: Overrides = None, out: Out = Path()) -> None:
    """Read every image of a folder: counts, broken ones, those in both splits, and a picture of what training sees."""
    from launch.check_data import check_data

    _exit(check_data(config, out, Options(overrides or ())))


verify = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Prove on a configuration of your own what is promised."
)
app.add_typer(verify, name="verify")
Kills = Annotated[int, typer.Option("--kills", min=1, help="how often the run is killed")]
Seed = Annotated[int, typer.Option("--seed", help="of the steps at which it is killed")]
Nprocs = Annotated[str, typer.Option("--nproc", metavar="N,N,...", help="numbers of processes to compare")]
Only = Annotated[FaultKind | None, typer.Option("--only", help="try faults of this kind only")]
Turns = Annotated[str, typer.Option("--nproc", metavar="N,N,...", help="processes of one start after another")]
Bitwise = Annotated[bool, typer.Option("--bitwise", help="by virtual shards, in the configuration's own precision")]
HangTimeout = Annotated[
    float, typer.Option("--hang-timeout", min=1.0, help="seconds after which a step counts as hung")
]


@verify.command("resume")
def verify_resume(
    config: Config,
    overrides: Overrides = None,
    nprocs: Turns = "1",
    kills: Kills = 4,
    seed: Seed = 0,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Kill a run at random steps and in its saves; it must end with the bits of one that was not killed."""
    from launch.verify import commands

    _exit(commands.resume(config, Options(overrides or (), runs=runs_dir), nprocs, kills, seed))


@verify.command("topology")
def verify_topology(
    config: Config,
    overrides: Overrides = None,
    nprocs: Nprocs = "1,2,4",
    bitwise: Bitwise = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Run it on several numbers of processes in float64: the same samples, weights and losses within 1e-10."""
    from launch.verify import commands

    _exit(commands.topology(config, Options(overrides or (), runs=runs_dir), nprocs, bitwise=bitwise))


@verify.command("faults")
def verify_faults(
    config: Config,
    overrides: Overrides = None,
    nproc: Nproc = "2",
    hang_timeout_s: HangTimeout = 20.0,
    only: Only = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Inject every fault there is into runs of it, and check what is printed, lost and gone on with."""
    from launch.verify import commands

    _exit(commands.faults(config, Options(overrides or (), nproc, runs=runs_dir), hang_timeout_s, only))


def main() -> Never:
    """Map every ending to its exit code; what is the user's to fix is one line a problem, without a traceback."""
    from launch import signals

    _open_missing_streams()
    signals.raise_on_stop()
    try:
        app(prog_name="lockstep" if Path(sys.argv[0]).name == "lockstep" else "python -m launch")
    except LockstepError as error:
        for problem in error.problems if isinstance(error, ConfigError) else [error]:
            say(f"{error.kind}: {problem}", to_stderr=True)
        sys.exit(error.exit_code)
    except signals.StopRequested as stop:
        say(f"stopped by {stop.name} before training had started", to_stderr=True)
        sys.exit(signals.exit_code_of(stop.name))
    except BrokenPipeError:
        os._exit(0)
    except OverflowError as error:
        say(f"{ConfigError.kind}: a number among the settings is too large: {error}", to_stderr=True)
        sys.exit(ConfigError.exit_code)
    except OSError as error:  # the launcher's own files: no space, no permission, not there
        place = f"{error.filename}: " if error.filename else ""
        say(f"{EnvironmentProblem.kind}: {place}{error.strerror or error}", to_stderr=True)
        sys.exit(EnvironmentProblem.exit_code)
    sys.exit(0)


def _open_missing_streams() -> None:
    """A closed stdout (`>&-`) becomes /dev/null, before another file gets its number; odd characters are escaped."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            assert os.open(os.devnull, os.O_RDWR) == number
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # text streams both


def _exit(code: int) -> Never:
    raise typer.Exit(code)
