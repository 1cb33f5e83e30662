"""What the commands advise works when it is followed."""

from __future__ import annotations

import errno
import json
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from plait.cli import generate, launch, verify
from plait.cli.launching import launch_settings, remote
from plait.cli.options import write_text
from plait.cli.validating import command as validating
from plait.cluster import topology
from plait.config.convert.conversion import convert
from plait.config.convert.translated import set_path
from plait.config.dialects.examine import examine
from plait.config.resolving.resolve import load
from plait.config.source import parse_override, read
from plait.errors import raise_problems
from plait.planner.configuration import complete, read_file
from plait.planner.hardware import cluster
from tests.advice import Case, check, command, table

LAUNCHES = """
    nothing -> write `plait launch script.py` -> a.py
    -m -> write `plait launch -m module` -> -m a
    a -> name a Python file, or use -m for a module -> a.py | -m a
    --nnodes x a.py -> write for example 4 or 2:4 -> --nnodes 4 --rdzv-endpoint a:1 a.py | --nnodes 2:4 --rdzv-endpoint a:1 a.py
    --nnodes 2 a.py -> add --rdzv-endpoint HOST:PORT, the same on every machine, or --master-addr HOST with --node-rank -> --nnodes 2 --rdzv-endpoint a:1 a.py | --nnodes 2 --master-addr a --node-rank 0 a.py
    --nnodes 2 --node-rank 1 a.py -> add --rdzv-endpoint HOST:PORT in place of --node-rank, the same on every machine, or --master-addr HOST with --node-rank -> --nnodes 2 --rdzv-endpoint a:1 a.py | --nnodes 2 --node-rank 1 --master-addr a a.py
    --nnodes 2:3 --node-rank 1 --master-port 5 a.py -> add --rdzv-endpoint HOST:PORT in place of --node-rank and --master-port -> --nnodes 2:3 --rdzv-endpoint a:1 a.py
    --nnodes 2 --master-addr a a.py -> set it to 0 on a, 1 on the next machine -> --nnodes 2 --master-addr a --node-rank 0 a.py | --nnodes 2 --master-addr a --node-rank 1 a.py
    --nnodes 2 --master-addr a --node-rank 2 a.py -> use 0 to 1 -> --nnodes 2 --master-addr a --node-rank 0 a.py | --nnodes 2 --master-addr a --node-rank 1 a.py
    --nnodes 2 --master-addr a --node-rank 0 --max-restarts 1 a.py -> use --rdzv-endpoint HOST:PORT in place of --node-rank and --master-addr, or 0 -> --nnodes 2 --rdzv-endpoint a:1 --max-restarts 1 a.py | --nnodes 2 --master-addr a --node-rank 0 --max-restarts 0 a.py
    --nnodes 2 --rdzv-endpoint a a.py -> write for example node1:29500 -> --nnodes 2 --rdzv-endpoint node1:29500 a.py
    --nnodes 2 --rdzv-endpoint a:1 --node-rank 0 a.py -> --node-rank = 0: given together with --rdzv-endpoint, which determines the rendezvous and the numbers of the machines; leave it out -> --nnodes 2 --rdzv-endpoint a:1 a.py
    --node-rank 1 a.py -> set --nnodes to the number of machines and --master-addr to the first one, or leave it out -> --node-rank 1 --nnodes 2 --master-addr a a.py | a.py
    --nproc-per-node all a.py -> write for example 8 -> --nproc-per-node 8 a.py
    --nproc-per-node 0 a.py -> use 1 or more -> --nproc-per-node 1 a.py
    --nproc-per-node 9999 a.py -> more than 4,096 processes on one machine; use fewer -> --nproc-per-node 4096 a.py
    --max-restarts=-1 a.py -> use 0 to stop at the first failure -> --max-restarts 0 a.py
    --standby a.py -> add --max-restarts N, or leave it out -> --standby --max-restarts 1 a.py | a.py
    --grace=-1 a.py -> use 0 to stop the ranks at once -> --grace 0 a.py
    --timeout 0 a.py -> use for example 900 -> --timeout 900 a.py
    --master-port 0 a.py -> leave it out for 29500 -> a.py
    --standalone --nnodes 2 --rdzv-endpoint a:1 a.py -> which uses only this machine; leave one of them out -> --standalone a.py | --nnodes 2 --rdzv-endpoint a:1 a.py
    --rdzv-backend etcd a.py -> leave it (or PET_RDZV_BACKEND) out -> a.py
    PET_RDZV_BACKEND=etcd a.py -> leave it (or PET_RDZV_BACKEND) out -> a.py
    --nnodes 2 --rdzv-backend c10d a.py -> requires --rdzv-endpoint HOST:PORT; pass --rdzv-endpoint HOST:PORT -> --nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:1 a.py
    --nnodes 2 --rdzv-backend c10d --master-addr a --node-rank 0 a.py -> pass --rdzv-endpoint HOST:PORT instead of --master-addr and --node-rank, or leave --rdzv-backend out -> --nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:1 a.py | --nnodes 2 --master-addr a --node-rank 0 a.py
    --nnodes 2 --rdzv-backend static a.py -> pass --master-addr HOST and --node-rank N -> --nnodes 2 --rdzv-backend static --master-addr a --node-rank 0 a.py
    --nnodes 2 --rdzv-backend static --rdzv-endpoint a:1 a.py -> pass --master-addr HOST and --node-rank N instead of --rdzv-endpoint, or leave --rdzv-backend out -> --nnodes 2 --rdzv-backend static --master-addr a --node-rank 0 a.py | --nnodes 2 --rdzv-endpoint a:1 a.py
    PET_MAX_RESTARTS=x a.py -> PET_MAX_RESTARTS = 'x': not a whole number of at least 0; correct it, or unset it -> PET_MAX_RESTARTS=1 a.py | a.py
    --include a a.py -> --include: is for the machines of a hostfile, and there is none; add --hostfile, or name localhost -> --include a -H two a.py | --include localhost a.py
    --exclude b:0 a.py -> add --hostfile, or name localhost -> --exclude b:0 -H two a.py | --exclude localhost:0 a.py
    --no-ssh a.py -> add --hostfile, or leave it out -> --no-ssh -H here a.py | a.py
    HERE=1 --export HERE a.py -> add --hostfile, or leave it out -> HERE=1 --export HERE -H two a.py | a.py
    -H two --export GONE a.py -> set it, or leave the option out -> GONE=1 -H two --export GONE a.py | -H two a.py
    -H two --nnodes 2 a.py -> which defines the machines and their ranks; leave one of them out -> -H two a.py | --nnodes 2 --rdzv-endpoint a:1 a.py
    --include localhost:0 --standby --max-restarts 1 a.py -> which uses only this machine; leave one of them out -> --include localhost:0 a.py | --standby --max-restarts 1 a.py
    -H none a.py -> name a readable file -> -H two a.py
    -H empty a.py -> write one `name slots=N` per line -> -H two a.py
    -H bad a.py -> write for example `node1 slots=8` -> -H node1 a.py
    -H twice a.py -> give each machine one line with all its slots -> -H two a.py
    -H loopback a.py -> pass a name or an address that the other machines can reach -> -H two a.py | -H loopback --master-addr a a.py
    -H two --no-ssh a.py -> run the command on a machine of the hostfile, or leave --no-ssh out -> -H here --no-ssh a.py | -H two a.py
    -H two --include a --exclude b a.py -> leave one of them out -> -H two --include a a.py | -H two --exclude b a.py
    -H two --exclude a@b a.py -> leave at least one slot -> -H two --exclude a@b:1 a.py
    -H users --include root a.py -> name at least one machine -> -H users --include a a.py
    -H two --include c a.py -> 'c' is not in the hostfile; use a, b -> -H two --include a a.py | -H two --include b a.py
    -H two --include a:x a.py -> write for example `a:0` -> -H two --include a:0 a.py
    -H two --include a:7 a.py -> a has slots 0 to 1, not 7; name slots that exist -> -H two --include a:0,1 a.py
"""  # fmt: skip
HOSTFILES = {
    "two": "a slots=2\nb slots=2",
    "here": f"{socket.gethostname()} slots=2",
    "empty": "# none",
    "bad": "node1",
    "node1": "node1 slots=8",
    "twice": "a slots=2\na slots=1",
    "loopback": "localhost slots=2\nb slots=2",
    "users": "root@a slots=2\nroot@b slots=2",
}


