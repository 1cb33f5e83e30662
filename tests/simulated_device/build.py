"""Builds the simulated device with the system's compiler, once per version of torch and sources."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
SOURCES = FOLDER / "sources"
CORE = ("streams", "races", "memory", "device", "kernels", "journal", "profiler", "interface")
GROUP = "process_group"
# NDEBUG is set as in torch's build. Some of its classes have other fields without it.
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w", "-DNDEBUG")


class CannotBuild(Exception):
    """The libraries cannot be built. The message is the reason."""


def cache_folder():
    """Return a folder of this user outside of the repository."""
    folder = os.environ.get("SIMULATED_DEVICE_CACHE")
    if folder:
        return Path(folder)
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "plait-tests" / "simulated_device"


def built():
    """Return the folder with the libraries, and build them if they do not exist.

    Of several processes that call it at the same time, one builds and the others wait.

    Raises:
        CannotBuild: There is no compiler, or it fails.
    """
    reason = why_not()
    compiler = _compiler()
    if reason or compiler is None:
        raise CannotBuild(reason)
    folder = cache_folder() / _key(compiler, version("torch"))
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            try:
                _build(compiler, unfinished)
                unfinished.rename(folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def why_not():
    """Return the reason why this machine cannot build the libraries, or an empty text."""
    if _compiler() is None:
        return "there is no C++ compiler (g++, clang++, or what CXX names)"
    return ""


def _compiler():
    named = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return named if named is not None and shutil.which(named) else None


def environment_of_this_process():
    """Return the environment of this process with the tests on the path."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys([str(ROOT), *paths]))}


def environment(*, devices, mib=None):
    """Return variables of a process whose torch has `devices` simulated devices of `mib` MiB."""
    variables = environment_of_this_process()
    variables["SIMULATED_DEVICE"] = str(built())
    variables["SIMULATED_DEVICES"] = str(devices)
    variables["PYTHONPATH"] = os.pathsep.join([str(FOLDER / "boot"), variables["PYTHONPATH"]])
    if mib is not None:
        variables["SIMULATED_DEVICE_MIB"] = str(mib)
    return variables


def _torch_folder():
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _key(compiler, torch_version):
    seen = hashlib.blake2b(f"{compiler} {torch_version} {sys.version}".encode(), digest_size=10)
    for source in sorted(SOURCES.iterdir()):
        seen.update(source.name.encode() + source.read_bytes())
    seen.update(Path(__file__).read_bytes())
    return seen.hexdigest()


def _build(compiler, folder):
    torch = _torch_folder()
    include = (
        f"-I{torch}/include",
        f"-I{torch}/include/torch/csrc/api/include",
        f"-I{sysconfig.get_paths()['include']}",
    )
    objects = {unit: folder / f"{unit}.o" for unit in (*CORE, GROUP)}

    def compile_unit(unit):
        source = SOURCES / f"{unit}.cpp"
        _run(compiler, *FLAGS, *include, "-c", source, "-o", objects[unit])

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        list(workers.map(compile_unit, objects))  # raises their errors

    # The path of this torch is not stored, so that another clone can use the library
    # (python/library.py).
    libraries = (f"-L{torch}/lib", "-ltorch_cpu", "-lc10", "-ltorch")
    core = folder / "simulated_device.so"
    soname = "-Wl,-soname,simulated_device.so"
    _run(compiler, "-shared", "-o", core, soname, *(objects[unit] for unit in CORE), *libraries)
    group = folder / "simulated_nccl.so"
    link_to_core = (f"-L{folder}", "-l:simulated_device.so", "-Wl,-rpath,$ORIGIN")
    arguments = (objects[GROUP], *link_to_core, libraries[0], "-ltorch_python", *libraries[1:])
    _run(compiler, "-shared", "-o", group, *arguments)
    for file in objects.values():
        file.unlink()


def _run(*command):
    arguments = [str(argument) for argument in command]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{' '.join(arguments)}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    print(built())
