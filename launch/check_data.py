"""`check-data`: one helper process with torch reads all images before a training does."""

import tempfile
from pathlib import Path

from configs.errors import EXIT_DONE, ConfigError
from configs.known_data import ENCODED
from configs.loader import load_config
from configs.run_dir import AttemptDir
from configs.schema import RunConfig
from launch import preflight
from launch.options import ROOT, Options
from launch.plan import plan_launch
from launch.request import Request
from launch.topology import detect_topology, find_torch_version


def check_data(config: Path, out: Path, options: Options) -> int:
    """Check the folder of images that `config` names, and draw OUT/NAME-samples.png; returns the exit code."""
    settings = load_config(config, options.overrides).config
    if settings.data.name not in ENCODED:
        raise ConfigError(f"check-data is for data.name: {' or '.join(ENCODED)}, and {config} has {settings.data.name}")
    # Whatever else is set, no more than this machine is needed.
    only_data = RunConfig(max_epochs=1, global_batch_size=1, seed=settings.seed, device="cpu", data=settings.data)
    preflight.check_torch(find_torch_version())
    preflight.check_folders(only_data, options.cwd)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        attempt = AttemptDir(Path(folder))
        request = Request("check-data", attempt, attempt.path, options.python, ROOT, options.cwd, options.environ)
        plan = plan_launch(only_data, detect_topology(options.environ), request)
        plan.worker.save(attempt.plan)
        picture = options.cwd / out / f"{config.stem}-samples.png"
        command = [options.python, "-u", "-m", f"{options.worker}.check_data", str(attempt.plan), str(picture)]
        code = EXIT_DONE
        if preflight.data_missing(plan.config, plan.cwd):
            code = preflight.prepare_data(plan, options.environ, f"{options.worker}.prepare")
        if code == EXIT_DONE:
            code, _ = preflight.run_helper(command, plan, options.environ, capture=False)
    return code