def test_launch(tmp_path, monkeypatch, capsys):
    """Nothing is started here: tests/integration/test_launch.py starts processes."""
    monkeypatch.chdir(tmp_path)
    for name, text in HOSTFILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "a.py").write_text("")
    monkeypatch.setattr(
        launch, "_start", lambda command, settings, **rest: launch_settings.check(settings) and 0
    )
    monkeypatch.setattr(remote, "run", lambda hosts: 0)

    def run(line):
        with monkeypatch.context() as changed:
            words = line.replace("nothing", "").split()
            while words and "=" in words[0] and not words[0].startswith("-"):
                changed.setenv(*words.pop(0).split("="))
            # A line means something else with other variables.
            command(capsys)(" ".join(["launch", *words]))

    check(table(LAUNCHES, run))


VARIABLES = """
    WORLD_SIZE=2 -> set both, or unset WORLD_SIZE for a single process -> RANK=0 WORLD_SIZE=2 | nothing
    RANK=0 -> set both, or unset RANK for a single process -> RANK=0 WORLD_SIZE=2 | nothing
    RANK=x WORLD_SIZE=2 LOCAL_RANK=0 -> correct it, or unset RANK and WORLD_SIZE for a single process -> RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 | LOCAL_RANK=0
    RANK=0 WORLD_SIZE= -> correct it, or unset RANK and WORLD_SIZE for a single process -> RANK=0 WORLD_SIZE=1 | nothing
    RANK=0 WORLD_SIZE=2 LOCAL_RANK=x -> LOCAL_RANK = 'x': not a whole number of at least 0; correct it, or unset it -> RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 | RANK=0 WORLD_SIZE=2
    RANK=2 WORLD_SIZE=2 -> number ranks from 0 -> RANK=1 WORLD_SIZE=2 | RANK=0 WORLD_SIZE=2
    RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=1 -> number local ranks from 0 on every machine -> RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
    RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 -> set WORLD_SIZE to the number of all processes -> RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4
    RANK=0 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 -> check that both come from the same launcher -> RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2
    RANK=0 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 -> start equally many on every machine -> RANK=0 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2
    SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=[ -> start the processes with srun -> SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_STEP_NODELIST=a[1-2]
    SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_NODEID=0 SLURM_STEP_NODELIST=a SLURM_STEP_TASKS_PER_NODE=x -> start the processes with srun -> SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_NODEID=0 SLURM_STEP_NODELIST=a SLURM_STEP_TASKS_PER_NODE=2
    meets RANK=0 WORLD_SIZE=2 -> start the script with `plait launch` or `torchrun`, or set MASTER_ADDR to rank 0's host and MASTER_PORT to a free port there -> meets RANK=0 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=1
    GPUS=2 RANK=1 WORLD_SIZE=4 -> set LOCAL_RANK and LOCAL_WORLD_SIZE, or start -> GPUS=2 RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2
    GROUP=1/4 GPUS=2 -> set LOCAL_RANK and LOCAL_WORLD_SIZE, or start -> GROUP=1/4 GPUS=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2
    GROUP=1/4 RANK=0 WORLD_SIZE=2 -> create the process group with the launcher's rank and world size, or unset the launcher's variables -> GROUP=0/2 RANK=0 WORLD_SIZE=2 | GROUP=1/4
"""  # fmt: skip


