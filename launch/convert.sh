#!/usr/bin/env bash
# Convert a checkpoint on many nodes that see the same file system; every node writes its share of the files, the first one finishes.
#
#     sbatch --nodes=16 launch/convert.sh --hf DeepSeek-V3 --out dsv3-mcore --max-memory 64GiB
#     sbatch --nodes=16 launch/convert.sh --ckpt runs/ppo/checkpoints/step_000200 --out dsv3-rl --fp8-block
#
# Arguments are those of `moerl convert`. A job that was killed goes on where it stopped when it is submitted again.
# From the environment: MOERL, the command (default "moerl"), and SBATCH_ACCOUNT, SBATCH_PARTITION, SBATCH_TIMELIMIT as sbatch reads them.
#SBATCH --job-name=moerl-convert
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
set -euo pipefail

workers=()
[[ " $* " == *" --workers"[\ =]* ]] || workers=(--workers "${SLURM_CPUS_ON_NODE:-4}")
# A node that fails ends the job: the first node would wait for its files.
exec srun --kill-on-bad-exit=1 --ntasks-per-node=1 --label ${MOERL:-moerl} convert "$@" "${workers[@]}"
