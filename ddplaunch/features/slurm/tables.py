"""SLURM's rows: a step of srun, a job, and the transport srun. Imported at each start of the command."""

from ddplaunch.features.schedulers.info import SchedulerRow
from ddplaunch.rows import TransportRow

_READER = "ddplaunch.features.slurm.reader"
_VARIABLES = ("SLURM*", "SBATCH_*", "SRUN_*")

SCHEDULERS = (
    SchedulerRow(
        word="slurm",
        starts="step",
        variables=("SLURM_STEP_NODELIST",),
        read=f"{_READER}:of_step",
        own=_VARIABLES,
        ranks=("SLURM_PROCID",),
    ),
    SchedulerRow(
        word="slurm",
        starts="job",
        variables=("SLURM_JOB_ID", "SLURM_JOB_NODELIST"),
        read=f"{_READER}:of_allocation",
        own=_VARIABLES,
        read_job=f"{_READER}:read_job",
        job=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        job_processes=("slurmstepd", "salloc"),
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