def test_launchers_variables(monkeypatch):
    def placed(line):
        variables = dict(word.partition("=")[::2] for word in line.replace("nothing", "").split())
        gpus = int(variables.pop("GPUS", 0))
        start = topology.init_method if "meets" in variables else topology.discover
        with monkeypatch.context() as changed:
            changed.setattr(topology, "device_count", lambda: gpus)
            changed.setattr(topology.accelerator, "capacity_bytes", lambda index: 1)
            if "GROUP" in variables:
                group = variables.pop("GROUP").split("/")
                changed.setattr(topology, "_existing_group", lambda: (*map(int, group), "gloo"))
            for name, value in variables.items():
                changed.setenv(name, value)
            start()

    check(table(VARIABLES, placed))


CONVERSIONS = """
    compute_environment=AMAZON_SAGEMAKER distributed_type=NO -> use LOCAL_MACHINE -> compute_environment=LOCAL_MACHINE distributed_type=NO
    compute_environment=LOCAL_MACHINE -> use NO, MULTI_GPU, MULTI_CPU, FSDP, DEEPSPEED -> distributed_type=NO | distributed_type=MULTI_GPU | distributed_type=MULTI_CPU | distributed_type=FSDP | distributed_type=DEEPSPEED
    distributed_type=TPU -> use NO, MULTI_GPU, MULTI_CPU, FSDP, DEEPSPEED -> distributed_type=FSDP
    distributed_type=MEGATRON_LM -> plait config convert -- --tensor-model-parallel-size 2 ... -> --tensor-model-parallel-size 2
    distributed_type=NO tpu_use_cluster=true -> use false -> distributed_type=NO tpu_use_cluster=false
    distributed_type=FSDP fsdp_config=1 -> write for example {fsdp_auto_wrap_policy: ...} -> distributed_type=FSDP fsdp_config.fsdp_auto_wrap_policy=a
    distributed_type=FSDP fsdp_config.ignored_modules=a -> leave it out -> distributed_type=FSDP
    distributed_type=MULTI_GPU parallelism_config.tp_size=2 -> write parallelism_config_tp_size; Accelerate does not read the short name -> distributed_type=MULTI_GPU parallelism_config.parallelism_config_tp_size=2
    distributed_type=FSDP parallelism_config.parallelism_config_tp_size=2 -> set parallelism_config_dp_shard_size, or use distributed_type MULTI_GPU -> distributed_type=FSDP parallelism_config.parallelism_config_tp_size=2 parallelism_config.parallelism_config_dp_shard_size=2 | distributed_type=MULTI_GPU parallelism_config.parallelism_config_tp_size=2
    distributed_type=FSDP parallelism_config.parallelism_config_cp_backend=deepspeed -> use torch -> distributed_type=FSDP parallelism_config.parallelism_config_cp_backend=torch
    distributed_type=FSDP parallelism_config.parallelism_config_cp_comm_strategy=x -> is none of allgather, alltoall; use one of them -> distributed_type=FSDP parallelism_config.parallelism_config_cp_comm_strategy=allgather | distributed_type=FSDP parallelism_config.parallelism_config_cp_comm_strategy=alltoall
    distributed_type=NO dynamo_config.dynamo_use_fullgraph=true -> use false -> distributed_type=NO dynamo_config.dynamo_use_fullgraph=false
    distributed_type=NO dynamo_config.dynamo_use_dynamic=true -> use false, or leave it out -> distributed_type=NO dynamo_config.dynamo_use_dynamic=false | distributed_type=NO
    distributed_type=NO mixed_precision=fp8 -> use bf16 -> distributed_type=NO mixed_precision=bf16
    distributed_type=NO mixed_precision=x -> is none of no, fp16, bf16; use one of them -> distributed_type=NO mixed_precision=no | distributed_type=NO mixed_precision=fp16 | distributed_type=NO mixed_precision=bf16
    distributed_type=MULTI_GPU num_processes=3 num_machines=2 -> pass the processes of all machines together, as many on each -> distributed_type=MULTI_GPU num_processes=4 num_machines=2
    distributed_type=NO backend=inductor -> write rdzv_backend or dynamo_backend -> distributed_type=NO dynamo_backend=inductor
    distributed_type=NO mixed_precisoin=bf16 -> did you mean mixed_precision? -> distributed_type=NO mixed_precision=bf16
    distributed_type=NO run.steps=3 -> leave it out here, and add it to what `plait config convert` writes -> distributed_type=NO +run.steps=3
    distributed_type=FSDP fsdp_config.fsdp_version=3 -> use 2 -> distributed_type=FSDP fsdp_config.fsdp_version=2
    distributed_type=FSDP fsdp_config.fsdp_sharding_strategy=x -> use FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2, or 1 to 5 in this order -> distributed_type=FSDP fsdp_config.fsdp_sharding_strategy=FULL_SHARD | distributed_type=FSDP fsdp_config.fsdp_sharding_strategy=2
    distributed_type=FSDP fsdp_config.fsdp_sharding_strategy=HYBRID_SHARD -> set num_processes and num_machines -> distributed_type=FSDP fsdp_config.fsdp_sharding_strategy=HYBRID_SHARD num_processes=4 num_machines=2
    distributed_type=FSDP fsdp_config.fsdp_version=2 fsdp_config.fsdp_sharding_strategy=SHARD_GRAD_OP -> leave it out and write fsdp_reshard_after_forward, or use fsdp_version 1 -> distributed_type=FSDP fsdp_config.fsdp_version=2 fsdp_config.fsdp_reshard_after_forward=false | distributed_type=FSDP fsdp_config.fsdp_version=1 fsdp_config.fsdp_sharding_strategy=SHARD_GRAD_OP
    distributed_type=FSDP fsdp_config.fsdp_version=1 fsdp_config.fsdp_reshard_after_forward=false -> use FULL_SHARD or SHARD_GRAD_OP, or fsdp_version 2 -> distributed_type=FSDP fsdp_config.fsdp_version=1 fsdp_config.fsdp_reshard_after_forward=SHARD_GRAD_OP | distributed_type=FSDP fsdp_config.fsdp_version=2 fsdp_config.fsdp_reshard_after_forward=false
    distributed_type=FSDP fsdp_config.fsdp_version=2 fsdp_config.fsdp_reshard_after_forward=FULL_SHARD -> use true for FULL_SHARD, false for SHARD_GRAD_OP -> distributed_type=FSDP fsdp_config.fsdp_version=2 fsdp_config.fsdp_reshard_after_forward=true
    distributed_type=DEEPSPEED deepspeed_config.deepspeed_config_file=1 -> pass the path of a DeepSpeed file -> distributed_type=DEEPSPEED deepspeed_config.deepspeed_config_file=two.json
    distributed_type=DEEPSPEED deepspeed_config.deepspeed_config_file=bf16.json -> add it, with a stage -> distributed_type=DEEPSPEED deepspeed_config.deepspeed_config_file=two.json
    distributed_type=DEEPSPEED deepspeed_config.deepspeed_config_file=bf16.json deepspeed_config.zero_stage=2 -> leave it out, and write zero_optimization.stage in that file -> distributed_type=DEEPSPEED deepspeed_config.deepspeed_config_file=two.json
    distributed_type=DEEPSPEED deepspeed_config.deepspeed_config_file=two.json mixed_precision=bf16 -> leave it out, and write fp16 or bf16 in that file -> distributed_type=DEEPSPEED deepspeed_config.deepspeed_config_file=both.json
    fsdp=1.5 -> use true, and write the rest in fsdp_config -> fsdp=true fsdp_config.reshard_after_forward=true
    fsdp=x -> use full_shard, shard_grad_op, no_shard, hybrid_shard, hybrid_shard_zero2, auto_wrap, offload -> fsdp=full_shard | fsdp=shard_grad_op | fsdp=auto_wrap | fsdp=offload
    fsdp=no_shard -> use full_shard or shard_grad_op, or set fsdp_config.version to 1 -> fsdp=full_shard | fsdp=shard_grad_op | fsdp=no_shard fsdp_config.version=1
    fsdp=hybrid_shard fsdp_config.version=1 -> write full_shard, and set parallel.dp_shard in the converted file -> fsdp=full_shard fsdp_config.version=1 +parallel.dp_shard=2
    fsdp=true fsdp_config.offload_params=true -> write cpu_offload -> fsdp=true fsdp_config.cpu_offload=true
    fsdp=true fsdp_config.sharding_strategy=SHARD_GRAD_OP -> write reshard_after_forward -> fsdp=true fsdp_config.reshard_after_forward=false
    fsdp=true fsdp_config.xla=true -> leave it out -> fsdp=true
    fsdp=shard_grad_op fsdp_config.reshard_after_forward=true -> keep one of them -> fsdp=shard_grad_op | fsdp=true fsdp_config.reshard_after_forward=true
    --expert-tensor-parallel-size 2 -> use 1 or leave it out -> --expert-tensor-parallel-size 1
    --pipeline-model-parallel-size 2 --pipeline-model-parallel-layout x -> pass --num-virtual-stages-per-pipeline-rank -> --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
    --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3 -> pass them, or --num-virtual-stages-per-pipeline-rank instead of this -> --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3 --num-layers 12 | --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
    --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 5 --num-layers 12 -> use a number that divides the layers of a rank -> --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3 --num-layers 12
    --moe-router-enable-expert-bias -> leave it out, and pass --moe-router-bias-update-rate (Megatron-LM's default is 1e-3) -> --moe-router-bias-update-rate 1e-3
    --recompute-granularity selective --recompute-modules mlp -> leave it out; parallel.recompute.keep in the converted file says what is kept -> --recompute-granularity selective +parallel.recompute.keep=[]
    --recompute-method block -> leave it out, and set --recompute-granularity -> --recompute-granularity full
    --use-distributed-optimizer --optimizer-cpu-offload -> set zero_optimization.offload_optimizer, or parallel.activation_offload, in the converted file -> --use-distributed-optimizer +zero_optimization.offload_optimizer.device=cpu | +parallel.activation_offload.fraction=0.5 --use-distributed-optimizer
    --tensorboard-dir a -> write "tensorboard": {"enabled": true} or "wandb": {"enabled": true} in the converted file -> --bf16 +tensorboard={"enabled":true} | --bf16 +wandb={"enabled":true}
    --fp8-format hybrid -> use --bf16 -> --bf16
    --rampup-batch-size 1 2 3 -> leave it out and pass --global-batch-size -> --global-batch-size 8
    --train-samples 9 -> use --train-iters -> --train-iters 9
    --lr 1 --lr-decay-samples 9 -> use --lr-decay-iters -> --lr 1 --lr-decay-iters 9
    --lr 1 --lr-warmup-samples 9 -> use --lr-warmup-iters -> --lr 1 --lr-warmup-iters 9
    --lr 1 --lr-decay-style WSD --lr-wsd-decay-samples 9 -> use --lr-wsd-decay-iters -> --lr 1 --lr-decay-style WSD --lr-wsd-decay-iters 9
    --lr 1 --start-weight-decay 1 -> use --weight-decay -> --lr 1 --weight-decay 1
    --decoupled-lr 1 -> use --lr -> --lr 1
    --exit-interval 9 -> use --train-iters -> --train-iters 9
    --finetune -> leave it out; to start from weights only, set model.path -> --bf16 +model.path=a
    --use-distributed-optimizer --use-torch-fsdp2 -> keep one of them -> --use-distributed-optimizer | --use-torch-fsdp2
    --weight-decay 1 -> Megatron-LM has no default for its learning rate; pass it -> --weight-decay 1 --lr 1
    --fp16 --initial-loss-scale 1000 -> use for example 65536 -> --fp16 --initial-loss-scale 65536
    --optimizer x --lr 1 -> is none of adam, sgd, muon, lion; use one of them -> --optimizer adam --lr 1 | --optimizer sgd --lr 1 | --optimizer muon --lr 1 | --optimizer lion --lr 1
    --bf16 true -> leave the value out -> --bf16
    --lr 1 2 -> write one after it -> --lr 1
    --nosuch -> leave it out, or set the key of the file that it stands for -> --bf16
"""  # fmt: skip
"""Keys of Accelerate or the Trainer, or flags of Megatron-LM. `+` adds a setting to what is written."""


