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
# A job that is requeued resumes where it was. Options of sbatch on the command line win over those above; arguments
# after the script are flags of pretrain_gpt.py. Where computing machines have no network, download first, on one that
# has it:
#
#   OUT=/shared/fineweb_edu STOP_AFTER=text bash examples/fineweb_edu/run.sh
set -euo pipefail
# Slurm runs a copy of this file from elsewhere; the job was submitted from the project's folder.
exec srun bash "${SLURM_SUBMIT_DIR:-.}/examples/fineweb_edu/run.sh" "$@"
