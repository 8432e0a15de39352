# shellcheck shell=bash
# Sourced by the scripts next door, which stand in the repository's root: makes .venv and installs into it.
#
# Plain torch from PyPI brings gigabytes of CUDA packages. Without a GPU, point pip to a CPU build of the version in
# constraints.txt first; it counts as the same version and is preferred:
#
#     export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

fail() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# install_debian PACKAGE...: installs what is missing, as root on a Debian-like system; elsewhere it does nothing.
install_debian() {
    [[ $EUID -eq 0 ]] && command -v apt-get dpkg-query >/dev/null || return 0
    local package missing=()
    for package in "$@"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
    done
    [[ ${#missing[@]} -eq 0 ]] && return 0
    echo "Installing Debian packages: ${missing[*]}" >&2
    quietly apt-get update
    quietly env DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends "${missing[@]}"
}

# quietly COMMAND...: shows what the command prints only if it fails.
quietly() {
    local output
    output=$("$@" 2>&1 </dev/null) && return 0
    printf '%s\n' "$output" >&2
    return 1
}

find_python() {
    local python
    for python in ${PYTHON:+"$PYTHON"} python3 python3.{14,13,12,11,10}; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$python"
            return
        fi
        [[ $python != "${PYTHON:-}" ]] || break
    done
    fail "needs Python >= 3.10${PYTHON:+, which PYTHON=$PYTHON is not}. Install one, or name it: PYTHON=... $0"
}

has_venv() {
    local made_with
    # A venv that was moved or copied still names its old place in its scripts.
    grep -qsF "$(pwd -P)/.venv" .venv/bin/activate && made_with=$(describe .venv/bin/python) &&
        [[ -z ${PYTHON:-} || $(describe "$PYTHON") == "$made_with" ]]
}

# describe PYTHON: which Python that is, a venv's being the one it was made with.
describe() {
    "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null
}

# Debian ships venv's other half, ensurepip, in a package of its own.
make_venv() {
    local python package
    # --clear would empty what it leads to, which is not ours.
    [[ ! -L .venv ]] || fail ".venv is a link. Remove it, and a venv is made in its place."
    python=$(find_python)
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
        install_debian "$package" || true
        "$python" -c 'import ensurepip, venv' 2>/dev/null || fail "$python cannot make a venv. Install $package first."
    fi
    quietly "$python" -m venv --clear .venv || fail "could not make .venv with $python"
}

pip_install() {
    quietly .venv/bin/pip install --constraint scripts/constraints.txt "$@" || fail "pip failed; its messages are above"
}

# ensure_venv GROUP: after it, .venv has the package (editable), its dependencies and the dependency group's.
# pip runs again only when pyproject.toml or constraints.txt changed since.
ensure_venv() {
    local group=$1 wanted stamp
    stamp=.venv/stamp-$group
    wanted=$(cat pyproject.toml scripts/constraints.txt | cksum)
    has_venv || make_venv
    [[ $(cat "$stamp" 2>/dev/null) == "$wanted" ]] && return 0
    echo "Installing into .venv; the first time, torch takes a while ..." >&2
    # A new enough pip first: Python's own may not know --group and --build-constraint.
    pip_install --upgrade pip
    pip_install --build-constraint scripts/constraints.txt --editable . --group "$group"
    echo "$wanted" >"$stamp"
}