def converted(line):
    """Convert a configuration, and load what is written."""
    words = line.split()
    added = [word[1:] for word in words if word.startswith("+")]
    source = [word for word in words if not word.startswith("+")]
    if not source[0].startswith("--"):
        tree: dict[str, Any] = {}
        for word in source:
            path, value = parse_override(word)
            assert set_path(tree, ".".join(path), value) is None
        source = tree
    conversion = convert(source)
    raise_problems(conversion.problems)
    load(conversion.tree, added)


def test_conversions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stage, bf16 = {"zero_optimization": {"stage": 2}}, {"bf16": {"enabled": True}}
    for name, content in {"two": stage, "bf16": bf16, "both": stage | bf16}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    check(table(CONVERSIONS, converted))


PLANS = """
    train_batch_size= -> set it to the number of samples per optimizer step -> train_batch_size=8
    model= -> set model.config or model.path -> model.config.model_type=llama
    bf16.enabled=auto -> write true or false -> bf16.enabled=true | bf16.enabled=false
    parallel.recompute={"mode":"budget","budget_gib":1} -> use "auto" or none, full, selective, and leave parallel.recompute.budget_gib out -> parallel.recompute.mode=auto | parallel.recompute.mode=selective
    parallel.recompute={"mode":"full","budget_gib":1} -> but a fixed mode has none; leave it out -> parallel.recompute.mode=full
    parallel={"tp":"auto","pipeline":{"blocks_per_stage":[1,3]}} -> set parallel.pp, or leave parallel.pipeline.blocks_per_stage out -> parallel={"tp":"auto","pp":2,"pipeline":{"blocks_per_stage":[1,3]}} | parallel.tp=auto
    parallel={"tp":"auto","pipeline":{"schedule":"looped-bfs"}} -> use gpipe, 1f1b, interleaved-1f1b, interleaved-zero-bubble, zbv, dualpipev -> parallel={"tp":"auto","pp":2,"pipeline":{"schedule":"gpipe"}} | parallel={"tp":"auto","pp":2,"pipeline":{"schedule":"zbv"}}
"""  # fmt: skip
"""Settings of a file whose layout is planned."""


