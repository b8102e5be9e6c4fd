"""The process that runs a model's program: shuts itself in, runs the program, says whether it passed.

Started as a script by `code_execution`, imports nothing of the project. Shutting in is done by the kernel: resource
limits, and a seccomp filter that allows what computing and reading files take and refuses every other system call. So a
program cannot open a socket, start a process or a thread, send a signal, or make, change or delete a file. It can read
what the user can read, but tell nobody. Numbers of system calls are libseccomp's business.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import sys
from typing import Any

LIBRARY = "libseccomp.so.2"

_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_MASKED_EQUAL = 7
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_READING_CALLS = {"open": 1, "openat": 2}  # and which argument holds the flags
_CALLS = """
    access arch_prctl brk clock_getres clock_gettime clock_nanosleep close dup dup2 dup3 exit exit_group faccessat
    faccessat2 fstat futex getcwd getdents64 getegid geteuid getgid getpid getppid getrandom getrusage gettid
    gettimeofday getuid lseek lstat madvise membarrier mmap mprotect mremap munmap nanosleep newfstatat poll ppoll
    pread64 pselect6 read readlink readlinkat readv restart_syscall rseq rt_sigaction rt_sigprocmask rt_sigreturn
    sched_getaffinity sched_yield select set_robust_list set_tid_address sigaltstack stat statx sysinfo time times
    uname write writev
"""


class _Comparison(ctypes.Structure):
    """`struct scmp_arg_cmp` of libseccomp."""

    _fields_ = (("argument", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def limit_resources(*, cpu_seconds: int, wall_seconds: int, memory_bytes: int) -> None:
    """Let the kernel end this process when its time is up, and refuse it memory, large files and more than few files.

    Limits that are lower already are kept.
    """
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 4096,  # of the verdict, the only file that is open for writing
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_NPROC: 1,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        _, most = resource.getrlimit(kind)
        least = limit if most == resource.RLIM_INFINITY else min(limit, most)
        resource.setrlimit(kind, (least, least))
    signal.alarm(wall_seconds)


def restrict_system_calls() -> None:
    """Install the filter; there is no way back.

    Raises:
        OSError: the library is missing, or the kernel does not filter.
    """
    library: Any = ctypes.CDLL(LIBRARY)
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_REFUSE)))

    def allow(name: str, *comparisons: _Comparison) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # else this architecture has no such call
            array = (_Comparison * len(comparisons))(*comparisons)
            _check(library.seccomp_rule_add_array(rules, ctypes.c_uint32(_ALLOW), number, len(comparisons), array))

    for name in _CALLS.split():
        allow(name)
    for name, flags in _READING_CALLS.items():
        allow(name, _Comparison(flags, _MASKED_EQUAL, _WRITING, os.O_RDONLY))
    _check(library.seccomp_load(rules))


def _check(status: int) -> None:
    if status < 0:
        raise OSError(-status, os.strerror(-status))


def run(program: str) -> str:
    """Run a program; empty if it came to its end, else the error that ended it."""
    try:
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
    except BaseException as error:  # SystemExit too: a program that leaves early has not passed
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def main() -> None:
    """Read the job from stdin, write the verdict to stdout.

    It is the job's secret if the program passed, the secret and an error if it was not run, else what went wrong.
    """
    job = json.load(sys.stdin.buffer)
    verdict = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != here]
    try:
        limit_resources(**job["limits"])
        restrict_system_calls()
    except (OSError, ValueError) as error:
        os.write(verdict, f"{job['secret']}{error}".encode())
    else:
        failure = run(job["program"])
        # a program that writes here, or ends the process, does not know the secret
        os.write(verdict, (failure or job["secret"]).encode("utf-8", "replace"))
    os._exit(0)


if __name__ == "__main__":
    main()
