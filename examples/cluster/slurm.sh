#!/bin/bash
# Two nodes of 8 GPUs. Before the time limit the run saves and ends, and the job is queued again and goes on:
#   sbatch examples/cluster/slurm.sh --save_path /shared/my_run
# in a folder that all nodes see, with lightppo on PATH. Flags behind the script win over the recipe.
#SBATCH --job-name=lightppo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --output=lightppo-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
# Seconds before the limit; longer than --signal_grace, and that longer than a step and a checkpoint.
#SBATCH --signal=USR1@600

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
export WORLD_SIZE="$SLURM_NTASKS" LOCAL_WORLD_SIZE="$SLURM_NTASKS_PER_NODE"

# A task is a rank, and no launcher is between: Slurm's signals come to the tasks, not to what these start.
# --wait ends the others a minute after a rank has failed.
# shellcheck disable=SC2016  # the variables are those of the tasks
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 --wait=60 \
    bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"' rank \
    lightppo ppo --config examples/recipes/runs/two_nodes.yaml --signal_grace 540 "$@"
code=$?

# 128 + SIGUSR1: stopped for the time limit. A finished run ends with 0, a failed one with 1 or 2, scancel with 143.
if [ "$code" -eq 138 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