def test_plans():
    def planned(text):
        path, value = parse_override(text)
        parallel = {"tp": "auto", "pp": 1}
        tree = {"train_batch_size": 8, "model": {"config": SMALL}, "parallel": parallel}
        if value == "":
            del tree[path[0]]
            examined = examine(read(tree), [])
        else:
            examined = examine(read(tree), [(path, value)])
        complete(read_file(examined), cluster=cluster("h100", 2))

    check(table(PLANS, planned))


COMMANDS = """
    plan -> name a public model (`plait plan models`), a config.json, or a training configuration -> plan models | PLAN | plan --model config.json GPUS | plan run.json GPUS
    plan --model gpt2 --nnodes 2 --batch 4 --seq 512 -> add --nproc-per-node, or --gpu for the usual number of that GPU -> plan --model gpt2 --nnodes 1 --nproc-per-node 2 BATCH | plan --model gpt2 --nnodes 1 --gpu h100 --batch 8 --seq 512 --fix pp=1,stage=3
    plan --model gpt2 --world-size 7 --nnodes 2 --nproc-per-node 2 BATCH -> leave --world-size out, or correct the other options -> plan --model gpt2 --nnodes 2 --nproc-per-node 2 BATCH
    plan --model gpt2 --gpu h100 BATCH -> add it, for example --world-size 8 -> plan --model gpt2 --gpu h100 --world-size 8 BATCH
    plan --model gpt2 --gpu h100 --world-size 9 --nproc-per-node 4 BATCH -> use 8 or 12, or pass a --nproc-per-node that divides 9 -> plan --model gpt2 --gpu h100 --world-size 8 --nproc-per-node 4 BATCH | plan --model gpt2 --gpu h100 --world-size 9 --nproc-per-node 3 --batch 9 --seq 512 --fix pp=1,stage=3
    plan --model gpt3 GPUS -> did you mean gpt2, gpt3-13b, gpt3-6.7b? -> PLAN
    plan --model gpt2 --gpu h1000 --world-size 2 -> did you mean h100? -> PLAN
    PLAN --memory-gib 0 -> correct it, or leave it out -> PLAN --memory-gib 40 | PLAN
    PLAN --precision int8 -> use bf16, fp16 or fp32 -> PLAN --precision bf16
    plan --model gpt2 --gpu v100 --world-size 2 BATCH --precision bf16 -> use one of fp16, fp32 -> plan --model gpt2 --gpu v100 --world-size 2 BATCH --precision fp16
    plan --model gpt2 GPUS --batch 0 -> pass 1 or more -> PLAN
    PLAN --fix tp -> for example tp=4 -> plan --model gpt2 --gpu h100 --world-size 4 BATCH --fix tp=4
    PLAN --fix recompute=all -> use none, full, selective, budget -> PLAN --fix recompute=none | PLAN --fix recompute=full | PLAN --fix recompute=selective | PLAN --fix recompute=budget
    PLAN --fix schedule=zb-h1 -> use none, gpipe, 1f1b, interleaved, interleaved-zb, zbv, dualpipev, interleaved-1f1b, interleaved-zero-bubble -> PLAN --fix schedule=none | plan --model gpt2 GPUS --batch 8 --seq 512 --fix schedule=interleaved-zero-bubble,stage=1
    PLAN --fix tp=x -> write for example tp=1 -> PLAN --fix tp=1
    PLAN --fix tp=1,tp=2 -> keep one of them -> PLAN --fix tp=1 | PLAN --fix tp=2
    PLAN --fix tp=3 -> 2 devices and 2 % 3 = 2; change it, or let the search choose -> PLAN --fix tp=2 | PLAN
    PLAN --out a.txt -> pass a name that ends in .json -> PLAN --out a.json
    plan run.json GPUS --out run.json -> use another name, or delete it first -> plan run.json GPUS --out b.json
    plan infer --model gpt2 --tp 2 -> name some with --gpu, or leave it out -> plan infer --model gpt2 --tp 2 --gpu h100 | plan infer --model gpt2
    plan infer --model gpt2 --gpu h100 --tp 2 --cpu-budget 1GiB -> leave one of them out -> plan infer --model gpt2 --gpu h100 --tp 2 | plan infer --model gpt2 --gpu h100 --cpu-budget 1GiB
    plan infer --model gpt2 --gpu h100 --tp 12 -> a machine has 8 devices, and tensor parallelism stays inside one; use one of 1, 2, 3, 4, 6 -> plan infer --model gpt2 --gpu h100 --tp 6
    plan infer --model gpt2 --gpu h100 --tp 4 --pp 4 -> 16 devices, but there are 8; use fewer -> plan infer --model gpt2 --gpu h100 --tp 4 --pp 2
    plan infer --model gpt2 --gpu-budget 1GiB -> use --cpu-budget instead, to compute on the CPU -> plan infer --model gpt2 --cpu-budget 1GiB
    plan infer --model gpt2 --offload-cache -> leave it out -> plan infer --model gpt2
    plan infer --model gpt2 --prompt-tokens 1024 -> (--prompt-tokens 1,024 and --new-tokens 128), but the model's positions end at 1,024 (max_position_embeddings); pass smaller ones -> plan infer --model gpt2 --prompt-tokens 896
    layout run.json --sequence-length 8 -> add --peak, or leave it out -> layout run.json --sequence-length 8 --peak | layout run.json
    layout bare.json -> add one, or pass --model -> layout run.json | layout bare.json --model config.json
    layout run.json --nnodes 1000 --nproc-per-node 1000 -> at most 131,072 are shown; pass fewer -> layout run.json --nnodes 1 --nproc-per-node 8
    layout run.json --set parallel.tp=3 -> use 1, 2 or 4 -> layout run.json --set parallel.tp=1 | layout run.json --set parallel.tp=4
    layout run.json --set parallel.tp=2 --nproc-per-node 3 -> start 2 or 4 processes, or change a degree -> layout run.json --set parallel.tp=2 --nproc-per-node 4 | layout run.json --set parallel.tp=1 --nproc-per-node 2
    schedule dualpipev --microbatches 4 -> --microbatches = 4: dualpipev with pp 4 has 8 stages and needs as many micro-batches; use 8 or more, or the schedule zbv, which takes any number -> schedule dualpipev --microbatches 8 | schedule zbv --microbatches 4
    schedule 1F1B -> did you mean `1f1b`? -> schedule 1f1b
    schedule 1f1b --stages-per-rank 2 -> --stages-per-rank = 2: 1f1b has exactly 1 on a rank; use 1, or one of interleaved-1f1b, -> schedule 1f1b --stages-per-rank 1 | schedule interleaved-1f1b --stages-per-rank 2
    schedule 1f1b --pp 0 -> --pp = 0: a pipeline has at least 1 rank; use 1 or more -> schedule 1f1b --pp 1
    schedule 1f1b --pp 1000 --microbatches 1000 -> but at most 524,288 can be drawn; pass fewer -> schedule 1f1b --pp 2 --microbatches 4
    config convert accelerate.json --out run.json -> pass another name, or remove it first -> config convert accelerate.json --out c.json
    config convert accelerate.json --out gone/c.json -> gone is not a folder; create it first, or pass a file in an existing folder -> config convert accelerate.json --out ./d.json
    config explain accelerate.json -> run: plait config convert accelerate.json -> config convert accelerate.json
    doctor --links --nccl -> pass only one of them -> doctor --links | doctor --nccl
    doctor --minutes 3 -> add --validate, or leave it out -> doctor --minutes 3 --validate | doctor
    doctor --seconds 3 -> add --links, or leave it out -> doctor --seconds 3 --links | doctor
    doctor --validate --seconds 3 -> use --minutes, or leave it out -> doctor --validate --minutes 3 | doctor --validate
    doctor --validate --minutes 0 -> use for example 8 -> doctor --validate --minutes 8
    doctor --validate --list --only all -> use one of ceilings, waits, parity, -> doctor --validate --list --only ceilings | doctor --validate --list --only waits | doctor --validate --list --only parity/*
    doctor --links --seconds 0 -> use for example 4 -> doctor --links --seconds 4
    doctor --links --nproc-per-node 1 -> start two or more -> doctor --links --nproc-per-node 2
    verify run.json --tolerance 0 -> use for example 1e-10 -> verify run.json --tolerance 1e-10
    verify run.json --timeout 0 -> use for example 600 -> verify run.json --timeout 600
    verify run.json --steps 0 -> use 1 or more -> verify run.json --steps 1
    verify run.json --device cuda -> 2 processes need a GPU each, but there are 0; use --device cpu -> verify run.json --device cpu
    verify bare.json -> add "model": {"config": {"model_type": "llama"}}, or --model FOLDER, NAME or package.module:function -> verify bare.json --set model={"config":{"model_type":"llama"}} | verify bare.json --model config.json | verify bare.json --model small_models:build
    verify run.json --model gone/config.json -> name a folder, a file config.json or package.module:function -> verify run.json --model config.json | verify run.json --model small_models:build
    verify run.json --model small_models:number -> it must return a module that maps tokens to logits, or (module, loss, micro_batch) with -> verify run.json --model small_models:build | verify run.json --model small_models:with_batches
    verify run.json --model small_models:linear -> the module has no embedding, so it is not a language model; return (module, loss, micro_batch), where -> verify run.json --model small_models:with_batches
"""  # fmt: skip
MODELS = """
import torch, plait
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))

def linear():
    return nn.Linear(8, 16)

def number():
    return 1

def with_batches():
    def batch(samples, generator):
        return torch.randn(samples, 8, generator=generator, dtype=torch.float64)
    return linear(), plait.per_sample(lambda output, batch: output.square().mean()), batch
"""
SMALL = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64,
}  # fmt: skip


