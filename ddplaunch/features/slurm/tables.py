"""SLURM's rows: a step of srun, a job, and the transport srun. Imported at each start of the command."""

from ddplaunch.features.schedulers.info import SchedulerRow
from ddplaunch.rows import TransportRow

_READER = "ddplaunch.features.slurm.reader"
_VARIABLES = ("SLURM*", "SBATCH_*", "SRUN_*")

SCHEDULERS = (
    SchedulerRow(
        word="slurm",
        layer="step",
        variables=("SLURM_STEP_NODELIST",),
        reader=f"{_READER}:of_step",
        own_variables=_VARIABLES,
        ranks=("SLURM_PROCID",),
    ),
    SchedulerRow(
        word="slurm",
        layer="job",
        variables=("SLURM_JOB_ID", "SLURM_JOB_NODELIST"),
        reader=f"{_READER}:of_allocation",
        own_variables=_VARIABLES,
        job_reader=f"{_READER}:read_job",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        job_processes=("slurmstepd", "salloc"),
        ends="ddplaunch.features.slurm.scontrol:job_end",
    ),
)

TRANSPORTS = (
    TransportRow(
        name="srun",
        class_path="ddplaunch.features.slurm.srun:SrunTransport",
        way="through srun",
        where="in a SLURM job",
        keeps_warm=False,
        login_command="srun --overlap --nodelist=HOST --pty bash",
    ),
)
