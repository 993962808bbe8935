"""The text of a plan: what `plan` and `--dry-run` print."""

import json
import shlex
from collections.abc import Mapping
from typing import Any

from configs.derive import (
    counted,
    fitting_processes,
    lr_plan,
    plan_batches,
    resolve_precision,
    resolve_workers,
    slice_bounds,
    steps_per_epoch,
    total_steps,
    why_precision,
    with_reason,
)
from configs.known_data import KNOWN_DATA
from configs.schema import RunConfig
from configs.sections import LaunchConfig
from launch.follow import shown
from launch.plan import LaunchPlan, num_loaders
from launch.topology import Topology

UNKNOWN = "unknown (use plan --probe)"
MIB = 2**20
ENOUGH = 1.1
"""Times what the steps take: what the loader workers must read so that training does not wait for them."""


def render_plan(
    plan: LaunchPlan,
    topology: Topology,
    origins: Mapping[str, str],
    probe: Mapping[str, Any] | None = None,
    note: str = "",
) -> str:
    """The whole plan; `origins` says where each value comes from, `probe` is what trainer.prepare measured."""
    config = plan.config
    num_train = _num_train(config, probe)
    facts = {
        "run": f"{shown(plan.attempt.path.parent.parent, plan.cwd)}{note}",
        "processes": plan.device_line,
        "threads": f"{plan.worker.threads_per_rank} per process ({plan.threads_note})",
        "precision": _precision(plan, topology),
        "batch": plan.worker.batches.describe(),
        **_bits(plan, origins.get("virtual_shards", "default")),
        "steps": _steps(plan, num_train),
        "learning rate": _learning_rates(plan, num_train),
        "data": _data(config),
        "loader workers": _workers(plan, topology),
        "time limits": _time_limits(config.launch),
        **({"compile": _compile(probe)} if config.compile == "auto" else {}),
    }
    lines = [f"{name:<14} {value}" for name, value in (facts | _probed(probe) | _probed_batch(plan, probe)).items()]
    lines += [f"{'note':<14} {note}" for note in (*plan.warnings, *(probe or {}).get("notes", ()))]
    return "\n".join([*lines, "", *_command(plan), "", *_environment(plan), "", *_config(config, origins)])


def _time_limits(launch: LaunchConfig) -> str:
    step = f"{launch.hang_timeout_s:g} s" if launch.hang_timeout_s else "60 s or 20 times the median"
    return f"stop {launch.grace_s:g} s, collectives {launch.collective_timeout_s:g} s, a step {step}"


def _precision(plan: LaunchPlan, topology: Topology) -> str:
    config, device, has_amx = plan.config, plan.worker.device, topology.has_amx
    precision = resolve_precision(config, device, has_amx=has_amx)
    return with_reason(precision, why_precision(config, device, has_amx=has_amx))


def _workers(plan: LaunchPlan, topology: Topology) -> str:
    worker = plan.worker
    cores, shm_bytes = topology.cores, topology.shm_bytes
    workers, why = resolve_workers(plan.config, worker.device, cores, worker.local_world_size, shm_bytes)
    if not num_loaders(plan.config, 1):
        return "none (the data are held on each device)"
    return with_reason(f"{workers} per process", why)


def _compile(probe: Mapping[str, Any] | None) -> str:
    found = (probe or {}).get("compile")
    return with_reason("on" if found["compile"] else "off", found["why"]) if found else UNKNOWN


def _bits(plan: LaunchPlan, origin: str) -> dict[str, str]:
    """Why there are so many virtual shards, and what follows."""
    shards, batches, threads = plan.config.virtual_shards, plan.worker.batches, plan.worker.threads_per_rank
    if not shards:
        return {}
    *numbers, last = map(str, fitting_processes(shards))
    processes = f"{', '.join(numbers)} or {last} processes" if numbers else "1 process"
    bounds = [slice_bounds(batches.global_batch_size, shard, shards, batches.unit) for shard in range(shards)]
    sizes = [stop - start for start, stop in bounds]
    smallest, largest = min(sizes), max(sizes)
    samples = counted(largest, "sample") if smallest == largest else f"{smallest} or {largest} samples"
    micro = f", at most {batches.max_micro_batch} at a time" if batches.max_micro_batch < largest else ""
    return {
        "bits": f"{counted(shards, 'virtual shard')} ({origin}) of {samples}{micro}: the same bits on {processes} of "
        f"{counted(threads, 'thread')}; here {shards // batches.world_size} for each process"
    }


def _num_train(config: RunConfig, probe: Mapping[str, Any] | None) -> int | None:
    if known := KNOWN_DATA.get(config.data.name):
        return known.num_train
    return int(probe["num_train"]) if probe and "num_train" in probe else None


def _per_epoch(plan: LaunchPlan, num_train: int) -> int:
    total = plan.worker.batches.global_batch_size
    return steps_per_epoch(num_train, total, drop_last=plan.config.drop_last)


def _steps(plan: LaunchPlan, num_train: int | None) -> str:
    config = plan.config
    epochs = counted(config.max_epochs or 0, "epoch")
    if num_train is None:
        return f"{config.max_steps} (max_steps)" if config.max_steps else f"{epochs} of {UNKNOWN}"
    per_epoch = _per_epoch(plan, num_train)
    if config.max_steps:
        return f"{config.max_steps} (max_steps), {per_epoch} per epoch"
    return f"{per_epoch} per epoch x {epochs} = {total_steps(config, per_epoch)}"


def _learning_rates(plan: LaunchPlan, num_train: int | None) -> str:
    if num_train is None:
        return UNKNOWN
    rates = lr_plan(plan.config, _per_epoch(plan, num_train))
    return ", ".join(f"{rate:.4g} at {percent} %" for percent, rate in rates)


