"""The engine's processes where it is divided over several GPUs: one a rank, started by `mpirun` with one command.

Rank 0 is the engine process as it is with one GPU. It checks the engine, sends its config to the others over MPI, and
leads: its executor tells theirs what to compute. They only hold theirs until it ends. When one of them dies, `mpirun`
ends all, which the supervisor sees as the death of the engine.
"""

from __future__ import annotations

import logging
import os
import sys

from harness.manifest import read_manifest
from harness.runtime import wire
from harness.runtime.config import ResolvedConfig
from harness.runtime.engine_process import run_or_exit, set_up_logging
from harness.runtime.tensorrt_llm.core import TrtllmCore
from harness.runtime.tensorrt_llm.load import executor_api, make_executor, open_engine, start

logger = logging.getLogger(__name__)


def lead(config: ResolvedConfig) -> TrtllmCore:
    """Check the engine, have all ranks load it, and return the core over it.

    Raises:
        HarnessError: it cannot be run; says why. The other ranks wait for a config that does not come, until `mpirun`
            is ended.
    """
    from mpi4py import MPI

    manifest, used = open_engine(config)
    MPI.COMM_WORLD.bcast(wire.encode_config(config), root=0)
    return start(config, manifest, used)


def follow() -> None:
    """Load this rank's part of the engine and compute what rank 0 says, until it ends."""
    from mpi4py import MPI

    config = wire.decode_config(MPI.COMM_WORLD.bcast(None, root=0))
    manifest = read_manifest(config.engine_dir)
    assert manifest.gpu is not None
    assert config.gpu is not None
    executor = make_executor(executor_api(), config, manifest.gpu, config.gpu)
    executor.shutdown()  # returns when rank 0 has told all ranks to end


def main() -> None:
    """Entry point of every rank, whose arguments are ADDRESS and LOG_LEVEL."""
    from mpi4py import MPI

    address, log_level = sys.argv[1:]
    set_up_logging(log_level)
    if MPI.COMM_WORLD.Get_rank() == 0:
        run_or_exit(lead, address)
        return
    try:
        follow()
    except Exception:
        logger.exception("rank %d failed", MPI.COMM_WORLD.Get_rank())
        logging.shutdown()
        os._exit(1)  # mpirun ends the other ranks
