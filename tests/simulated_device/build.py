"""Build the simulated device with the system's compiler, once for these sources and this torch."""

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

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = HERE / "sources"
CORE = ("streams", "races", "memory", "device", "kernels", "journal", "profiler", "interface")
GROUP = "process_group"
FLAGS = (
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-w",
    "-DNDEBUG",
)  # as torch was built: some of its classes have other fields without NDEBUG


class CannotBuild(Exception):
    """The reason."""


def cache_folder():
    """Outside of the repository; of this user."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(
        os.environ.get("SIMULATED_DEVICE_CACHE")
        or os.path.join(home, "plait-tests", "simulated_device")
    )


def built():
    """The folder with the libraries, which are built first where they are not there. Raises CannotBuild. Several processes may ask at once:
    one builds, the others wait."""
    reason, compiler, torch_version = why_not(), _compiler(), version("torch")
    if reason or compiler is None:
        raise CannotBuild(reason)
    folder = cache_folder() / _key(compiler, torch_version)
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
    """What is missing on this machine; empty where nothing is."""
    if _compiler() is None:
        return "there is no C++ compiler (g++, clang++, or what CXX names)"
    return ""


def _compiler():
    named = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return named if named is not None and shutil.which(named) else None


def environment_of_this_process():
    """With the tests on the path."""
    paths = dict.fromkeys(
        [str(ROOT), *(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)]
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def environment(*, devices, mib=None):
    """Variables of a process whose torch has `devices` simulated devices of `mib` MiB."""
    here = environment_of_this_process()
    return {
        **here,
        "SIMULATED_DEVICE": str(built()),
        "SIMULATED_DEVICES": str(devices),
        "PYTHONPATH": os.pathsep.join([str(HERE / "boot"), here["PYTHONPATH"]]),
        **({} if mib is None else {"SIMULATED_DEVICE_MIB": str(mib)}),
    }


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
    include = [
        f"-I{torch}/include",
        f"-I{torch}/include/torch/csrc/api/include",
        f"-I{sysconfig.get_paths()['include']}",
    ]
    units = [*CORE, GROUP]
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        compiled = [
            workers.submit(
                _run,
                compiler,
                *FLAGS,
                *include,
                "-c",
                SOURCES / f"{unit}.cpp",
                "-o",
                folder / f"{unit}.o",
            )
            for unit in units
        ]
        for unit in compiled:
            unit.result()
    found = [
        f"-L{torch}/lib"
    ]  # no path of this torch is kept: another clone's is loaded before (python/library.py)
    core, group = folder / "simulated_device.so", folder / "simulated_nccl.so"
    objects = [folder / f"{unit}.o" for unit in CORE]
    _run(
        compiler,
        "-shared",
        "-o",
        core,
        "-Wl,-soname,simulated_device.so",
        *objects,
        *found,
        "-ltorch_cpu",
        "-lc10",
        "-ltorch",
    )
    beside = [f"-L{folder}", "-l:simulated_device.so", "-Wl,-rpath,$ORIGIN"]
    _run(
        compiler,
        "-shared",
        "-o",
        group,
        folder / f"{GROUP}.o",
        *beside,
        *found,
        "-ltorch_python",
        "-ltorch_cpu",
        "-lc10",
        "-ltorch",
    )
    for unit in units:
        (folder / f"{unit}.o").unlink()


def _run(*command):
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CannotBuild(f"{' '.join(str(word) for word in command)}\n{done.stderr[-4000:]}")


if __name__ == "__main__":
    print(built())
