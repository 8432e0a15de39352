"""The rows of these schedulers. ``schedulers.table`` tries those of one ``layer`` in their order here.

Imported at each start of the command: imports no reader.
"""

from ddplaunch.features.schedulers.info import SchedulerRow

_READERS = "ddplaunch.features.other_schedulers.readers"
_ENDS = "ddplaunch.features.other_schedulers.job_end"

SCHEDULERS = (
    SchedulerRow(
        word="openmpi",
        layer="mpi",
        variables=("OMPI_COMM_WORLD_RANK",),
        reader=f"{_READERS}:open_mpi",
        own_variables=("OMPI_*", "PMIX_*", "PRTE_*"),
        ranks=("OMPI_COMM_WORLD_RANK", "PMIX_RANK"),
    ),
    SchedulerRow(
        word="jsrun",
        layer="mpi",
        variables=("JSM_NAMESPACE_RANK",),
        reader=f"{_READERS}:jsrun",
        own_variables=("JSM_*",),
        ranks=("JSM_NAMESPACE_RANK",),
    ),
    SchedulerRow(
        word="pals",
        layer="mpi",
        variables=("PALS_RANKID",),
        reader=f"{_READERS}:pals",
        own_variables=("PALS_*",),
        ranks=("PALS_RANKID",),
    ),
    SchedulerRow(
        word="mpich",
        layer="mpi",
        variables=("PMI_RANK", "MPI_LOCALRANKID"),  # srun --mpi=pmi2 sets PMI_RANK too.
        reader=f"{_READERS}:mpich",
        own_variables=("PMI_*", "MPI_LOCAL*"),
        ranks=("PMI_RANK",),
    ),
    SchedulerRow(
        word="lsf",
        layer="job",
        variables=("LSB_JOBID",),
        reader=f"{_READERS}:lsf",
        own_variables=("LSB_*", "LSF_*"),
        job=("LSB_JOBID", "LSB_JOBINDEX"),
        ends=f"{_ENDS}:lsf",
    ),
    SchedulerRow(
        word="pbs",
        layer="job",
        variables=("PBS_JOBID", "PBS_NODEFILE"),
        reader=f"{_READERS}:pbs",
        own_variables=("PBS_*",),
        job=("PBS_JOBID",),
        ends=f"{_ENDS}:pbs",
    ),
    SchedulerRow(
        word="kubernetes",
        layer="job",
        variables=("JOB_COMPLETION_INDEX",),
        reader=f"{_READERS}:kubernetes",
        own_variables=("JOB_COMPLETION_INDEX",),
    ),
)
