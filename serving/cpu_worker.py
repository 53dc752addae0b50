"""vLLM's worker for CPUs, in a server that tells the experts of its tokens: see serving/engine.py.

Of vLLM's second model runner (vllm/v1/worker/gpu/model_runner.py) this is what has to do with experts, for its first.
"""

from types import SimpleNamespace

import numpy as np
from vllm.distributed.aux_output_connector.worker import get_aux_output_connector
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker


class Runner(CPUModelRunner):
    def initialize_kv_cache(self, kv_cache_config, is_profiling: bool = False, **options) -> None:
        super().initialize_kv_cache(kv_cache_config, is_profiling, **options)
        if not is_profiling:
            self.experts = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    def execute_model(self, scheduler_output, intermediate_tensors=None):
        self.experts.begin_step(scheduler_output.aux_output_connector_metadata)
        return super().execute_model(scheduler_output, intermediate_tensors)

    def sample_tokens(self, grammar_output):
        if self.execute_model_state is None:  # no token was scheduled
            return super().sample_tokens(grammar_output)
        batch, count = self.input_batch, self.input_batch.num_reqs
        step = SimpleNamespace(
            req_ids=batch.req_ids,
            query_start_loc_np=self.query_start_loc.np[: count + 1].copy(),
            num_computed_tokens_np=batch.num_computed_tokens_cpu[:count].copy(),
        )
        pending = self.experts.prepare_output(step)
        output = super().sample_tokens(grammar_output)
        if pending is not None:  # it is on the rank that answers
            sampled = np.array([len(ids) for ids in output.sampled_token_ids])  # 0 for a part of a prompt
            pending.enqueue_cpu_copy(num_sampled=sampled, num_rejected=np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output


class Worker(CPUWorker):
    def init_device(self) -> None:
        super().init_device()
        self.model_runner = Runner(self.vllm_config, self.device)
