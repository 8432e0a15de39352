"""The rows of these schedulers. ``schedulers.table`` tries those that start the same in their order here.

Imported at each start of the command: imports no reader.
"""

from ddplaunch.features.schedulers.info import SchedulerRow

_READERS = "ddplaunch.features.other_schedulers.readers"

SCHEDULERS = (
    SchedulerRow(
        word="openmpi",
        starts="mpi",
        variables=("OMPI_COMM_WORLD_RANK",),
        read=f"{_READERS}:open_mpi",
        own=("OMPI_*", "PMIX_*", "PRTE_*"),
        ranks=("OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
    ),
    SchedulerRow(
        word="jsrun",
        starts="mpi",
        variables=("JSM_NAMESPACE_RANK",),
        read=f"{_READERS}:jsrun",
        own=("JSM_*",),
        ranks=("JSM_NAMESPACE_RANK",),
    ),
    SchedulerRow(
        word="pals",
        starts="mpi",
        variables=("PALS_RANKID",),
        read=f"{_READERS}:pals",
        own=("PALS_*",),
        ranks=("PALS_RANKID",),
    ),
    SchedulerRow(
        word="mpich",
        starts="mpi",
        variables=("PMI_RANK", "MPI_LOCALRANKID"),  # srun --mpi=pmi2 sets PMI_RANK too.
        read=f"{_READERS}:mpich",
        own=("PMI_*",),
        ranks=("PMI_RANK",),
    ),
    SchedulerRow(
        word="lsf",
        starts="job",
        variables=("LSB_JOBID",),
        read=f"{_READERS}:lsf",
        own=("LSB_*",),
        job=("LSB_JOBID", "LSB_JOBINDEX"),
    ),
    SchedulerRow(
        word="pbs",
        starts="job",
        variables=("PBS_JOBID", "PBS_NODEFILE"),
        read=f"{_READERS}:pbs",
        own=("PBS_*",),
        job=("PBS_JOBID",),
    ),
    SchedulerRow(
        word="kubernetes",
        starts="job",
        variables=("JOB_COMPLETION_INDEX",),
        read=f"{_READERS}:kubernetes",
        own=("JOB_COMPLETION_INDEX",),
    ),
)
