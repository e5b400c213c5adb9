#!/usr/bin/env bash
#SBATCH --job-name=fineweb_edu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=fineweb_edu-%j.log
#SBATCH --open-mode=append
#
# examples/fineweb_edu/run.sh as a Slurm job on one machine:
#
#   sbatch --export=ALL,OUT=/shared/fineweb_edu examples/fineweb_edu/slurm.sh
#
# A requeued job resumes. Options of sbatch on the command line override those above; arguments after the script are
# flags of megafp8 pretrain. If compute nodes have no network, download the text first on a machine with one:
#
#   OUT=/shared/fineweb_edu STOP_AFTER=text bash examples/fineweb_edu/run.sh
set -euo pipefail
# Slurm runs a copy of this file in another folder; the job must be submitted from the project's folder.
exec srun bash "${SLURM_SUBMIT_DIR:-.}/examples/fineweb_edu/run.sh" "$@"
