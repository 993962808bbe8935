"""What the three commands do: check the configuration first, then prove."""

from collections.abc import Callable, Sequence
from pathlib import Path

from configs.derive import plan_batches
from configs.errors import EXIT_DONE, ConfigError
from configs.loader import load_config
from configs.sections import FaultKind
from launch.follow import say
from launch.options import Options, parse_nproc
from launch.verify.faults import verify_faults
from launch.verify.resume import verify_resume
from launch.verify.runs import Place, a_place
from launch.verify.topology import verify_bits, verify_topology

FLOAT64 = ("dtype=float64", "mixed_precision=no")


def resume(config: Path, options: Options, nprocs: str, kills: int, seed: int) -> int:
    numbers = _numbers(nprocs)
    if load_config(config, options.overrides).config.max_steps == 1:
        raise ConfigError("max_steps=1: a run of one step cannot be killed within; make it 2 steps or longer")
    settings = _shards(config, options, numbers) if len(set(numbers)) > 1 else ()
    return _prove(config, options, settings, lambda place: verify_resume(place, numbers, kills, seed))


def topology(config: Path, options: Options, nprocs: str, *, bitwise: bool) -> int:
    numbers = _numbers(nprocs)
    if load_config(config, options.overrides).config.per_device_batch_size is not None:
        raise ConfigError("per_device_batch_size gives each number of processes another global batch; use the other")
    if len(numbers) < 2:
        raise ConfigError(f"--nproc {nprocs}: give two numbers of processes or more to compare, such as 1,2,4")
    if bitwise:
        settings = _shards(config, options, numbers)
        return _prove(config, options, settings, lambda place: verify_bits(place, numbers))
    return _prove(config, options, FLOAT64, lambda place: verify_topology(place, numbers))


def faults(config: Path, options: Options, hang_timeout_s: float, only: FaultKind | None) -> int:
    nproc = _number(options.nproc)
    return _prove(config, options, (), lambda place: verify_faults(place, nproc, hang_timeout_s, only))


def _prove(config: Path, options: Options, settings: Sequence[str], proof: Callable[[Place], int]) -> int:
    """Keeps the runs of a proof that fails."""
    # A restart by itself would use up the starts that a proof counts, and an end by the clock is no proof.
    own = (*settings, "launch.max_restarts=0", "max_time_s=null")
    taken = {text.partition("=")[0] for text in own}
    settings = (*(text for text in options.overrides if text.partition("=")[0] not in taken), *own)
    origins = load_config(config, settings).origins
    own_interval = any(origins[f"checkpoint.every_{unit}"] != "default" for unit in ("steps", "minutes"))
    with a_place(config, options.cwd / options.runs, settings, has_own_interval=own_interval) as place:
        code = proof(place)
        place.keep = code != EXIT_DONE
        return code


def _shards(config: Path, options: Options, nprocs: Sequence[int]) -> tuple[str, ...]:
    """The setting for equal bits on these numbers of processes, unless the user's own do: as few as divide over all."""
    loaded = load_config(config, options.overrides)
    own = loaded.config.virtual_shards
    for nproc in nprocs:
        if nproc & (nproc - 1):
            raise ConfigError(
                f"--nproc {nproc}: only powers of two have equal bits, by virtual_shards; use 1, 2, 4 or 8"
            )
    shards = own or max(nprocs)
    for nproc in nprocs:
        plan_batches(loaded.config.model_copy(update={"virtual_shards": shards}), nproc)
    origin = loaded.origins["virtual_shards"] if own else f"the largest of --nproc {','.join(map(str, nprocs))}"
    say(f"virtual_shards={shards} ({origin})")
    return () if own else (f"virtual_shards={shards}",)


def _numbers(text: str) -> list[int]:
    return [_number(number) for number in text.split(",")]


def _number(text: str | None) -> int:
    nproc = parse_nproc(text)
    if nproc == "auto":
        raise ConfigError("--nproc auto: give a number; a proof must know it")
    return nproc
