"""What of the launcher's environment goes to other machines: settings do, what is this machine's own does not."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.errors import UsageError
from ddplaunch.protocol.env_forwarding import RULES, forwarded, masked_lines, parse_env_file, rule_of
from ddplaunch.protocol.environment import FLIGHT_RECORD_NAMES, NAMES
from tests.support import golden, texts

SETTINGS = (
    *("PYTHONPATH", "PYTHONUNBUFFERED", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_AFFINITY"),
    *("NCCL_DEBUG", "NCCL_IB_HCA", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_LOGS", "TORCHINDUCTOR_CACHE_DIR"),
    *FLIGHT_RECORD_NAMES,
    *("PYTORCH_CUDA_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING", "CUDA_HOME", "CUBLAS_WORKSPACE_CONFIG", "GLOO_LOG_LEVEL"),
    *("FI_PROVIDER", "UCX_TLS", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_CACHE", "WANDB_PROJECT", "WANDB_MODE"),
    *("TOKENIZERS_PARALLELISM", "TORCH_COMPILE_CACHE_KEY_TAG", "MLFLOW_TRACKING_URI"),
)
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "my_password", "PGPASSWD")
OF_THIS_MACHINE = (
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES"),
    *("SSH_AUTH_SOCK", "SLURM_PROCID", "SLURMD_NODENAME", "HOSTNAME", "HOME", "USER", "LOGNAME", "SHELL", "PWD"),
    *("DISPLAY", "TMPDIR", "XDG_RUNTIME_DIR", "DDPLAUNCH_HOSTS", "PET_NNODES", "CUDA_INJECTION64_PATH"),
    "BASH_FUNC_f%%",
)
OTHER = ("PATH", "LANG", "MY_SETTING", "CONDA_PREFIX", "EDITOR")
SET_BY_US = sorted(
    NAMES.keys()
    - {"OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", *FLIGHT_RECORD_NAMES}
    - {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_RAS_ADDR", "RES_OPTIONS"}
)


def of(*names: str) -> dict[str, str]:
    """An environment in which each of these is set."""
    return {name: f"here: {name}" for name in names}


EVERYTHING = of(*SETTINGS, *SECRETS, *OF_THIS_MACHINE, *OTHER, *SET_BY_US)


# Without being asked.


def test_settings_go_along_and_nothing_else():
    assert forwarded(EVERYTHING, []) == of(*SETTINGS)


def test_every_name_falls_under_the_last_rule_if_under_no_other():
    assert RULES[-1].names == ("*",)
    assert rule_of("") is rule_of("something") is RULES[-1]


# -x NAME and -x NAME=VALUE.


@pytest.mark.parametrize("name", [*SECRETS, *OF_THIS_MACHINE, *OTHER, *SETTINGS])
def test_a_name_gives_whatever_it_is_the_name_of(name: str):
    assert forwarded(EVERYTHING, [name]) == {**of(*SETTINGS), **of(name)}


def test_what_is_asked_for_goes_along_beside_the_settings():
    """A question is the words of ``-x``, and after `` | `` the env file."""

    def beside(question: str) -> dict[str, str]:
        asked, _, file = question.partition(" | ")
        given = forwarded({**EVERYTHING, "my_a": "1", "AB": "here"}, asked.split(" ") if asked else [], file)
        return {name: value for name, value in given.items() if (name, value) not in of(*SETTINGS).items()}

    golden.check_answers("forwarded", beside)


@pytest.mark.parametrize("text", ["", "A B=x", "A=\0", "A\n=x"])
def test_what_no_variable_can_be_is_an_error(text: str):
    with pytest.raises(UsageError, match=r"^-x"):
        forwarded({}, [text])


@pytest.mark.parametrize("name", SET_BY_US)
def test_what_ddplaunch_sets_itself_cannot_be_given(name: str):
    for asked, file in ([name], None), ([f"{name}=5"], None), ([], f"{name}=5"):
        with pytest.raises(UsageError, match=f"ddplaunch sets {name}"):
            forwarded(EVERYTHING, asked, file)


def test_nothing_given_is_changed():
    environ = dict(EVERYTHING)
    forwarded(environ, ["A=1", "*"], "B=2")
    assert environ == EVERYTHING


# The env file.


def test_a_line_of_the_env_file_says_a_value_or_nothing():
    golden.check_answers("env_files", parse_env_file)


@pytest.mark.parametrize("ends", ["\n", "\r\n", "\r"])
def test_a_file_may_have_comments_and_empty_lines(ends: str):
    lines = ["\ufeff# settings", "", "   ", "  # A=0", "A=1", "export B='2'", "A=3"]
    assert parse_env_file(ends.join(lines) + ends) == {"A": "3", "B": "2"}


@pytest.mark.parametrize("line", ["A B=hunter2", "A='hunter2", "RANK=hunter2", "A=hunter2\0"])
def test_an_error_never_shows_a_value(line: str):
    with pytest.raises(UsageError) as caught:
        forwarded({}, [], line)
    with pytest.raises(UsageError) as caught_option:
        forwarded({}, [line.replace("A='", "9=")])
    for error in caught.value, caught_option.value:
        assert "hunter2" not in error.message + error.hint


@given(st.text(texts.ENCODABLE))
def test_any_file_is_read_or_refused(text: str):
    with contextlib.suppress(UsageError):
        assert all(name.isidentifier() and "\0" not in value for name, value in parse_env_file(text).items())


@given(st.lists(st.text(texts.ENCODABLE)))
def test_any_option_is_read_or_refused(asked: list[str]):
    with contextlib.suppress(UsageError):
        assert forwarded(EVERYTHING, asked).keys() >= {*SETTINGS}


# What is shown.


def test_the_list_is_sorted():
    assert masked_lines({"NCCL_DEBUG": "INFO", "A": "", "my_secret": "x"}) == ["A=", "NCCL_DEBUG=INFO", "my_secret=***"]


def test_secrets_are_masked_and_settings_are_not():
    """Also a login in a URL."""

    def masked(question: str) -> str:
        name, _, value = question.partition("=")
        return masked_lines({name: value})[0]

    golden.check_answers("masked_variables", masked)
    assert masked_lines(of(*SETTINGS)) == [f"{name}=here: {name}" for name in sorted(SETTINGS)]


def test_each_variable_is_one_printable_line_of_bounded_length():
    lines = masked_lines({"A": "two\nlines\x1b[31m", "B": "\udcff", "C": "x" * 100_000, "D\n": "1"})
    assert lines[0] == r"A=two\nlines\x1b[31m"
    assert all(line.isprintable() and len(line) < 1100 for line in lines)


def test_the_table_names_all_that_ddplaunch_sets_itself():
    assert {name for rule in RULES for name in rule.names if rule.when == "never"} == {*SET_BY_US}
