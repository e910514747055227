"""Submit a training to SLURM with submitit, or run it on this machine (``--cluster local``): as long as the training.

Under SLURM each task of the job runs ``recycle-run``, which starts one worker; on this machine one ``recycle-run``
starts all of them. What follows ``--`` is the training command.

    pip install '.[examples]'
    python examples/submit.py --nodes 4 --tasks-per-node 2 -- python train.py
"""

import argparse
import sys

import submitit

DEMO = [sys.executable, "examples/train_gpt.py", "experiment=demo"]


def main() -> None:
    """Submits the command, and waits for what it prints."""
    parser = argparse.ArgumentParser(description="Submits a training command.")
    parser.add_argument("--cluster", choices=["slurm", "local"], default="slurm")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--tasks-per-node", type=int, default=2)
    parser.add_argument("--folder", default="jobs/%j", help="for submitit's files")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command that trains")
    options = parser.parse_args()
    command = [word for word in options.command if word != "--"] or DEMO
    executor = submitit.AutoExecutor(folder=options.folder, cluster=options.cluster)
    run = [sys.executable, "-m", "lightning_recycle.engines.recycle_run"]
    if options.cluster == "slurm":
        executor.update_parameters(
            nodes=options.nodes,
            tasks_per_node=options.tasks_per_node,
            slurm_srun_args=["--no-kill"],
            slurm_additional_parameters={"no_kill": True},
        )
    else:
        executor.update_parameters(timeout_min=60)
        run += ["--nproc-per-node", str(options.nodes * options.tasks_per_node)]
    job = executor.submit(submitit.helpers.CommandFunction([*run, *command]))
    print(f"Job {job.job_id}; its output is in {job.paths.stdout}.")
    print(job.result())


if __name__ == "__main__":
    main()
