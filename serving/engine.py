"""What vLLM's engine is started with: of a mixture of experts, it tells which ones each token went through, if it can.

vLLM notes experts where its routers choose, keeps them beside the blocks of its prefix cache and hands them out with a
request's tokens (vllm/distributed/aux_output_connector). Its check lets that through for its second model runner alone,
which needs Triton and so a GPU. On CPUs, serving/cpu_worker.py does for the first one what the second does.
"""

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"  # what vLLM takes there by itself


class Arguments(AsyncEngineArgs):
    """`enable_return_routed_experts` None: with a mixture of experts, if vLLM lets it."""

    def create_engine_config(self, *arguments, **options) -> VllmConfig:
        told, asked = self.aux_output_config, self.aux_output_config.enable_return_routed_experts
        told.enable_return_routed_experts = False
        config = super().create_engine_config(*arguments, **options)
        left_open = self.enable_return_routed_experts is None and config.model_config.is_moe
        if not asked and not left_open:
            return config
        told = config.aux_output_config
        told.enable_return_routed_experts = True
        worker = config.parallel_config.worker_cls
        if worker == CPU_WORKER:
            config.parallel_config.worker_cls = "serving.cpu_worker.Worker"
            config.__class__ = ConfigOnCpus
        try:
            config._verify_aux_output_compatibility()
        except ValueError as error:
            if asked:
                raise
            told.enable_return_routed_experts = False
            config.parallel_config.worker_cls = worker
            print(f"vllm_server: it does not tell the experts of its tokens: {error}", flush=True)
        else:
            if not asked:
                print(
                    "vllm_server: it tells the experts of its tokens, for --router_replay "
                    "(--no-enable-return-routed-experts turns that off)",
                    flush=True,
                )
        return config


class ConfigOnCpus(VllmConfig):
    """Goes to the engine's processes, which check it once more."""

    def _verify_aux_output_compatibility(self) -> None:
        if self.aux_output_config.enabled and self.speculative_config is not None:
            raise ValueError("on CPUs --enable-return-routed-experts is incompatible with speculative decoding")
        VllmConfig._verify_aux_output_compatibility(SecondRunner(self))


class SecondRunner:
    """A config as vLLM's check would see that of its second runner."""

    use_v2_model_runner = True

    def __init__(self, config: VllmConfig):
        self.config = config

    def __getattr__(self, name: str):
        return getattr(self.config, name)
