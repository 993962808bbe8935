"""plan_launch is pure: machines, requests and what comes of them, in tables."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError, EnvironmentProblem
from configs.run_dir import RunDir
from configs.schema import RunConfig
from launch.backends import Rendezvous
from launch.plan import LaunchPlan, plan_launch
from launch.render import render_plan
from launch.request import Request
from launch.topology import Topology

GOLDEN = Path(__file__).parent.parent / "golden"
CPU = Topology(cores=8, num_gpus=0, gpu_reason="no driver", has_amx=True, shm_bytes=2**30)
GPU = dataclasses.replace(CPU, num_gpus=2, gpu_reason=None, cuda_visible_devices="0,1")
MAC = dataclasses.replace(CPU, system="Darwin", has_mps=True, has_amx=False)
OWN = {"name": "mine:data", "num_classes": 3}
REQUEST = Request(
    run_name="demo-001",
    attempt=RunDir(Path("/home/me/runs/demo-001")).attempt("001"),
    meeting=Path("/tmp/lockstep-XXXXXXXX"),
    python="/venv/bin/python",
    root=Path("/opt/lockstep"),
    cwd=Path("/home/me"),
)


def config(**settings: Any) -> RunConfig:
    return RunConfig.model_validate({"max_epochs": 5, "global_batch_size": 256} | settings)


def planned(topology: Topology, settings: dict[str, Any] | None = None, **request: Any) -> LaunchPlan:
    return plan_launch(config(**(settings or {})), topology, dataclasses.replace(REQUEST, **request))


def test_ranks_keep_freed_memory_unless_the_user_says_otherwise() -> None:
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    found = planned(CPU).environment
    assert [found[name] for name in names] == ["1073741824", "1099511627776"]
    own = planned(CPU, environ={"MALLOC_TRIM_THRESHOLD_": "5"}).environment
    assert [own.get(name) for name in names] == ["1073741824", None]  # theirs is inherited


@pytest.mark.parametrize(
    ("topology", "device", "nproc", "expected"),
    [
        (CPU, "auto", 1, ("cpu", 1, "direct")),
        (CPU, "auto", 4, ("cpu", 4, "torchrun")),
        (CPU, "auto", "auto", ("cpu", 1, "direct")),
        (GPU, "auto", 1, ("cuda", 1, "direct")),
        (GPU, "auto", "auto", ("cuda", 2, "torchrun")),
        (GPU, "cpu", 4, ("cpu", 4, "torchrun")),
        (GPU, "cpu", "auto", ("cpu", 1, "direct")),
        (MAC, "auto", 1, ("mps", 1, "direct")),
        (MAC, "auto", 2, ("cpu", 2, "torchrun")),
    ],
)
def test_device_processes_and_backend(
    topology: Topology, device: str, nproc: Any, expected: tuple[str, int, str]
) -> None:
    worker = planned(topology, {"device": device}, nproc=nproc).worker
    assert (worker.device, worker.world_size, worker.launcher) == expected


@pytest.mark.parametrize(
    ("topology", "settings", "request_", "kind", "text"),
    [
        (
            GPU,
            {},
            {"nproc": 4},
            EnvironmentProblem,
            r"asked for 4 processes, 2 GPUs visible \(CUDA_VISIBLE_DEVICES=0,1\); use NGPU=2",
        ),
        (CPU, {"device": "cuda"}, {}, EnvironmentProblem, "device=cuda, but torch sees no GPU: no driver"),
        (CPU, {"device": "mps"}, {}, EnvironmentProblem, "Apple silicon"),
        (MAC, {"device": "mps"}, {"nproc": 2}, ConfigError, "one process, not 2"),
        (CPU, {}, {"nproc": 2, "launcher": "accelerate"}, ConfigError, "Accelerate 1.15 starts one process"),
        (CPU, {"sync_batchnorm": True}, {}, ConfigError, "sync_batchnorm"),
        (CPU, {"global_batch_size": 3}, {"nproc": 4}, ConfigError, "global_batch_size=3 is smaller"),
    ],
)
def test_refuses_with_the_numbers_and_the_fix(
    topology: Topology, settings: dict[str, Any], request_: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        planned(topology, settings, **request_)


def test_tells_all_that_does_not_fit_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        planned(CPU, {"sync_batchnorm": True, "global_batch_size": 3}, nproc=4, launcher="accelerate")
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("settings", "environ", "nproc", "threads", "note"),
    [
        ({}, {}, 1, 8, "8 cores / 1 process"),
        ({}, {}, 3, 2, "8 cores / 3 processes"),
        ({}, {}, 16, 1, "8 cores / 16 processes"),
        ({"data": {"residency": "stream", "num_workers": 3}}, {}, 2, 1, "8 cores / 2 processes - 3 loader workers"),
        ({"data": OWN | {"num_workers": 1}}, {}, 2, 3, "8 cores / 2 processes - 1 loader worker"),
        ({"data": OWN}, {}, 1, 6, "8 cores / 1 process - 2 loader workers"),
        ({"data": OWN | {"residency": "device"}}, {}, 2, 4, "8 cores / 2 processes"),
        ({}, {"OMP_NUM_THREADS": "5"}, 2, 5, "OMP_NUM_THREADS of your environment"),
        ({}, {"OMP_NUM_THREADS": "junk"}, 2, 4, "8 cores / 2 processes"),
        ({"launch": {"num_threads": 3}}, {"OMP_NUM_THREADS": "5"}, 2, 3, "launch.num_threads"),
    ],
)
def test_threads(settings: dict[str, Any], environ: dict[str, str], nproc: int, threads: int, note: str) -> None:
    plan = planned(CPU, settings, nproc=nproc, environ=environ)
    assert (plan.worker.threads_per_rank, plan.threads_note) == (threads, note)
    assert plan.environment["OMP_NUM_THREADS"] == str(threads)


SHARDS = {"virtual_shards": 4, "global_batch_size": 8}


@pytest.mark.parametrize(("topology", "threads"), [(CPU, 2), (GPU, 4)])
def test_with_virtual_shards_the_threads_of_a_cpu_do_not_depend_on_the_processes(
    topology: Topology, threads: int
) -> None:
    """On a GPU they add up nothing."""
    found = planned(dataclasses.replace(topology, cores=8), SHARDS, nproc=2).worker.threads_per_rank
    assert found == threads


def test_metal_promises_no_equal_bits() -> None:
    assert planned(MAC, SHARDS).worker.device == "cpu"
    with pytest.raises(ConfigError, match="equal bits each time, which Metal does not promise; use device=cpu"):
        planned(MAC, SHARDS | {"device": "mps"})


def test_an_evaluation_cuts_no_batch_for_its_processes() -> None:
    assert planned(CPU, SHARDS, nproc=3, mode="eval").worker.batches.global_batch_size == 8
    with pytest.raises(ConfigError, match="does not divide over 3 processes"):
        planned(CPU, SHARDS, nproc=3)


@pytest.mark.parametrize(
    ("data", "warning"),
    [
        ({"residency": "stream"}, ["shared memory is 64 MiB, little for 2 loader workers (docker: --shm-size)"]),
        (OWN, ["shared memory is 64 MiB, little for 2 loader workers (docker: --shm-size)"]),
        (OWN | {"num_workers": 1}, []),
        (OWN | {"residency": "device"}, []),
        ({}, []),
    ],
)
def test_little_shared_memory_is_told_where_loader_workers_need_it(data: dict[str, Any], warning: list[str]) -> None:
    assert planned(dataclasses.replace(CPU, shm_bytes=64 * 2**20), {"data": data}).warnings == warning


def test_torchrun_is_told_the_grace_time_in_a_way_that_old_ones_ignore() -> None:
    plan = planned(CPU, {"launch": {"grace_s": 12.5}}, nproc=2)
    assert plan.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "13"
    assert not any("shutdown" in argument for argument in plan.argv)


def test_stray_variables_never_reach_the_ranks() -> None:
    stray = [
        "RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
        "ACCELERATE_USE_FSDP",
        "TORCHELASTIC_RUN_ID",
        "PET_NNODES",
        "FSDP_VERSION",
        "PMI_RANK",
    ]
    environ = dict.fromkeys(stray, "7") | {"HOME": "/home/me", "PYTHONPATH": "/mine", "CUDA_VISIBLE_DEVICES": "0,1"}
    plan = planned(CPU, nproc=2, environ=environ)
    child = plan.child_environ(environ)
    assert not set(stray) & set(child)
    assert plan.removed == sorted(stray)
    assert child["HOME"] == "/home/me"
    assert child["PYTHONPATH"] == "/opt/lockstep:/home/me:/mine"


def test_one_node_needs_no_port_and_stays_on_loopback() -> None:
    plan = planned(CPU, nproc=2)
    assert "store_type=file" in plan.argv
    assert plan.worker.store == "/tmp/lockstep-XXXXXXXX/ranks"
    assert plan.environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert not any(re.search(r":\d+", argument) for argument in plan.argv)


@pytest.mark.parametrize(("node_rank", "is_host"), [(0, "true"), (1, "false")])
def test_several_nodes_meet_at_the_endpoint(node_rank: int, is_host: str) -> None:
    nodes = Rendezvous(2, node_rank, "node0:29400", "10.0.0.7")
    plan = planned(CPU, nproc=4, nodes=nodes, interface="eth0")
    assert plan.worker.world_size == 8
    assert plan.worker.local_world_size == 4
    assert plan.worker.store is None
    assert plan.environment["GLOO_SOCKET_IFNAME"] == "eth0"
    command = " ".join(plan.argv)
    assert "--rdzv-endpoint node0:29400 --local-addr 10.0.0.7" in command
    assert f"is_host={is_host}" in command


def test_accelerate_gets_a_file_of_ours_and_no_fixed_port() -> None:
    plan = planned(GPU, nproc=2, launcher="accelerate")
    assert f"--config_file {plan.attempt.path / 'accelerate.yaml'}" in " ".join(plan.argv)
    assert "main_process_port: 0" in plan.files["accelerate.yaml"]
    assert "MULTI_GPU" in plan.files["accelerate.yaml"]
    assert "--rdzv_backend c10d --rdzv_conf store_type=file" in " ".join(plan.argv)
    assert plan.child_environ({"PET_RDZV_ENDPOINT": "stray"})["PET_RDZV_ENDPOINT"] == "/tmp/lockstep-XXXXXXXX/agent"


@pytest.mark.parametrize(("own", "interface"), [({}, "lo"), ({"NCCL_SOCKET_IFNAME": "eth7"}, "eth7")])
def test_nccl_stays_on_loopback_on_one_node(own: dict[str, str], interface: str) -> None:
    assert planned(GPU, nproc=2, environ=own).environment["NCCL_SOCKET_IFNAME"] == interface
    nodes = Rendezvous(2, 0, "node0:29400", "10.0.0.7")
    assert "NCCL_SOCKET_IFNAME" not in planned(GPU, nproc=2, nodes=nodes, interface="eth0").environment
    assert "NCCL_SOCKET_IFNAME" not in planned(CPU, nproc=2).environment


def test_cpu_on_a_gpu_machine_hides_the_gpus() -> None:
    assert planned(GPU, {"device": "cpu"}).environment["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in planned(GPU).environment


def test_restarts_of_several_nodes_are_refused() -> None:
    """Each launcher would judge by its own ranks' failures, and one that gives up keeps the others waiting."""
    nodes = Rendezvous(2, 0, "node0:29400", "10.0.0.7")
    assert planned(CPU, {"launch": {"max_restarts": 2}}, nproc=2).warnings == []
    with pytest.raises(ConfigError, match=r"max_restarts: 2 is for one node: .*use launch\.max_restarts=0"):
        planned(CPU, {"launch": {"max_restarts": 2}}, nodes=nodes)


@pytest.mark.parametrize(
    ("cap", "remembered", "micro_batch", "is_told"),
    [(None, None, 128, False), (None, 32, 32, True), (16, 32, 16, False), (64, 32, 32, True), (None, 500, 128, False)],
)
def test_a_remembered_micro_batch_holds_where_it_is_the_smaller_one(
    cap: int | None, remembered: int | None, micro_batch: int, is_told: bool
) -> None:
    plan = planned(CPU, {"max_per_device_batch_size": cap}, nproc=2, max_micro_batch=remembered)
    batches = plan.worker.batches
    assert (batches.max_micro_batch, batches.global_batch_size) == (micro_batch, 256)
    assert batches.gradient_accumulation_steps == 128 // micro_batch
    told = "micro-batches of at most 32 samples: more ran out of memory, says runs/demo-001/micro_batch.json; delete it"
    assert [warning.startswith(told) for warning in plan.warnings] == [True] * is_told
    assert f"per-device {micro_batch} x 2 processes" in render_plan(plan, CPU, {})


def test_an_evaluation_is_not_told_what_fits_in_training() -> None:
    assert planned(CPU, mode="eval", max_micro_batch=2).warnings == []


def test_an_evaluation_says_which_settings_are_not_the_runs() -> None:
    (note,) = planned(CPU, mode="eval", eval_changes=["eval.flip: false -> true", "seed: 0 -> 1"]).warnings
    assert note == "evaluated with other settings than the run's: eval.flip: false -> true; seed: 0 -> 1"


@pytest.mark.parametrize(
    ("largest", "is_estimate", "text"),
    [
        (48, False, "48 samples at a time, as tried: max_per_device_batch_size=48 (accumulation 3)"),
        (1, True, "1 sample at a time, by an estimate: max_per_device_batch_size=1 (accumulation 128)"),
        (128, True, "a rank's whole share of 128 samples at a time, by an estimate; nothing to set"),
        (0, False, "not one sample at a time, as tried; use a smaller network or more memory"),
    ],
)
def test_the_probed_micro_batch_is_told_with_the_setting(largest: int, is_estimate: bool, text: str) -> None:
    probe = {"largest_micro_batch": largest, "share": 128, "is_estimate": is_estimate}
    lines = render_plan(planned(CPU, nproc=2), CPU, {}, probe).splitlines()
    assert f"{'fits':<14} {text}" in lines


def test_nccls_flight_recorder_dumps_into_the_attempt_where_there_is_nccl() -> None:
    environment = planned(GPU, nproc=2).environment
    recorder = {name: value for name, value in environment.items() if "_NCCL_" in name or "_FR_" in name}
    attempt = "/home/me/runs/demo-001/attempts/001"
    assert recorder == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{attempt}/nccl-rank",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{attempt}/nccl-rank",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/tmp/lockstep-XXXXXXXX/nccl-",
    }
    for elsewhere in (planned(CPU, nproc=2), planned(GPU), planned(GPU, {"device": "cpu"}, nproc=2)):
        assert not elsewhere.environment.keys() & recorder.keys()
    own = planned(GPU, nproc=2, environ={"TORCH_FR_BUFFER_SIZE": "9"})
    assert own.child_environ({"TORCH_FR_BUFFER_SIZE": "9"})["TORCH_FR_BUFFER_SIZE"] == "9"


def test_time_limits_are_shown_as_they_are_set() -> None:
    plan = planned(CPU, {"launch": {"grace_s": 5, "collective_timeout_s": 70, "hang_timeout_s": 12}})
    assert "time limits    stop 5 s, collectives 70 s, a step 12 s\n" in render_plan(plan, CPU, {})


def test_planning_writes_nothing(tmp_path: Path) -> None:
    planned(CPU, nproc=2, attempt=RunDir(tmp_path / "runs/x").attempt("001"), cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_rendered_plan_is_the_golden_one() -> None:
    settings = {
        "schedule": {"name": "cosine", "warmup_steps": 100},
        "optim": {"name": "adamw", "lr": 0.002},
        "model": {"args": {"width": 64}},
    }
    origins = {"max_epochs": "configs/demo.yaml:1", "optim.lr": "command line", "model.args": "configs/demo.yaml:9"}
    plan = planned(CPU, settings, nproc=3, environ={"RANK": "3"})
    golden = GOLDEN / "plan-3-cpu.txt"
    text = render_plan(plan, CPU, origins, None, " (new)") + "\n"
    assert golden.is_file(), f"{golden} is missing; if this is intended, write it: {text}"
    assert text == golden.read_text(), f"if the change is intended, put this into {golden}:\n{text}"


def test_beside_gpus_the_cores_load() -> None:
    plan = planned(GPU, {"data": OWN}, nproc=2)
    assert (plan.worker.num_workers, plan.worker.threads_per_rank) == (3, 1)
    line = "loader workers 3 per process (auto: 8 cores / 2 processes - 1, from 1 to 8)\n"
    assert line in render_plan(plan, GPU, {})
    assert planned(GPU, {"data": OWN | {"num_workers": 1}}, nproc=2).worker.num_workers == 1


def test_what_needs_torch_is_unknown_until_probed() -> None:
    plan = planned(CPU, {"data": OWN})
    assert render_plan(plan, CPU, {}).count("unknown (use plan --probe)") == 3
    probe = {
        "parameters": 1234,
        "checkpoint_bytes": 2**20,
        "step_ms": 1.5,
        "peak_memory_bytes": 2**20,
        "num_train": 512,
        "num_eval": 9,
        "flops": "8,000 per sample",
        "notes": ["TFLOP/s without MFU"],
        "input": {},
    }
    text = render_plan(plan, CPU, {}, probe)
    assert "1,234" in text
    assert "FLOPs          8,000 per sample\n" in text
    assert "note           TFLOP/s without MFU\n" in text
    assert "2 per epoch x 5 epochs = 10" in text


@pytest.mark.parametrize(
    ("settings", "nproc", "said"),
    [
        (
            {"virtual_shards": 4},
            2,
            "4 virtual shards (configs/demo.yaml:3) of 64 samples: the same bits on 1, 2 or 4 processes of 2 threads; "
            "here 2 for each process",
        ),
        (
            {"virtual_shards": 8, "global_batch_size": 100, "max_per_device_batch_size": 5},
            1,
            "8 virtual shards (configs/demo.yaml:3) of 12 or 13 samples, at most 5 at a time: the same bits on 1, 2, 4 "
            "or 8 processes of 1 thread; here 8 for each process",
        ),
        (
            {"virtual_shards": 1},
            1,
            "1 virtual shard (configs/demo.yaml:3) of 256 samples: the same bits on 1 process of 8 threads; here 1 "
            "for each process",
        ),
    ],
)
def test_why_there_are_so_many_shards(settings: dict[str, Any], nproc: int, said: str) -> None:
    text = render_plan(planned(CPU, settings, nproc=nproc), CPU, {"virtual_shards": "configs/demo.yaml:3"})
    assert f"\nbits           {said}\n" in text


def test_what_the_shards_cost_as_probed() -> None:
    probe = {
        "parameters": 1,
        "checkpoint_bytes": 1,
        "step_ms": 9.0,
        "peak_memory_bytes": 1,
        "num_train": 1,
        "num_eval": 1,
        "flops": "1 per sample",
        "input": {},
    }
    cost = {"shards_ms": 12.0, "accumulated_ms": 11.0, "plain_ms": 8.0}
    plan = planned(CPU, {"virtual_shards": 4})
    said = (
        "bits cost      a step of one process's share takes 12.00 ms in its shards, 11.00 ms accumulated in the same "
        "micro-batches and 8.00 ms without virtual_shards (1.50 times as long), all with these threads; sums over "
        "processes come on top\n"
    )
    assert said in render_plan(plan, CPU, {}, probe | cost)
    assert "bits" not in render_plan(planned(CPU), CPU, {}, probe)


@pytest.mark.parametrize(
    ("step_ms", "verdict"),
    [
        (100.0, "its steps take 640: not bound by input with data.num_workers=2"),
        (
            20.0,
            "its steps take 3,200: bound by input; data.num_workers=4 is the best of these, and smaller image files",
        ),
    ],
)
def test_whether_the_input_is_fast_enough_as_probed(step_ms: float, verdict: str) -> None:
    facts = dict.fromkeys(("parameters", "checkpoint_bytes", "peak_memory_bytes", "num_train", "num_eval"), 1)
    probe = {"step_ms": step_ms, "step_samples": 64, "input": {"1": 500.0, "2": 900.0, "4": 1500.4}, "flops": ""}
    text = render_plan(planned(CPU), CPU, {}, facts | probe)
    told = "input          images/s, alone, one process: 1 worker 500, 2 workers 900, 4 workers 1,500; "
    assert told + verdict in text


def test_a_fault_of_a_rank_that_there_is_not_is_refused_in_its_own_start() -> None:
    faults = {"faults": [{"kind": "exit", "rank": 1}]}
    with pytest.raises(ConfigError, match="faults: there is no rank 1 among 1 process; count from 0"):
        planned(CPU, faults)
    assert planned(CPU, faults, nproc=2).warnings == []
    assert planned(CPU, faults, attempt=RunDir(Path("/x")).attempt("002")).warnings == []


def test_what_compile_auto_means_is_unknown_until_measured() -> None:
    plan = planned(CPU, {"compile": "auto"})
    assert not plan.worker.compiles
    assert "compile        unknown (use plan --probe)\n" in render_plan(plan, CPU, {})
    probe = {"compile": {"compile": True, "why": "auto: 6 ms a step, 10 without"}}
    assert "compile        on (auto: 6 ms a step, 10 without)\n" in render_plan(plan, CPU, {}, probe)