def test_commands(tmp_path, monkeypatch, capsys):
    """Commands that only read and compute. Processes are not started."""
    monkeypatch.chdir(tmp_path)
    plait = command(capsys)
    run = {"train_batch_size": 8, "data": {"source": "python-stdlib", "sequence_length": 16}}
    files = {
        "config.json": SMALL,
        "bare.json": run,
        "run.json": {**run, "model": {"config": SMALL}},
        "accelerate.json": {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP"},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "small_models.py").write_text(MODELS)
    monkeypatch.setattr(launch, "run", lambda module, settings: 0)
    monkeypatch.setattr(validating, "validate", lambda **settings: 0)
    monkeypatch.setattr(verify, "_start", lambda plan, seconds: sys.exit(0))
    short = {"PLAN": "plan --model gpt2 GPUS BATCH", "GPUS": "--gpu h100 --world-size 2", "BATCH": "--batch 8 --seq 512 --fix pp=1,stage=3"}  # fmt: skip

    def followed(line):
        for name, text in short.items():
            line = line.replace(name, text)
        plait(line)

    check(table(COMMANDS, followed))


def test_full_disks(tmp_path, monkeypatch):
    """/dev/full is a full disk for a file. A folder on one is imitated, because it needs a mount."""
    full = tmp_path / "full"
    other = tmp_path / "other"
    for folder in (full, other):
        folder.mkdir()
    written = Path.write_text

    def write(path, *arguments, **options):
        if full in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(path, *arguments, **options)

    def arguments_in(folder):
        monkeypatch.setenv("TMPDIR", str(folder))
        # Python chooses the folder once per process.
        monkeypatch.setattr(tempfile, "tempdir", None)
        # The command starts processes after this step.
        with generate._argument_file(ARGUMENTS, []) as file:
            assert file.is_relative_to(folder)

    def output_in(path):
        write_text("--out", path, "text")

    monkeypatch.setattr(Path, "write_text", write)
    check([
        Case(("free some space, or name another folder with TMPDIR",), partial(arguments_in, full), partial(arguments_in, other)),
        Case(("--out /dev/full: cannot be written (No space left on device); free some space there, or pass another path",), partial(output_in, Path("/dev/full")), partial(output_in, other / "out.json")),
    ])  # fmt: skip


ARGUMENTS = generate.GenerateArguments("m", None, "stored", 2, 1, "a", None, None, 1, None)