def _data(config: RunConfig) -> str:
    known = KNOWN_DATA.get(config.data.name)
    if known is None:
        return f"{config.data.name}: {UNKNOWN}"
    channels, height, width = known.shape
    # Images as uint8, labels as int64.
    num_bytes = (known.num_train + known.num_eval) * (channels * height * width + 8)
    held = "streamed through workers" if config.data.residency == "stream" else "held on each device"
    return (
        f"{config.data.name}: {known.num_train:,} training and {known.num_eval:,} test images, "
        f"{num_bytes:,} bytes ({num_bytes / MIB:.1f} MiB), {held}"
    )


def _probed(probe: Mapping[str, Any] | None) -> dict[str, str]:
    if not probe or "parameters" not in probe:
        return {}
    return {
        "parameters": f"{int(probe['parameters']):,}",
        "checkpoint": f"{probe['checkpoint_bytes'] / MIB:.2f} MiB",
        "one step": f"{probe['step_ms']:.2f} ms, peak memory {probe['peak_memory_bytes'] / MIB:.0f} MiB (one process)",
        "FLOPs": f"{probe['flops']}",
        **_probed_shards(probe),
        **_probed_input(probe),
        "images": f"{int(probe['num_train']):,} training and {int(probe['num_eval']):,} test",
    }


def _probed_shards(probe: Mapping[str, Any]) -> dict[str, str]:
    if "shards_ms" not in probe:
        return {}
    ours, accumulated, plain = (probe[f"{kind}_ms"] for kind in ("shards", "accumulated", "plain"))
    return {
        "bits cost": f"a step of one process's share takes {ours:.2f} ms in its shards, {accumulated:.2f} ms "
        f"accumulated in the same micro-batches and {plain:.2f} ms without virtual_shards ({ours / plain:.2f} times as "
        "long), all with these threads; sums over processes come on top"
    }


def _probed_input(probe: Mapping[str, Any]) -> dict[str, str]:
    """What loader workers read, against what the steps take: whether a training is bound by its input."""
    if not probe["input"]:
        return {}
    needed = 1000 * probe["step_samples"] / probe["step_ms"]
    rates = {int(number): rate for number, rate in probe["input"].items()}
    told = ", ".join(f"{counted(number, 'worker')} {rate:,.0f}" for number, rate in rates.items())
    enough = [number for number, rate in rates.items() if rate > ENOUGH * needed]
    if enough:
        verdict = f"not bound by input with data.num_workers={min(enough)}"
    else:
        best = max(rates, key=lambda number: rates[number])
        verdict = f"bound by input; data.num_workers={best} is the best of these, and smaller image files would help"
    return {"input": f"images/s, alone, one process: {told}; its steps take {needed:,.0f}: {verdict}"}


def _probed_batch(plan: LaunchPlan, probe: Mapping[str, Any] | None) -> dict[str, str]:
    if not probe or "largest_micro_batch" not in probe:
        return {}
    size, how = int(probe["largest_micro_batch"]), "by an estimate" if probe["is_estimate"] else "as tried"
    if size == 0:
        return {"fits": f"not one sample at a time, {how}; use a smaller network or more memory"}
    if size >= probe["share"]:
        return {"fits": f"a rank's whole share of {counted(size, 'sample')} at a time, {how}; nothing to set"}
    batches = plan_batches(plan.config, plan.worker.world_size, size)
    accumulation = f"accumulation {batches.gradient_accumulation_steps}"
    return {"fits": f"{counted(size, 'sample')} at a time, {how}: max_per_device_batch_size={size} ({accumulation})"}


def _command(plan: LaunchPlan) -> list[str]:
    return ["command", f"  cd {shlex.quote(str(plan.cwd))}", f"  {shlex.join(plan.argv)}"]


def _environment(plan: LaunchPlan) -> list[str]:
    lines = ["environment of every rank"]
    lines += [f"  {name}={shlex.quote(value)}" for name, value in sorted(plan.environment.items())]
    lines += [f"  {name} is removed" for name in plan.removed]
    worker = plan.worker
    if worker.world_size == 1:
        return [*lines, "environment of the only rank", "  (no RANK, no WORLD_SIZE)"]
    lines.append(f"environment of each rank, set by {worker.launcher}")
    # torchrun numbers the nodes by address: with several, only the local rank is known before the start.
    sizes = f"WORLD_SIZE={worker.world_size} LOCAL_WORLD_SIZE={worker.local_world_size}"
    for local in range(worker.local_world_size):
        rank = "(chosen at the rendezvous)" if plan.nnodes > 1 else local
        lines.append(f"  RANK={rank} LOCAL_RANK={local} {sizes}")
    return lines


def _config(config: RunConfig, origins: Mapping[str, str]) -> list[str]:
    values = dict(_flat("", config.model_dump(mode="json")))
    # The loader knows where model.args stands, not each name in it.
    places = {key: origins.get(key) or origins.get(key.rpartition(".")[0], "default") for key in values}
    rows = [(key, json.dumps(value, ensure_ascii=False), places[key]) for key, value in values.items()]
    key_width = max(len(key) for key, _, _ in rows)
    value_width = min(40, max(len(value) for _, value, _ in rows))
    return ["config", *(f"  {key:<{key_width}}  {value:<{value_width}}  {origin}" for key, value, origin in rows)]


def _flat(prefix: str, section: Mapping[str, object]) -> list[tuple[str, object]]:
    pairs: list[tuple[str, object]] = []
    for key, value in section.items():
        # An empty mapping is a value too: model.args.
        if isinstance(value, dict) and value:
            pairs += _flat(f"{prefix}{key}.", value)
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs
